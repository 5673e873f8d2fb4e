"""Outputs that another server began, replayed so that they continue with the same bytes.

The tokens that a client has received pass through the detokenizer and the parser again, and the result is dropped,
since it was sent before. Afterwards both hold back exactly the text that the other server held back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator
from typing import NamedTuple

from ..common.errors import InvalidRequest
from ..common.types import FinishReason, OutputChunk, SamplingParams
from .facade import GenerateRequest, NewParser
from .text import Detokenizer, OutputParser

SLICE_TOKENS = 1024  # tokens replayed at a time: with many stop strings a token takes some tens of microseconds


class ReplayedOutput(NamedTuple):
    """An output that continues after its first tokens."""

    choice: int
    token_ids: tuple[int, ...]
    detokenizer: Detokenizer | None
    parser: OutputParser | None


class Continuation(NamedTuple):
    """All outputs of a request that another server began."""

    open: tuple[ReplayedOutput, ...]
    ends: tuple[OutputChunk, ...]  # ends of outputs whose last token the client has, but not their end
    num_former_tokens: int  # tokens of outputs that are not open


def replay(
    request: GenerateRequest,
    params: SamplingParams,
    stop_ids: Collection[int],
    new_detokenizer: Callable[[], Detokenizer | None],
    new_parser: NewParser | None,
) -> Iterator[Continuation | None]:
    """Replay the outputs of a request with `generated` in slices: yield None after each slice, and finally all outputs.

    Compute each slice in a thread. `params` are the parameters that the request runs with. Raises InvalidRequest for
    ids after the end of an output.
    """
    still_open: list[ReplayedOutput] = []
    ends: list[OutputChunk] = []
    num_former_tokens = 0
    for choice, token_ids in enumerate(request.generated or ()):
        if choice in request.ended:
            num_former_tokens += len(token_ids)
            continue
        output = ReplayedOutput(choice, token_ids, new_detokenizer(), new_parser() if new_parser else None)
        reason = yield from _push(output, params, stop_ids)
        if reason is None:
            still_open.append(output)
        else:
            num_former_tokens += len(token_ids)
            ends.append(
                OutputChunk(first_index=len(token_ids), token_ids=(), text="", finish_reason=reason, choice=choice)
            )
    yield Continuation(tuple(still_open), tuple(ends), num_former_tokens)


def _push(
    output: ReplayedOutput, params: SamplingParams, stop_ids: Collection[int]
) -> Generator[None, None, FinishReason | None]:
    """Replay the tokens of one output. Return the reason why the last token ends it, or None. Raises InvalidRequest."""
    choice, token_ids, detokenizer, parser = output
    reason: FinishReason | None = None
    for num_tokens, token_id in enumerate(token_ids, 1):
        if reason is not None:
            raise InvalidRequest(
                f"generated: output {choice} ends with its token {num_tokens - 1} ({reason}), but has {len(token_ids)}"
            )
        text = "" if detokenizer is None else detokenizer.push((token_id,))
        if parser is not None and text:
            parser.feed(text)
        is_stop_string = detokenizer is not None and detokenizer.stop_string is not None
        if is_stop_string or (token_id in stop_ids and num_tokens >= params.min_tokens):
            reason = "stop"
        elif num_tokens == params.max_tokens:
            reason = "length"
        if num_tokens % SLICE_TOKENS == 0:
            yield
    yield
    return reason
