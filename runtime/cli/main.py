"""The `quire` command: runs one command line and prints its errors.

Exit status: 0; 2 when the command line, an option, the model or a request is wrong; 1 when trying again may help, the
prefix cache was not saved or the output cannot be written; 130 when interrupted; 141 when the reader of the output has
closed its pipe.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from typing import TYPE_CHECKING

from ..common.quick_imports import quick_imports
from .first_line import write_first_line
from .interrupts import INTERRUPTED, exit_status, leave

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TextIO

    from cyclopts import ArgumentCollection, CycloptsError

    from ..common.errors import QuireError

PIPE_CLOSED = 141
LEAST_SIMILARITY = 0.75  # least similarity of an unknown flag and its suggestion; many flags have common parts
FLAGS_ELSEWHERE = {  # a flag of vLLM or llama-server -> flags here
    "--api-key": ("--token",),
    "--ctx-size": ("--max-model-len",),
    "-c": ("--max-model-len",),
    "--gpu-memory-utilization": ("--kv-cache-share", "--kv-cache-memory"),
    "--tensor-parallel-size": ("--threads", "--engine-processes"),
}

BARE_FLAGS = {"--ollama-port": "11434"}  # a flag that may have no value -> its value then
COMMANDS_ELSEWHERE = {  # a command of other servers -> the command here
    "ls": "`quire list` lists the models that are downloaded, `quire models` what is supported",
    "download": "`quire pull ORGANIZATION/NAME` downloads a model",
    "ps": "the status page of `quire serve`, at its operator port, shows what runs",
    "benchmark": "`quire bench MODEL` measures a model, `quire loadtest` a server",
    "help": "see `quire --help`",
    "version": "see `quire --version`",
}


def main() -> None:
    """Run the command line of this process and exit."""
    signal.signal(signal.SIGINT, leave)  # a KeyboardInterrupt during an import may be swallowed
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")  # some terminals cannot show every character
    write_first_line(sys.argv[1:])
    try:
        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        status = INTERRUPTED
    signal.signal(signal.SIGINT, leave)
    raise SystemExit(status)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status. Ctrl-C raises KeyboardInterrupt from the command."""
    with quick_imports():
        from cyclopts import CycloptsError

        from ..common.errors import QuireError
        from .app import app

    try:
        try:
            with quick_imports():
                command, bound, _ = app.parse_args(
                    _with_standard_input(_with_values(arguments)), exit_on_error=False, print_error=False
                )
            if signal.getsignal(signal.SIGINT) is leave:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            command(*bound.args, **bound.kwargs)
            sys.stdout.flush()
        except QuireError as error:
            print(f"quire: {_with_flags(error, arguments)}", file=sys.stderr)
            return exit_status(error)
        except CycloptsError as error:
            print(f"quire: {_in_our_words(error)}", file=sys.stderr)
            return 2
    except (BrokenPipeError, SystemExit) as end:
        if isinstance(end, SystemExit) and not isinstance(end.__context__, BrokenPipeError):  # rich exits with 1
            raise
        _discard(sys.stdout, sys.stderr)
        return PIPE_CLOSED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO) or error.filename is not None:  # a file named by the user
            raise
        print(f"quire: standard output cannot be written: {error.strerror}", file=sys.stderr)
        _discard(sys.stdout)
        return 1
    return 0


