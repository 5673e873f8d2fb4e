"""Markup: the syntax of reasoning and tool calls in a family of models.

One description yields the parser and the grammar. In a literal of a description, a space stands for optional white
space; everything else is exact. A marker that is a special token of the vocabulary begins with MARK in the literals and
in the text to parse, so ordinary text that spells its name is not a marker.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeVar

MARK = "\ufdd0"  # a noncharacter, which grammars exclude from texts
ID = "\ufdd1"  # the place of a call's number in a literal

ArgumentsForm = Literal["json", "parameters", "python", "assignments", "gemma"]  # assignments: NAME=JSON, NAME=JSON


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning before the answer, between two literals. The prompt may already end with `open`."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class AnswerTags:
    """Two literals around the answer. Neither belongs to it, and models may leave them out."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """A list of calls: `begin`, calls with `separator` between them, `end`.

    A call is `open`, its tool's name, `middle`, its arguments, `close`. With `id_open`, this literal and an id of the
    call may follow the name. A `bare` list may leave out `begin` where the answer begins with it. A `generic` syntax is
    not the chat template's: the system message describes it to the model, and earlier calls are text.

    A parameter is `key_open`, its name, `key_close`, its value, `value_close`; white space may follow it. Values are on
    lines of their own if `on_lines`. A text in the arguments of Gemma is between two `quote`.
    """

    open: str
    middle: str
    close: str
    begin: str = ""
    separator: str = " "
    end: str = ""
    bare: bool = False
    generic: bool = False
    arguments: ArgumentsForm = "json"
    id_open: str = ""
    key_open: str = ""
    key_close: str = ""
    value_close: str = ""
    on_lines: bool = False
    quote: str = ""

    @property
    def trigger(self) -> str:
        """The literal that ends the answer and begins the calls."""
        return (self.begin or self.open).partition(" ")[0]


@dataclass(frozen=True, slots=True)
class Markup:
    """The markup of one family: its reasoning and its tool calls, either of which may be missing.

    With `channels`, everything is a message of OpenAI's harmony format instead.
    """

    reasoning: Reasoning | None = None
    calls: CallSyntax | None = None
    channels: bool = False
    answer: AnswerTags | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)  # ids of the special tokens in the literals, by name

    def with_special(self, special: Mapping[str, int]) -> Markup:
        """Return the markup with MARK before each of a vocabulary's special tokens, ids by name."""
        if self.channels:
            return replace(self, tokens={name: special[name] for name in CHANNEL_TOKENS if name in special})
        literals = "\n".join((*_literals(self.calls), *_literals(self.reasoning), *_literals(self.answer)))
        tokens = {name: token for name, token in special.items() if name and name in literals}
        if not tokens:
            return self
        return Markup(
            _marked(self.reasoning, tokens),
            _marked(self.calls, tokens),
            answer=_marked(self.answer, tokens),
            tokens=tokens,
        )

    def without_calls(self) -> Markup:
        """Return the markup of an output without calls."""
        literals = [*_literals(self.reasoning), *_literals(self.answer)]
        kept = {name: token for name, token in self.tokens.items() if any(name in each for each in literals)}
        return self if self.channels else Markup(self.reasoning, answer=self.answer, tokens=kept)

    def marked(self, name: str) -> str:
        """Return a marker in the form that it has in the text."""
        return MARK + name if name in self.tokens else name


CHANNEL_TOKENS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
THINK = Reasoning("<think>", "</think>")
BRACKETS = Reasoning("[THINK]", "[/THINK]")
SEED_THINK = Reasoning("<seed:think>", "</seed:think>")
THOUGHT = Reasoning("<|channel>thought", "<channel|>")
COMMAND_THINKING = Reasoning("<|START_THINKING|>", "<|END_THINKING|>")
ANSWER_TAGS = AnswerTags("<answer>", "</answer>")  # Hunyuan
RESPONSE_TAGS = AnswerTags("<response>", "</response>")  # ERNIE 4.5

_NAME_FIRST = ' { "name" : "'
_ARGUMENTS = '" , "arguments" : '

