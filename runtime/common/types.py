"""Types of requests and outputs that engine, server, clients and `LLM` share.

Frozen structs, and a function that joins chunks; no I/O. `SamplingParams` checks the types of its fields; ranges depend
on the model, and `engine/validator.py` checks them.
`SamplingParams` is sent as a msgpack map, the other structs as parts of TOKENS and DONE.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import msgspec

from ...scheduler import FinishReason as FinishReason  # exported: the runtime uses the type from here
from .default_sampling import NATIVE_TEMPERATURE
from .errors import GenerationFailed, InvalidRequest
from .options import Option, nearest_name, option, options_of, suggestion
from .prompts import shown

SAMPLING_OPTIONS = "Sampling"
_option = partial(option, SAMPLING_OPTIONS)


class _NamesRightArgument(msgspec.StructMeta):
    """Metaclass whose structs name the nearest field in the TypeError for an unknown argument."""

    def __call__(self, *args: Any, **fields: Any) -> Any:
        if unknown := sorted(fields.keys() - set(self.__struct_fields__)):
            name = unknown[0]
            names = ", ".join(self.__struct_fields__)
            advice = suggestion(name, self.__struct_fields__)
            raise TypeError(f"{self.__name__} has no field {name!r}{advice}; the fields are {names}")
        return super().__call__(*args, **fields)


class StructuredOutputs(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    metaclass=_NamesRightArgument,
):
    """The rule that the output must match. Exactly one field is set and not empty, else InvalidRequest is raised.

    `json` is a JSON schema as an object, which becomes text, or as text (true: any JSON value), `json_object` any JSON
    object, `regex` a regular expression for the whole output, `choice` a list of texts, `lark` and `gbnf` context-free
    grammars in the notation of Lark and of llama.cpp.
    """

    json: dict[str, Any] | bool | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    lark: str | None = None
    gbnf: str | None = None

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in self.__struct_fields__ if not self._is_default(name)}
        if len(given) != 1:
            names = ", ".join(self.__struct_fields__)
            found = " and ".join(given) or "none"
            raise InvalidRequest(f"structured_outputs must have exactly one of {names}, not {found}")
        for name, value in given.items():
            if value in ("", (), []):
                raise InvalidRequest(f"structured_outputs: {name} must not be empty")
            if name != "json":
                msgspec.structs.force_setattr(self, name, _converted(name, value))
        if isinstance(self.json, dict):  # converted to text: maps of a frame nest a few levels only
            msgspec.structs.force_setattr(self, "json", _json(self.json, "structured_outputs: the schema"))

    def _is_default(self, name: str) -> bool:
        return getattr(self, name) is (False if name == "json_object" else None)


def _converted(name: str, value: object) -> object:
    """Return the value of a field of `StructuredOutputs` in the field's type: a list of texts becomes a tuple."""
    kinds: dict[str, tuple[Any, str]] = {
        "json_object": (bool, "true or false"),
        "choice": (tuple[str, ...], "a list of texts"),
    }
    kind, allowed = kinds.get(name, (str, "a text"))
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise InvalidRequest(f"structured_outputs: {name} must be {allowed}, not {shown(value)}") from None


def _json(value: object, what: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} is not JSON: {error}") from error


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which of a chat's tools its answer may or must call."""

    needed: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None  # tools that may be called; None: all
    parallel: bool = True  # several calls in one answer