def _with_values(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the values of `BARE_FLAGS` that are last, or before another flag."""
    given: list[str] = []
    for name, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        is_bare = name in BARE_FLAGS and following.startswith("--") and "--" not in given
        given += [name, BARE_FLAGS[name]] if is_bare else [name]
    return given


def _with_standard_input(arguments: Sequence[str]) -> list[str]:
    """Return the arguments in a form that lets the library accept `-` as a value.

    `--flag -` becomes `--flag=-`, and arguments that belong to no flag come last, in order, after `--`.
    """
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    if "-" not in arguments[:end]:
        return list(arguments)
    from .app import app

    chain, apps, given = app.parse_commands(arguments[:end])
    if not chain or chain[-1].startswith("-"):  # no command, or a flag for help or version
        return list(arguments)
    collection = apps[-1].assemble_argument_collection(parse_docstring=False)
    takes_value = {name for argument in collection if argument.token_count()[0] for name in argument.names}
    flags: list[str] = []
    others: list[str] = []
    for each in given:
        if flags and flags[-1] in takes_value:
            flags[-1:] = [f"{flags[-1]}=-"] if each == "-" else [flags[-1], each]
        elif each.startswith("-") and each != "-":
            flags.append(each)
        else:
            others.append(each)
    return [*chain, *flags, "--", *others, *arguments[end + 1 :]]


def _open_closed_streams() -> None:
    """Open /dev/null in place of standard streams that are closed, before another file gets their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def _discard(*streams: TextIO) -> None:
    """Drop unwritten output, so that flushing at exit does not fail again."""
    for stream in streams:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _with_flags(error: QuireError, arguments: Sequence[str]) -> str:
    """Return the error's text with the names of options spelled as flags of the command that failed."""
    from .app import app
    from .flags import with_flags

    _, apps, _ = app.parse_commands(arguments)
    collection = apps[-1].assemble_argument_collection(parse_docstring=False)
    names = (name for argument in collection for name in argument.names if name.startswith("--"))
    return with_flags(str(error), [name.removeprefix("--").replace("-", "_") for name in names])


def _in_our_words(error: CycloptsError) -> str:
    """Return the fault of the command line in Quire's terms; the library's texts use internal terms."""
    from cyclopts import (
        CoercionError,
        MissingArgumentError,
        RepeatArgumentError,
        UnknownCommandError,
        UnknownOptionError,
        UnusedCliTokensError,
    )

    kinds = {int: "a whole number", float: "a number", bool: "true or false"}
    match error:
        case UnknownCommandError(unused_tokens=[name, *_]):
            return f"unknown command {name!r}; {COMMANDS_ELSEWHERE.get(name) or _nearest_command(name)}"
        case UnknownOptionError(token=token):
            given = (token.keyword or token.value).partition("=")[0]
            return f"unknown option {given}; {_advice(given, error.argument_collection) or _see_help(error)}"
        case UnusedCliTokensError(unused_tokens=[first, *_]):
            return f"unexpected argument {first!r}; {_see_help(error)}"
        case MissingArgumentError(argument=argument) if argument is not None:
            flag = error.keyword or next((token.keyword for token in argument.tokens if token.keyword), None)
            return f"{flag} needs a value" if flag else f"{argument.name} is missing"
        case CoercionError(token=token, target_type=kind) if token is not None and kind in kinds:
            return f"{token.keyword} must be {kinds[kind]}, not {token.value!r}"
        case RepeatArgumentError(token=token):
            return f"{token.keyword} is given twice"
    return str(error)


def _nearest_command(name: str) -> str:
    from ..common.options import nearest_name
    from .app import COMMANDS

    nearest = nearest_name(name, COMMANDS)
    return f"did you mean {nearest!r}?" if nearest else "see `quire --help`"


def _advice(flag: str, arguments: ArgumentCollection) -> str | None:
    """Return the replacement of an unknown flag, None if nothing is close to it."""
    from ..common.options import flag_name, nearest_name

    names = [name for argument in arguments for name in argument.names]
    if flag in ("--model", "-m") and "MODEL" in names:
        return "the model is the first argument"
    meant = [name for name in FLAGS_ELSEWHERE.get(flag, ()) if name in names]
    if not meant:
        plain = [name.removeprefix("--").replace("-", "_") for name in names if name.startswith("--")]
        nearest = nearest_name(flag.lstrip("-").replace("-", "_"), plain, LEAST_SIMILARITY)
        meant = [flag_name(nearest)] if nearest else []
    return f"did you mean {' or '.join(meant)}?" if meant else None


def _see_help(error: CycloptsError) -> str:
    return f"see `quire {' '.join(error.command_chain or ())} --help`"


if __name__ == "__main__":
    main()
