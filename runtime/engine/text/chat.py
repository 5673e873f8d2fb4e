"""Chat messages to one prompt, by the template of the model.

A template is untrusted code and messages are untrusted data: templates run only in the sandbox of `sandbox.py`, on
copies of the messages that are limited in size and depth. Every failure is a typed error. Engine processes import this
module and render nothing, so jinja2 is imported with the first template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.errors import CorruptCheckpoint, InvalidRequest
from ..markup.markup import CallSyntax
from .chat_history import adapted, check_complete
from .chat_input import MAX_SCHEMA_DEPTH, ValueLimit, checked_messages, offered_tool
from .content_marks import ContentMarks, RenderedChat
from .template_abilities import Abilities, TemplateTimeout
from .template_files import read_sources

if TYPE_CHECKING:
    from jinja2 import Template

MAX_SOURCE_CHARACTERS = 1 << 20
MAX_ERROR_CHARACTERS = 500  # a template's error may quote the messages
RENDER_TIMEOUT_S = 2.0
RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})  # variables that a request cannot set


class ChatTemplate:
    """A compiled chat template, which can use `variables` (bos_token, eos_token, …) by name.

    `tool_source` is the source of a separate template for chats with tools. Raises CorruptCheckpoint if a source is not
    a template.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any] | None = None,
        *,
        tool_source: str | None = None,
        tokenizer_config: Mapping[str, Any] | None = None,
    ) -> None:
        from .template_functions import template_sandbox

        self.source = source + (tool_source or "")
        self.tokenizer_config = tokenizer_config or {}  # config of the folder; empty for a GGUF file
        self._variables = {"tools": None, "add_generation_prompt": True, **(variables or {})}
        self._sandbox = template_sandbox()
        self._sources = [source] if tool_source is None else [source, tool_source]
        templates = [self._compiled(each) for each in self._sources]
        self._template = templates[0]
        self._tool_template = templates[-1]
        self._abilities: dict[tuple[Template, bool], Abilities] = {}

    def _compiled(self, source: str) -> Template:
        from jinja2 import TemplateSyntaxError

        if len(source) > MAX_SOURCE_CHARACTERS:
            raise CorruptCheckpoint(f"the chat template has {len(source)} characters; at most {MAX_SOURCE_CHARACTERS}")
        try:
            return self._sandbox.from_string(source)
        except TemplateSyntaxError as error:
            if "{{ ." in source or "{{- ." in source or "{{ if ." in source or "{{- range" in source:
                raise CorruptCheckpoint("the chat template is a Go template, as Ollama has, and not Jinja") from error
            raise CorruptCheckpoint(f"the chat template is broken at line {error.lineno}: {error.message}") from error
        # The compilers of jinja2 and Python raise a dozen other types for deep nesting.
        except Exception as error:
            raise CorruptCheckpoint(f"the chat template cannot be compiled: {error}") from error

    @classmethod
    def load(cls, path: str | Path, given: Path | None = None) -> ChatTemplate:
        """Read the template of a folder or GGUF file, or the file `given` instead.

        Raises UnsupportedModel without a template, CorruptCheckpoint for an unusable one, ConfigError if `given` cannot
        be read.
        """
        sources = read_sources(Path(path), given)
        return cls(
            sources.default,
            sources.special_tokens,
            tool_source=sources.tool_use,
            tokenizer_config=sources.tokenizer_config,
        )

    @cached_property
    def literals(self) -> frozenset[str]:
        """The texts and the names of attributes in the template's expressions."""
        from jinja2 import nodes

        found: set[str] = set()
        for source in self._sources:
            tree = self._sandbox.parse(source)
            found.update(each.value for each in tree.find_all(nodes.Const) if isinstance(each.value, str))
            found.update(each.attr for each in tree.find_all(nodes.Getattr))
        return frozenset(found)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        syntax: CallSyntax | None = None,
    ) -> str:
        """Return the prompt text. It includes special tokens, so encode it with `add_special_tokens=False`.

        `tools` are functions in OpenAI's form; `variables` are for the template, such as `enable_thinking`. `syntax` is
        the model's syntax of calls, for templates that do not read tools or calls. Rendering may take up to
        RENDER_TIMEOUT_S: call this method in a thread. Messages are maps with text keys, of texts, numbers, booleans,
        None, lists and maps. Raises InvalidRequest if they are not, or if the template refuses them, exceeds its limits
        or does not end.
        """
        return self.render_marked(messages, tools, variables, syntax=syntax, marks=None).text

    def render_marked(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None,
        *,
        syntax: CallSyntax | None,
        marks: ContentMarks | None,
    ) -> RenderedChat:
        """Return the prompt as `render` does, with `marks` in the content of the request."""
        limit = ValueLimit()
        given: Any = {
            key: limit.copy(value, MAX_SCHEMA_DEPTH, "chat_template_kwargs: a variable")
            for key, value in (variables or {}).items()
        }
        if refused := sorted(RESERVED & given.keys()):
            raise InvalidRequest(f"chat_template_kwargs must not have {refused[0]}")
        chat = checked_messages(messages, limit)
        offered = [offered_tool(limit.copy(each, MAX_SCHEMA_DEPTH, "tools: a tool")) for each in tools]
        chat_marks = None
        if marks is not None:
            chat_marks = marks.begin([chat, offered, given])
            chat = [chat_marks.message(each) for each in chat]
            offered = [chat_marks.value(each) for each in offered]
            given = {key: chat_marks.value(value, keeps_added=True) for key, value in given.items()}
        shown = [] if syntax is not None and syntax.generic else offered  # tools that the template writes itself
        template = self._template_for(chat, shown)
        chat = adapted(chat, offered, self._abilities_of(template, bool(shown)), syntax)
        text = self._run(template, chat, shown or None, given)
        check_complete(chat, text)
        return RenderedChat(text) if chat_marks is None else chat_marks.rendered(text)

    def render_unchanged(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Return the prompt text of unchanged messages, as sentence-transformers renders them.

        No reply follows unless `add_generation_prompt` is true in `variables`. Raises InvalidRequest.
        """
        chat = ValueLimit().copy_messages(messages)
        return self._run(self._template, chat, None, {"add_generation_prompt": False, **variables})

    def uses(self, variable: str) -> bool:
        """Return whether the template mentions a variable of this name."""
        return variable in self.source

    def _template_for(self, chat: list[Any], tools: list[Any]) -> Template:
        """Return the template for tools if there are tools, or if only it reads the calls of the chat."""
        if tools or self._tool_template is self._template or not any(each.get("tool_calls") for each in chat):
            return self._tool_template if tools else self._template
        reads_calls = [self._abilities_of(each, False).reads_calls for each in (self._template, self._tool_template)]
        return self._tool_template if reads_calls == [False, True] else self._template

    def _abilities_of(self, template: Template, has_tools: bool) -> Abilities:
        """Return the abilities of `template` for chats with tools, or without."""
        key = template, has_tools
        if key not in self._abilities:  # several threads may each create the same entry
            self._abilities[key] = Abilities(
                lambda messages, tools: self._run(template, messages, tools, {}), has_tools, self.uses("type")
            )
        return self._abilities[key]

    def _run(self, template: Template, messages: list[Any], tools: list[Any] | None, given: Mapping[str, Any]) -> str:
        variables = {**self._variables, **given, "messages": messages, "tools": tools}
        kind: type[InvalidRequest] = InvalidRequest
        try:
            return self._sandbox.run(lambda: template.render(variables), RENDER_TIMEOUT_S)
        except TimeoutError:
            kind = TemplateTimeout
            reason = f"the chat template took longer than {RENDER_TIMEOUT_S} s for these messages"
        # A template can raise any error of its expressions: TypeError, ZeroDivisionError, SecurityError, …
        except Exception as error:
            reason = f"the chat template refused these messages: {error}"[:MAX_ERROR_CHARACTERS]
        raise kind(reason)  # not within `except`: the other error's traceback holds the template's values
