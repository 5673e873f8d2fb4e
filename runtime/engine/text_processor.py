"""Text of one model: prompts and chats to token ids, and token ids back to text.

Whatever the libraries below raise leaves this module as a `QuireError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from ..common.config import ToolCallParser
from ..common.errors import ConfigError, CorruptCheckpoint, GenerationFailed, QuireError, UnsupportedModel
from ..common.heap import return_unused_memory
from ..common.prompts import PromptImage
from ..common.types import SamplingParams
from ..model.files import is_gguf
from ..model.weights.gguf import GGUFFile
from .facade import NO_TEMPLATE
from .text import ChatTemplate, IncrementalDetokenizer, Markup, Token, Tokenizer, has_tokenizer
from .text.chat_tokens import ChatTokens
from .text.content_marks import RenderedChat
from .text.model_markup import find_markup
from .text.text_files import read_json, text_folder

if TYPE_CHECKING:
    from .images import ImageReader

# Keys of GGUF files below general.sampling: the sampling parameter, its least and its largest value.
FILE_SAMPLING = {
    "temp": ("temperature", 0, 100),
    "top_p": ("top_p", 1e-6, 1),
    "top_k": ("top_k", -1, 2**31 - 1),
    "min_p": ("min_p", 0, 1),
    "penalty_repeat": ("repetition_penalty", 1e-6, 100),
}
# Sampling parameters that a model's generation_config.json may recommend.
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


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
        chat_problem: str = NO_TEMPLATE,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.chat_problem = "" if chat_template is not None else chat_problem  # why chats are refused
        self.default_sampling = dict(default_sampling or {})  # what the model recommends
        self.image_reader: ImageReader | None = None  # of a model that takes images
        self.markup = Markup()  # how the model writes reasoning and tool calls
        self._chat_tokens: ChatTokens | None = None  # None if content may have special tokens
        if tokenizer is not None and chat_template is not None:
            tokens, config = tokenizer.special_tokens, chat_template.tokenizer_config
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
    ) -> TextProcessor:
        """Read what a model's folder or GGUF file has. The file `chat_template` replaces the model's template.

        A template of the model that cannot be used is `chat_problem`. Raises CorruptCheckpoint or UnsupportedModel, and
        ConfigError for a file `chat_template` that cannot be used.
        """
        tokenizer = Tokenizer(path) if has_tokenizer(path) else None
        return_unused_memory()  # building a tokenizer frees as much as stays
        template, problem = load_template(path, chat_template)
        return cls(
            tokenizer,
            template,
            {**_default_sampling(text_folder(path)), **_file_sampling(path)},
            tool_call_parser,
            special_tokens_in_content=special_tokens_in_content,
            chat_problem=problem,
        )

    @property
    def longest_token(self) -> int:
        """Characters of the longest token; 0 without a tokenizer."""
        return self.tokenizer.longest_token if self.tokenizer else 0

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end a generation; empty without a tokenizer."""
        return self.tokenizer.eos_token_ids if self.tokenizer else frozenset()

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of `text`. Raises GenerationFailed if the tokenizer fails."""
        assert self.tokenizer is not None, "Validator.check_text refuses text for a model without tokenizer"
        try:
            return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except Exception as error:  # the library raises bare Exception
            raise GenerationFailed(f"the prompt could not be tokenized: {error}") from error

    def encode_chat(
        self, chat: RenderedChat, files: Sequence[bytes] = ()
    ) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
        """Return the token ids of a rendered chat with the tokens of its images in place, and the images.

        Raises InvalidRequest for a file that is no image within limits, and as `encode`.
        """
        if not files:
            return self._encode_rendered(chat), ()
        assert self.image_reader is not None, "Validator.check_prompt refuses images for a model without a tower"
        expanded, images = self.image_reader.insert(chat.marked, files)
        token_ids = self._encode_rendered(chat.with_marked(expanded))
        return token_ids, self.image_reader.locate(token_ids, images)

    def _encode_rendered(self, chat: RenderedChat) -> tuple[int, ...]:
        """Return the token ids of a rendered chat, whose template has written the special tokens."""
        if self._chat_tokens is None:
            return self.encode(chat.text, add_special_tokens=False)
        encode = partial(self.encode, add_special_tokens=False)
        try:
            return tuple(self._chat_tokens.encode(chat, encode))
        except QuireError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise GenerationFailed(f"the prompt could not be tokenized: {error}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids` without special tokens."""
        assert self.tokenizer is not None, "Validator.check_vocabulary refuses ids for a model without tokenizer"
        return self.tokenizer.decode(token_ids)

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
        marks = None if self._chat_tokens is None else self._chat_tokens.marks
        return self.chat_template.render_marked(messages, tools, variables, syntax=self.markup.calls, marks=marks)

    def detokenizer(
        self,
        params: SamplingParams,
        num_echoed: int = 0,
        *,
        markup: frozenset[int] = frozenset(),
        prompt: Sequence[int] = (),
    ) -> IncrementalDetokenizer | None:
        """Return a new detokenizer for one sequence, which begins with the last `num_echoed` tokens of the prompt.

        Return None without a tokenizer. The text has the special tokens in `markup`. With a grammar it has the bytes
        that the grammar allows, unless it begins with the prompt.
        """
        if self.tokenizer is None:
            return None
        return IncrementalDetokenizer(
            self.tokenizer,
            params.stop,
            params.include_stop_str_in_output,
            num_echoed + max(params.min_tokens, 1),
            markup,
            context=prompt[: len(prompt) - num_echoed],
            as_bytes=params.structured_outputs is not None and not num_echoed,
        )


def load_template(path: Path, given: str | None) -> tuple[ChatTemplate | None, str]:
    """Return a model's chat template, or that of the file `given`; without one, why chats are refused.

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


def _file_sampling(path: Path) -> dict[str, float]:
    """Return the sampling parameters that the metadata of a GGUF file recommends; none for a folder.

    A value that no request may have is left out.
    """
    metadata = GGUFFile(path).metadata if is_gguf(path) else {}
    found: dict[str, float] = {}
    for key, (name, least, most) in FILE_SAMPLING.items():
        value: Any = metadata.get(f"general.sampling.{key}")
        if type(value) in (int, float) and least <= value <= most:
            found[name] = float(str(np.float32(value))) if type(value) is float else value  # as it was before f32
        elif value is not None:
            _log.warning("a recommendation is left out", key=f"general.sampling.{key}", value=repr(value)[:60])
    return found


def _default_sampling(folder: Path) -> dict[str, float]:
    """Return the sampling parameters in generation_config.json. Raises CorruptCheckpoint for one that is no number."""
    path = folder / "generation_config.json"
    content = read_json(path)
    given = {name: content.get(name) for name in RECOMMENDED}
    for name, value in given.items():
        if value is not None and type(value) not in (int, float):
            raise CorruptCheckpoint(f"{path}: {name} must be a number, not {value!r:.60}")
    return {name: value for name, value in given.items() if value is not None}
