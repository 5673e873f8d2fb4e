"""The `quire` command: its subcommands, each loaded when it runs, and the form of its errors.

Exit status: 0; 2 when the command line, an option, the model or a request is wrong; 1 when trying again may help; 130
when interrupted; 141 when the reader of the output has closed its pipe.
"""

from __future__ import annotations

import os
import sys

from cyclopts import App, CycloptsError

from ..common.errors import QuireError

COMMANDS = {  # each is the function of that name in the file of that name
    "serve": "Serve a model until interrupted.",
    "generate": "Continue PROMPT in this process and print the text as it is generated.",
    "demo": "Start a server on the bundled model, stream from it as several users, print what each user saw, and stop.",
    "bench": "Measure prefill and decode of a model and compare them with the limits of this machine.",
    "simulate": "Predict how a model serves a stream of requests.\n\n"
    "The scheduler and the pager run in virtual time. Nothing is loaded; config.json is enough.",
    "loadtest": "Put a server under load and report the latencies of its clients.\n\n"
    "Flags and result keys are those of `vllm bench serve`. Without an address, a server on the bundled model runs for "
    "the duration of the test.",
    "plan": "Print the memory that serving a model takes, without loading it.",
    "token": "Make a key for TENANT; print it and the lines that admit it in the file of `quire serve --auth-tokens`.",
    "info": "Print versions, the instruction set level and the number of threads.",
}

app = App(
    name="quire",
    help="Serve language models on CPUs with paged KV memory; outputs do not depend on the load.",
    version_flags=["--version"],
    help_format="plaintext",  # without it, every help text imports a markdown parser
)
for _name, _help in COMMANDS.items():
    app.command(f"quire.runtime.cli.{_name}:{_name}", name=_name, help=_help)


def main() -> None:
    """Run one command line and exit."""
    try:
        app(sys.argv[1:], exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except QuireError as error:
        print(f"quire: {_message(error)}", file=sys.stderr)
        raise SystemExit(1 if error.retryable else 2) from None
    except CycloptsError as error:
        print(f"quire: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that flushing at exit does not fail again
        raise SystemExit(141) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _message(error: QuireError) -> str:
    """Return the error's text with the names of options spelled as flags of the command that failed."""
    from .flags import with_flags

    _, apps, _ = app.parse_commands(sys.argv[1:])
    arguments = apps[-1].assemble_argument_collection(parse_docstring=False)
    names = (name for argument in arguments for name in argument.names if name.startswith("--"))
    return with_flags(str(error), [name.removeprefix("--").replace("-", "_") for name in names])


if __name__ == "__main__":
    main()
