"""The subcommands of `quire`: their names and help texts. Each is imported when it runs."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, get_args

from cyclopts import App, ArgumentCollection
from cyclopts.help import ColumnSpec, DefaultFormatter, HelpEntry, HelpPanel, NameRenderer
from cyclopts.help.specs import get_default_parameter_columns

from ..common.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

COMMANDS = {  # a function and a file have the same name, with _ for -
    "serve": "Serve a model until interrupted.",
    "engine-host": "Offer the engine processes of this machine to API servers (`quire serve --engine-hosts`).",
    "run": "Print the answer of a model to PROMPT; without PROMPT, chat in the terminal.",
    "chat": "Chat with a model in the terminal, or line by line in a pipe.",
    "generate": "Continue PROMPT in this process and print the text as it is generated.",
    "demo": "Start a server on the bundled models, stream from it as several users, search the documentation, print "
    "what each user saw, and stop.",
    "bench": "Measure prefill and decode of a model and compare them with the limits of this machine.",
    "simulate": "Predict how a model serves a stream of requests.\n\n"
    "The scheduler and the pager run in virtual time. Nothing is loaded; config.json or a GGUF header is enough.",
    "loadtest": "Put a server under load and report the latencies of its clients.\n\n"
    "Flags and result keys are those of `vllm bench serve`. Without an address, a server on the bundled model runs for "
    "the duration of the test.",
    "run-batch": "Answer a file of requests, one JSON line each in OpenAI's format, with a model or by a server; a run "
    "that was interrupted continues.",
    "perplexity": "Measure how well MODEL predicts the file TEXT, as llama.cpp's llama-perplexity does.",
    "plan": "Print the memory that serving a model takes, without loading it.",
    "pull": "Download a model by its name on a hub into the cache, or the files of it that have changed.",
    "list": "List the models in the cache of downloads.",
    "rm": "Remove models from the cache of downloads.",
    "show": "Print what is known of a model's files and what they lack, without reading or downloading its weights.",
    "models": "List the model families, types of weights and tokenizers that are supported.",
    "token": "Make a key for TENANT; print the lines that admit it in the file of `quire serve --auth-tokens`, and the "
    "key on standard error.",
    "info": "Print versions, the instruction set level and the number of threads.",
}
VALUES = {"INT": "N", "FLOAT": "N", "STR": "TEXT"}  # the library's name of a flag's value -> Quire's


class _HelpFormatter(DefaultFormatter):
    """The library's tables with a column of flags that is wide enough for each flag: a broken flag cannot be copied.

    Help texts have at least half of the terminal.
    """

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        self.column_specs = None if panel.format == "command" else _columns
        super().__call__(console, options, panel.copy(entries=[_with_our_value(entry) for entry in panel.entries]))


def _with_our_value(entry: HelpEntry) -> HelpEntry:
    """Return an entry in which a name from VALUES replaces the Python type of the value."""
    name = (entry.metavar or "").removesuffix("...")
    return entry.copy(metavar=entry.metavar.replace(name, VALUES[name])) if entry.metavar and name in VALUES else entry


def _columns(console: Console, options: ConsoleOptions, entries: list[HelpEntry]) -> tuple[ColumnSpec, ...]:
    columns = get_default_parameter_columns(console, options, entries)
    words = (word for entry in entries for label in entry.display_labels_with_metavar for word in label.split())
    longest = max(map(len, words)) + 2  # the indent of a continued line
    width = min(max(longest, math.ceil(console.width * 0.35)), console.width // 2)
    return tuple(
        # The renderer has already wrapped the text. The table treats a column that may wrap as shrinkable: it would
        # give the help texts too much width, and cut them.
        column.copy(renderer=NameRenderer(width), min_width=width, max_width=width, no_wrap=True)
        if column.header == "Option"
        else column
        for column in columns
    )


def _check_whole_numbers(_: App, __: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Raise ConfigError for a whole number that is written as another number: the library would round it."""
    for argument in arguments:
        if argument.hint is int or int in get_args(argument.hint):
            for token in argument.tokens:
                if re.fullmatch(r"[+-]?[0-9]+", token.value) is None:
                    raise ConfigError(f"{token.keyword} must be a whole number, not {token.value!r}")


app = App(
    name="quire",
    config=_check_whole_numbers,
    help="Serve language models on CPUs with paged KV memory; outputs do not depend on the load.",
    version_flags=["--version"],
    help_formatter=_HelpFormatter(),
    help_format="plaintext",  # "plaintext": with other formats, every help text imports a markdown parser
)
app.register_install_completion_command(help="Install the completion of commands and flags for this shell.")
for _name, _help in COMMANDS.items():
    _function = _name.replace("-", "_")
    app.command(f"quire.runtime.cli.{_function}:{_function}", name=_name, help=_help)