# The names are those that vLLM gives to its parsers.
KNOWN_MARKUPS: dict[str, Markup] = {
    "hermes": Markup(calls=CallSyntax(f"<tool_call>{_NAME_FIRST}", _ARGUMENTS, " } </tool_call>")),
    "hermes_list": Markup(
        calls=CallSyntax(_NAME_FIRST, _ARGUMENTS, " }", begin="<tool_call> [", separator=" ,", end=" ] </tool_call>")
    ),
    "qwen3_coder": Markup(
        calls=CallSyntax(
            "<tool_call> <function=",
            "> ",
            " </function> </tool_call>",
            arguments="parameters",
            key_open="<parameter=",
            key_close=">",
            value_close="</parameter>",
            on_lines=True,
        )
    ),
    "seed_oss": Markup(
        calls=CallSyntax(
            "<seed:tool_call> <function=",
            "> ",
            " </function> </seed:tool_call>",
            arguments="parameters",
            key_open="<parameter=",
            key_close=">",
            value_close="</parameter>",
        )
    ),
    "glm45": Markup(
        calls=CallSyntax(
            "<tool_call>",
            " ",
            " </tool_call>",
            arguments="parameters",
            key_open="<arg_key>",
            key_close="</arg_key> <arg_value>",
            value_close="</arg_value>",
        )
    ),
    "gemma4": Markup(calls=CallSyntax("<|tool_call>call:", "{", "}<tool_call|>", arguments="gemma", quote='<|"|>')),
    "cohere_command3": Markup(
        calls=CallSyntax(
            f' {{ "tool_call_id" : "{ID}" , "tool_name" : "',
            '" , "parameters" : ',
            " }",
            begin="<|START_ACTION|> [",
            separator=" ,",
            end=" ] <|END_ACTION|>",
        )
    ),
    "hunyuan_a13b": Markup(
        calls=CallSyntax(_NAME_FIRST, _ARGUMENTS, " }", begin="<tool_calls> [", separator=" ,", end=" ] </tool_calls>")
    ),
    "llama3_json": Markup(
        calls=CallSyntax(
            ' { "name" : "', '" , "parameters" : ', " }", begin="<|python_tag|>", separator=" ; ", bare=True
        )
    ),
    "mistral": Markup(calls=CallSyntax("[TOOL_CALLS]", "[ARGS] ", "", separator="", id_open="[CALL_ID]")),
    "mistral_list": Markup(
        calls=CallSyntax(_NAME_FIRST, _ARGUMENTS, " }", begin="[TOOL_CALLS] [", separator=" ,", end=" ]")
    ),
    "phi4_mini_json": Markup(
        calls=CallSyntax(
            _NAME_FIRST, _ARGUMENTS, " }", begin="<|tool_call|> [", separator=" ,", end=" ] <|/tool_call|>"
        )
    ),
    "deepseek_v3": Markup(
        calls=CallSyntax(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json ",
            " ```<｜tool▁call▁end｜>",
            begin="<｜tool▁calls▁begin｜>",
            end=" <｜tool▁calls▁end｜>",
        )
    ),
    "deepseek_v31": Markup(
        calls=CallSyntax(
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜> ",
            " <｜tool▁call▁end｜>",
            begin="<｜tool▁calls▁begin｜>",
            end=" <｜tool▁calls▁end｜>",
        )
    ),
    "granite": Markup(
        calls=CallSyntax(_NAME_FIRST, _ARGUMENTS, " }", begin="<|tool_call|> [", separator=" ,", end=" ]")
    ),
    "nemotron_json": Markup(
        calls=CallSyntax(_NAME_FIRST, _ARGUMENTS, " }", begin="<TOOLCALL> [", separator=" ,", end=" ] </TOOLCALL>")
    ),
    "lfm2": Markup(
        calls=CallSyntax(
            "",
            " ( ",
            " )",
            begin="<|tool_call_start|> [ ",
            separator=" , ",
            end=" ] <|tool_call_end|>",
            arguments="python",
        )
    ),
    "olmo3": Markup(
        calls=CallSyntax("", " ( ", " )", begin="<function_calls> ", end=" </function_calls>", arguments="assignments")
    ),
    "openai": Markup(channels=True),
}
# The markup of models whose template shows no syntax of calls.
GENERIC_MARKUP = Markup(calls=CallSyntax(f"<tool_call>{_NAME_FIRST}", _ARGUMENTS, " } </tool_call>", generic=True))

Part = TypeVar("Part", Reasoning | None, CallSyntax | None, AnswerTags | None)


def _literals(part: Reasoning | CallSyntax | AnswerTags | None) -> list[str]:
    return [] if part is None else [value for value in asdict(part).values() if isinstance(value, str)]


def _marked(part: Part, names: Collection[str]) -> Part:
    if part is None:
        return part
    pattern = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
    literals: dict[str, Any] = {
        name: pattern.sub(lambda found: MARK + found.group(), value)
        for name, value in asdict(part).items()
        if isinstance(value, str)
    }
    return replace(part, **literals)
