"""Text of one model: prompts and chats to token ids, and token ids back to text.

Every error of the libraries below leaves this module as a `QuireError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from ..common.config import ToolCallParser
from ..common.errors import ConfigError, CorruptCheckpoint, InvalidRequest, QuireError, UnsupportedModel
from ..common.heap import return_unused_memory
from ..common.prompts import PromptImage
from ..common.types import SamplingParams
from ..model.files import is_gguf
from ..model.runner import ReasoningMarkers
from ..model.weights.gguf import open_gguf
from .facade import NO_TEMPLATE
from .markup.markup import MARK
from .markup.model_markup import find_markup
from .text import (
    ChatTemplate,
    Detokenizer,
    IncrementalDetokenizer,
    Markup,
    StopDetokenizer,
    Token,
    Tokenizer,
    has_tokenizer,
)
from .text.chat_tokens import ChatTokens
from .text.content_marks import RenderedChat
from .text.folder_tokenizer import unknown_end_ids
from .text.text_files import read_json, text_folder
from .text.tokenizer import library_failure
from .validator import SAMPLING_RANGES

if TYPE_CHECKING:
    from .images import ImageReader

# Keys of GGUF files below general.sampling, and the sampling parameters.
FILE_SAMPLING = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}

SPACES = ("\n", "\n\n", "\n\n\n", " ", "  ", "\t", " \n", "\r\n")  # white space that templates put around markers

SYSTEM_ROLES = ("system", "developer")  # roles of messages that replace the system prompt of the options

_log = structlog.get_logger("quire.text")


class TextProcessor:
    """The tokenizer and chat template of one model.

    A model without a tokenizer takes and returns token ids only. Any thread may call its methods.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        default_sampling: Mapping[str, float] | None = None,
        tool_call_parser: ToolCallParser = "auto",
        *,
        special_tokens_in_content: bool = False,
        open_tool_arguments: bool = False,
        chat_problem: str = NO_TEMPLATE,
        system_prompt: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._system_prompt = system_prompt  # system message of chats that have none
        self.open_tool_arguments = open_tool_arguments
        self.chat_template = chat_template
        self.chat_problem = "" if chat_template is not None else chat_problem  # reason why chats are refused
        self.default_sampling = dict(default_sampling or {})  # recommendation of the model
        self.image_reader: ImageReader | None = None  # reader of a model that takes images
        self.markup = Markup()  # the model's syntax of reasoning and tool calls
        self._chat_tokens: ChatTokens | None = None  # None if content may have special tokens
        if tokenizer is not None and chat_template is not None:
            tokens = tokenizer.special_tokens
            config = chat_template.tokenizer_config
            self.markup = find_markup(tool_call_parser, chat_template.source, tokens, config)
            if not special_tokens_in_content:
                self._chat_tokens = ChatTokens(tokenizer, chat_template)

    @classmethod
    def load(
        cls,
        path: Path,
        tool_call_parser: ToolCallParser = "auto",
        *,
        chat_template: str | None = None,
        special_tokens_in_content: bool = False,
        open_tool_arguments: bool = False,
        system_prompt: str | None = None,
        default_sampling: Mapping[str, float] = MappingProxyType({}),
    ) -> TextProcessor:
        """Read the tokenizer and templates of a folder or GGUF file. The file `chat_template` replaces the model's.

        `default_sampling` replaces recommendations of the model.

        If the model's template cannot be used, `chat_problem` says why. Raises CorruptCheckpoint or UnsupportedModel,
        and ConfigError for a file `chat_template`, a `system_prompt` or `default_sampling` that cannot be used.
        """
        given_sampling = checked_sampling(default_sampling)
        tokenizer = Tokenizer(path) if has_tokenizer(path) else None
        if not is_gguf(path):
            _warn_of_end_ids(path)
        return_unused_memory()  # building a tokenizer frees as much memory as it keeps
        template, problem = load_template(path, chat_template)
        if system_prompt is not None and template is None:
            raise ConfigError(f"system_prompt cannot be used: {problem}")
        return cls(
            tokenizer,
            template,
            {**_default_sampling(text_folder(path)), **_file_sampling(path), **given_sampling},
            tool_call_parser,
            special_tokens_in_content=special_tokens_in_content,
            open_tool_arguments=open_tool_arguments,
            chat_problem=problem,
            system_prompt=system_prompt,
        )

    @property
    def longest_token(self) -> int:
        """Characters of the longest token; 0 without a tokenizer."""
        return self.tokenizer.longest_token if self.tokenizer else 0

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a generation; empty without a tokenizer."""
        return self.tokenizer.eos_token_ids if self.tokenizer else frozenset()

    def reasoning_markers(self, vocab_size: int) -> ReasoningMarkers | None:
        """Return the tokens around the model's reasoning; None if the model has none, or writes them as plain text."""
        if self.tokenizer is None:
            return None
        reasoning = self.markup.reasoning
        names: tuple[str, ...]
        if self.markup.channels:
            names = ("<|channel|>", "analysis", "<|message|>", "<|end|>")
        elif reasoning is not None:
            names = (reasoning.open.removeprefix(MARK), reasoning.close.removeprefix(MARK))
        else:
            return None
        added = self.tokenizer.added_tokens
        tokens = [(added[name],) if name in added else self.encode(name, False) for name in names]
        *opening, closing = tokens
        open_ids = tuple(token_id for token in opening for token_id in token)
        if names[0] not in added or names[-1] not in added or max(*open_ids, *closing) >= vocab_size:
            return None
        spaces = {token[0] for token in (self.encode(text, False) for text in SPACES) if len(token) == 1}
        return ReasoningMarkers(open_ids, closing[0], tuple(sorted(spaces)), repeats=self.markup.channels)

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of `text`. Raises GenerationFailed if the tokenizer fails."""
        assert self.tokenizer is not None, "Validator.check_text refuses text for a model without tokenizer"
        return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_chat(
        self, chat: RenderedChat, files: Sequence[bytes] = ()
    ) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
        """Return the token ids of a rendered chat with the tokens of its images in place, and the images.

        Raises InvalidRequest for a file that is not an image within limits, and as `encode`.
        """
        if not files:
            return self._encode_rendered(chat), ()
        assert self.image_reader is not None, "Validator.check_prompt refuses images for a model without a tower"
        expanded, images = self.image_reader.insert(chat.marked, files)
        token_ids = self._encode_rendered(chat.with_marked(expanded))
        return token_ids, self.image_reader.locate(token_ids, images)

    def _encode_rendered(self, chat: RenderedChat) -> tuple[int, ...]:
        """Return the token ids of a rendered chat, in which the template has written the special tokens."""
        if self._chat_tokens is None:
            return self.encode(chat.text, add_special_tokens=False)
        encode = partial(self.encode, add_special_tokens=False)
        try:
            return tuple(self._chat_tokens.encode(chat, encode))
        except QuireError:
            raise
        except BaseException as error:
            raise library_failure("the text could not be tokenized", error) from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`, with the names of special tokens unless they are skipped."""
        assert self.tokenizer is not None, "Validator.check_vocabulary refuses ids for a model without tokenizer"
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> Token:
        """Return one entry of the vocabulary."""
        assert self.tokenizer is not None, "Validator.check_vocabulary refuses ids for a model without tokenizer"
        return self.tokenizer.token(token_id)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Return a chat as prompt text that includes its special tokens. Raises InvalidRequest."""
        assert self.chat_template is not None, "Validator.check_prompt refuses chats for a model without template"
        if self._system_prompt is not None and not any(each.get("role") in SYSTEM_ROLES for each in messages):
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        marks = None if self._chat_tokens is None else self._chat_tokens.marks
        return self.chat_template.render_marked(messages, tools, variables, syntax=self.markup.calls, marks=marks)

    def has_text(self, token_ids: Sequence[int]) -> bool:
        """Return whether any of the tokens adds text; True without a tokenizer."""
        return self.tokenizer is None or any(map(self.tokenizer.adds_text, token_ids))

    def detokenizer(
        self,
        params: SamplingParams,
        num_echoed: int = 0,
        *,
        markup: frozenset[int] = frozenset(),
        prompt: Sequence[int] = (),
    ) -> Detokenizer | None:
        """Return a new detokenizer for one sequence, which begins with the last `num_echoed` tokens of the prompt.

        Return None without a tokenizer. The text has the special tokens in `markup`. With a grammar it has the bytes
        that the grammar allows, unless it begins with the prompt.
        """
        if self.tokenizer is None:
            return None
        text = IncrementalDetokenizer(
            self.tokenizer,
            markup,
            context=prompt[: len(prompt) - num_echoed],
            as_bytes=params.structured_outputs is not None and not num_echoed,
        )
        if not params.stop:
            return text
        min_tokens = num_echoed + max(params.min_tokens, 1)
        return StopDetokenizer(text, params.stop, params.include_stop_str_in_output, min_tokens)


def load_template(path: Path, given: str | None) -> tuple[ChatTemplate | None, str]:
    """Return a model's chat template, or the file `given`; without one, the reason why chats are refused.

    Raises ConfigError for a file `given` that cannot be used.
    """
    try:
        return ChatTemplate.load(path, None if given is None else Path(given)), ""
    except UnsupportedModel:
        return None, NO_TEMPLATE
    except CorruptCheckpoint as error:
        if given is not None:
            raise ConfigError(f"chat_template: {given}: {error}") from error
        return None, f"this model's chat template cannot be used: {error}; --chat-template FILE replaces it"


def checked_sampling(sampling: Mapping[str, float]) -> dict[str, float]:
    """Return the parameters of the option `default_sampling`. Raises ConfigError for one that no request may have."""
    found: dict[str, float] = {}
    for name, value in sampling.items():
        if name not in SAMPLING_RANGES:
            names = ", ".join(SAMPLING_RANGES)
            raise ConfigError(f"default_sampling: {name!r} is not one of {names}")
        check, least, most = SAMPLING_RANGES[name]
        try:
            found[name] = int(value) if name == "top_k" and float(value).is_integer() else value
            check(name, found[name], least, most)
        except InvalidRequest as error:
            raise ConfigError(f"default_sampling: {error}") from None
    return found


def _file_sampling(path: Path) -> dict[str, float]:
    """Return the sampling parameters that the metadata of a GGUF file recommends; none for a folder.

    A value that no request may have is left out.
    """
    metadata = open_gguf(path).metadata if is_gguf(path) else {}
    found: dict[str, float] = {}
    for key, name in FILE_SAMPLING.items():
        value: Any = metadata.get(f"general.sampling.{key}")
        if type(value) is float:
            value = float(str(np.float32(value)))  # decimal value before its conversion to f32
        _recommend(found, name, value, f"general.sampling.{key}")
    return found


def _default_sampling(folder: Path) -> dict[str, float]:
    """Return the sampling parameters that generation_config.json recommends.

    A value that no request may have is left out: clients did not set it and could not correct it.
    """
    content = read_json(folder / "generation_config.json")
    found: dict[str, float] = {}
    for name in SAMPLING_RANGES:
        _recommend(found, name, content.get(name), f"{folder / 'generation_config.json'}: {name}")
    return found


def _warn_of_end_ids(folder: Path) -> None:
    """Warn of end ids in config.json without a logit, which never occur."""
    unknown, limit = unknown_end_ids(folder)
    if unknown:
        key = f"{folder / 'config.json'}: eos_token_id"
        _log.warning("end ids beyond the vocabulary are ignored", key=key, ids=unknown, vocab_size=limit)


def _recommend(found: dict[str, float], name: str, value: Any, key: str) -> None:
    """Add a parameter to `found`, or warn that the value of `key` cannot be one. None means no value."""
    if value is None:
        return
    check, least, most = SAMPLING_RANGES[name]
    if name == "top_k" and type(value) is float and value.is_integer():
        value = int(value)
    try:
        if type(value) not in (int, float):
            raise InvalidRequest(f"{name} must be a number")
        check(name, value, least, most)
    except InvalidRequest:
        _log.warning("a recommendation is left out", key=key, value=repr(value)[:60])
    else:
        found[name] = value