class ChatOptions(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    metaclass=_NamesRightArgument,
):
    """How a chat's answer is made and read: its reasoning and its tool calls come apart from its text.

    `tools` are in OpenAI's form, `{"type": "function", "function": {…}}`, each as a map, which becomes text, or as JSON
    text. Raises InvalidRequest for a map that is not JSON.
    """

    tools: tuple[str, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    template_variables: dict[str, Any] = {}  # variables of the chat template, such as `enable_thinking`

    def __post_init__(self) -> None:
        if not all(isinstance(tool, str) for tool in self.tools):
            texts = tuple(tool if isinstance(tool, str) else _json(tool, "a tool") for tool in self.tools)
            msgspec.structs.force_setattr(self, "tools", texts)


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=_NamesRightArgument
):
    """How logits become tokens, and when to stop. Names are vLLM's; the default is greedy decoding.

    Raises InvalidRequest for a value of another type, TypeError for an unknown name. Numbers and arrays of numpy are
    accepted, and one text for `stop`.
    Order of application: structured_outputs, logit_bias, penalties, temperature, min_p, top_k, top_p;
    the end marker that thinking_token_budget forces comes before all of them but structured_outputs. The tokens of a
    request with a seed depend on the model, the prompt and these parameters only, whatever else runs. `n` samples:
    output i has the tokens of a request with seed + i (modulo 2^64). The outputs of `best_of` and `beam_width` are
    ranked, best first, and come at the end instead of as a stream.
    """

    max_tokens: Annotated[int, _option("Maximum number of tokens to generate.", unit="tokens")] = 128
    min_tokens: Annotated[int, _option("Tokens to generate before the output may end.", unit="tokens")] = 0
    temperature: Annotated[float, _option("Randomness of the samples; 0 takes the most likely token.")] = (
        NATIVE_TEMPERATURE
    )
    top_k: Annotated[int, _option("Sample from the k most likely tokens; 0: from all.", unit="tokens")] = 0
    top_p: Annotated[float, _option("Sample from the most likely tokens that together have this probability.")] = 1.0
    min_p: Annotated[
        float, _option("Leave out tokens with less than this share of the most likely token's probability.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, _option("Above 1: make tokens that occurred in prompt or output less likely; below 1: more likely.")
    ] = 1.0
    presence_penalty: Annotated[float, _option("Subtracted from the logit of every token in the output so far.")] = 0.0
    frequency_penalty: Annotated[
        float, _option("Subtracted from a token's logit once for each time it is in the output so far.")
    ] = 0.0
    logit_bias: Annotated[dict[int, float] | None, _option("Token id -> number added to its logit.")] = None
    seed: Annotated[int | None, _option("Seed of the random numbers.", default="drawn, see Usage.seed")] = None
    stop: Annotated[tuple[str, ...], _option("Texts at which the output ends.")] = ()
    stop_token_ids: Annotated[tuple[int, ...], _option("Token ids at which the output ends.")] = ()
    include_stop_str_in_output: Annotated[bool, _option("Keep the stop text at the end of the output.")] = False
    ignore_eos: Annotated[bool, _option("Continue after the model's end-of-sequence token.")] = False
    logprobs: Annotated[
        int | None,
        _option("Report the log probability of each token and of this many alternatives.", default="not reported"),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        _option("The rule that the output must match, see StructuredOutputs.", default="anything"),
    ] = None
    thinking_token_budget: Annotated[
        int | None,
        _option(
            "Tokens of reasoning after which its end marker is forced; 0: no reasoning.",
            unit="tokens",
            default="no limit",
        ),
    ] = None
    n: Annotated[int, _option("Outputs per prompt.")] = 1
    best_of: Annotated[
        int | None,
        _option("Outputs to sample; the n with the highest cumulative log probability are returned.", default="n"),
    ] = None
    beam_width: Annotated[int, _option("Beams of a beam search, which needs temperature 0; 0: no beam search.")] = 0
    length_penalty: Annotated[
        float, _option("A beam's score is its cumulative log probability / length ** length_penalty.")
    ] = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if value is not kind.option.default:
                msgspec.structs.force_setattr(self, name, kind.checked(value))


def check_arguments(given: Iterable[str], arguments: Sequence[str]) -> None:
    """Raise TypeError that names the right argument of a request, or the sampling parameter, if one does not exist."""
    for name in sorted(set(given) - set(arguments)):
        nearest = nearest_name(name, (*SamplingParams.__struct_fields__, *arguments))
        advice = f"did you mean {nearest}=…?" if nearest else f"the arguments are {', '.join(arguments)}"
        if nearest in SamplingParams.__struct_fields__:
            advice = f"write sampling_params=SamplingParams({nearest}=…)"
        raise TypeError(f"a request has no argument {name!r}; {advice}")


@dataclass(frozen=True, slots=True)
class _Kind:
    """The type of one sampling parameter."""

    option: Option
    hint: Any

    def checked(self, value: object) -> object:
        """Return the value as the field's type. Raises InvalidRequest."""
        try:
            try:
                return msgspec.convert(value, self.hint, strict=True)
            except msgspec.ValidationError:  # rare, and slower: a number of numpy
                return msgspec.convert(_plain(value), self.hint, strict=True)
        except (msgspec.ValidationError, RecursionError):
            allowed = f"{self.option.allowed()}{' or None' if self.option.default is None else ''}"
            raise InvalidRequest(f"{self.option.name} must be {allowed}, not {shown(value)}") from None


def _plain(value: object) -> object:
    """Return a value of Python's own types, also of numpy's."""
    match value:
        case bool() | str() | bytes():
            return value
        case Integral():
            return int(value)
        case Real():
            return float(value)
        case Mapping():
            return {_plain(key): _plain(item) for key, item in value.items()}
        case Iterable():
            return [_plain(item) for item in value]
    return value


_HINTS = get_type_hints(SamplingParams)
_KINDS = {name: _Kind(option, _HINTS[name]) for name, option in options_of(SamplingParams).items()}


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural logarithm of one generated token's probability before sampling parameters, and the top alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens and milliseconds that a finished request took, all its outputs together."""

    prompt_tokens: int  # counted once for all outputs
    completion_tokens: int  # generated tokens; with best_of, including samples that are not returned
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    recomputed_tokens: int = 0  # tokens prefilled again after a preemption
    seed: int = 0  # seed of the first output
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0  # decoding time of the slowest output
    stall_ms: float = 0.0  # preempted time of the output that was preempted longest
    # Generated tokens of reasoning, without its markers; None: the model's markers are not single tokens.
    reasoning_tokens: int | None = None


DeltaKind = Literal["reasoning", "content", "call", "arguments"]


class Delta(NamedTuple):
    """The next piece of an output. A `call` begins the next tool call; its text is the tool's name."""

    kind: DeltaKind
    text: str


class OutputChunk(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One piece of a stream: tokens of one output that arrived together, and the text that they completed.

    `text` never ends inside a UTF-8 character or inside a possible stop string, so it may lag behind `token_ids`. A
    chunk with `finish_reason` is the last of its output. Only the last chunk of a stream has `usage`.
    """

    first_index: int  # index of token_ids[0] among the output's tokens
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    choice: int = 0  # index of the output
    cumulative_logprob: float | None = None  # logprob of the whole output, only where it ranked the outputs
    stop_reason: int | str | None = None  # the id in `stop_token_ids`, or the text in `stop`, that ended the output
    deltas: tuple[Delta, ...] | None = None  # reasoning and calls of a chat with `ChatOptions`, which `text` lacks


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a tool, requested by an answer."""

    name: str
    arguments: str  # JSON


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One finished continuation of a prompt."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason
    cumulative_logprob: float | None  # None unless the request has logprobs, best_of or beam_width
    reasoning: str = ""  # reasoning of a chat with `ChatOptions`, as are the calls below
    tool_calls: tuple[ToolCall, ...] = ()


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """A finished request. It has the token ids, text, logprobs and finish reason of its first output."""

    outputs: tuple[CompletionOutput, ...]
    usage: Usage
    prompt_token_ids: tuple[int, ...] | None = None  # None from clients: the protocol does not send it back

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason


def join_chunks(chunks: Iterable[OutputChunk]) -> tuple[CompletionOutput, ...]:
    """Return the outputs of one finished stream, in order. Raises GenerationFailed if one has not ended."""
    by_choice: dict[int, list[OutputChunk]] = {}
    for chunk in chunks:
        by_choice.setdefault(chunk.choice, []).append(chunk)
    return tuple(_join(by_choice[choice]) for choice in sorted(by_choice))


def _join(chunks: list[OutputChunk]) -> CompletionOutput:
    reason = chunks[-1].finish_reason
    if reason is None:
        raise GenerationFailed("the stream ended without a finish reason")
    logprobs = None
    if any(chunk.logprobs is not None for chunk in chunks):
        logprobs = tuple(entry for chunk in chunks for entry in chunk.logprobs or ())
    ranked_by = [chunk.cumulative_logprob for chunk in chunks if chunk.cumulative_logprob is not None]
    total = None if logprobs is None else sum(entry.logprob for entry in logprobs)
    deltas = [delta for chunk in chunks for delta in chunk.deltas or ()]
    return CompletionOutput(
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        text="".join(chunk.text for chunk in chunks),
        logprobs=logprobs,
        finish_reason=reason,
        cumulative_logprob=ranked_by[0] if ranked_by else total,
        reasoning="".join(delta.text for delta in deltas if delta.kind == "reasoning"),
        tool_calls=_tool_calls(deltas),
    )


def _tool_calls(deltas: Iterable[Delta]) -> tuple[ToolCall, ...]:
    calls: list[tuple[str, list[str]]] = []  # names, and the pieces of their arguments
    for kind, text in deltas:
        if kind == "call":
            calls.append((text, []))
        elif kind == "arguments":
            calls[-1][1].append(text)
    return tuple(ToolCall(name=name, arguments="".join(pieces)) for name, pieces in calls)
