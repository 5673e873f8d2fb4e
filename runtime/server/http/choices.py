"""A choice of an answer as it grows: its reasoning, its text, its tool calls and its logprobs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ...common.types import Delta, DeltaKind, OutputChunk, TokenLogprobs
from ...engine.facade import NewParser
from ...engine.text import OutputParser
from .logprobs import ChatLogprobs, Columns, CompletionLogprobs
from .prompt_logprobs import PromptPart


class Run:
    """A piece of a choice of one kind: reasoning, text of the answer, or one call of the tool `name`."""

    def __init__(self, kind: DeltaKind, name: str) -> None:
        self.kind = kind
        self.name = name
        self.texts: list[str] = []  # texts of a call: its arguments
        self.columns: list[Columns] = []  # logprobs of its text

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def takes(self, kind: DeltaKind) -> bool:
        """Return whether a delta of this kind is a part of the run."""
        return kind == ("arguments" if self.kind == "call" else self.kind)


class Choice:
    """One choice as it grows: its parts for a whole answer, and its logprobs.

    With a `parser` its text is reasoning, answer and tool calls; without one it is the answer.
    """

    def __init__(self, logprobs: ChatLogprobs | CompletionLogprobs | None) -> None:
        self.logprobs = logprobs
        self.parser: OutputParser | None = None
        self.prompt: PromptPart | None = None  # prompt that the chunks begin with
        self.echoed: tuple[str, Columns | None] | None = None  # the prompt that begins the text, and its logprobs
        self.texts: list[str] = []  # texts of the answer
        self.runs: list[Run] = []  # runs that a parser found
        self.num_calls = 0
        self.num_tokens = 0  # tokens that the engine has sent
        self.columns: list[Columns] = []
        self.token_ids = array("I")
        self.finish_reason = ""
        self.stop_reason: int | str | None = None
        self.num_reasoning_tokens = 0  # tokens between the markers; an estimate where chunks have several tokens
        self.shown: Sequence[TokenLogprobs] = ()  # tokens of the answer in the latest chunk
        self._held: list[TokenLogprobs] = []  # tokens of text that the parser may still show

    def read_with(self, new_parser: NewParser | None) -> None:
        """Read the text with a parser that `new_parser` makes, before the first chunk."""
        self.parser = None if new_parser is None else new_parser()

    def read(self, chunk: OutputChunk) -> tuple[Sequence[Delta], Columns | None]:
        """Return the deltas of the chunk, and the logprobs of its answer; None if the request asks for none.

        The calls are counted.
        """
        self.finish_reason = chunk.finish_reason or ""
        self.stop_reason = chunk.stop_reason
        self.num_tokens += len(chunk.token_ids)
        if self.parser is None:
            deltas: Sequence[Delta] = [Delta("content", chunk.text)] if chunk.text else ()
            self.shown = chunk.logprobs or ()
            return deltas, None if chunk.logprobs is None else self._piece(chunk.logprobs)
        before = self.parser.kind
        deltas = self.parser.feed(chunk.text)
        after = self.parser.kind
        if chunk.finish_reason is not None:
            deltas = [*deltas, *self.parser.finish(is_cut=chunk.finish_reason != "stop")]
        self.num_calls += sum(delta.kind == "call" for delta in deltas)
        if "reasoning" in (before, after):
            self.num_reasoning_tokens += max(0, len(chunk.token_ids) - (before != after))
        is_answer = after == "content" and (before == "content" or self.parser.holds_text)
        shown = self._shown_logprobs(chunk, deltas, is_answer=is_answer)
        self.shown = shown or ()
        return deltas, None if shown is None else self._piece(shown)

    def add(self, chunk: OutputChunk) -> int:
        """Keep the chunk for the whole answer, and return its approximate bytes there."""
        num_prompt_bytes = 0
        if self.prompt is not None:
            num_prompt_bytes = -self.prompt.num_bytes
            chunk = self.prompt.split(chunk)
            num_prompt_bytes += self.prompt.num_bytes
        deltas, piece = self.read(chunk)
        self.keep(deltas, piece)
        self.token_ids.extend(chunk.token_ids)
        num_bytes = len(chunk.text) + len(chunk.token_ids) * self.token_ids.itemsize + sum(map(len, piece or ()))
        return num_bytes + num_prompt_bytes

    def keep(self, deltas: Sequence[Delta], piece: Columns | None) -> list[int]:
        """Keep the deltas of a chunk for the whole answer. Return the index of each delta's run."""
        places: list[int] = []
        of_answer = None  # the run that the chunk's logprobs belong to
        for kind, text in deltas:
            if kind == "content":
                self.texts.append(text)
            if self.parser is None:
                continue
            if not (self.runs and self.runs[-1].takes(kind)):
                self.runs.append(Run(kind, text if kind == "call" else ""))
            if kind != "call":
                self.runs[-1].texts.append(text)
            places.append(len(self.runs) - 1)
            of_answer = self.runs[-1] if of_answer is None and kind == "content" else of_answer
        if piece is not None:
            self.columns.append(piece)
            if of_answer is not None:
                of_answer.columns.append(piece)
        return places

    def _shown_logprobs(
        self, chunk: OutputChunk, deltas: Sequence[Delta], *, is_answer: bool
    ) -> Sequence[TokenLogprobs] | None:
        """Return the logprobs of the answer's tokens; logprobs of possible markup are held back."""
        if chunk.logprobs is None or self.logprobs is None:
            return None
        self._held = [*self._held, *chunk.logprobs] if is_answer else []
        if not any(delta.kind == "content" for delta in deltas):
            return ()
        shown = self._held or chunk.logprobs
        self._held = []
        return shown

    def _piece(self, logprobs: Sequence[TokenLogprobs]) -> Columns | None:
        return None if self.logprobs is None else self.logprobs.piece(logprobs)

    def echo(self, text: str, first: int | None) -> None:
        """Begin with the text of the prompt, or of its first token, whose id is `first`."""
        piece = (
            self.logprobs.first(first) if isinstance(self.logprobs, CompletionLogprobs) and first is not None else None
        )
        self.echoed = text, piece
        self.texts.append(text)
        self.columns += [] if piece is None else [piece]

    def whole_logprobs(self) -> bytes:
        return b"null" if self.logprobs is None else self.logprobs.join(self.columns)
