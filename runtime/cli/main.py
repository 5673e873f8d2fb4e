"""The `quire` command: runs one command line and prints its errors.

Exit status: 0; 2 when the command line, an option, the model or a request is wrong; 1 when trying again may help, or
the prefix cache was not saved; 130 when interrupted; 141 when the reader of the output has closed its pipe.
"""

from __future__ import annotations

import os
import sys

from ..common.errors import QuireError


def main() -> None:
    """Run one command line and exit."""
    try:
        _run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _run() -> None:
    from cyclopts import CycloptsError  # here, so that Ctrl-C during the imports is handled too

    from .app import app

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


def _message(error: QuireError) -> str:
    """Return the error's text with the names of options spelled as flags of the command that failed."""
    from .app import app
    from .flags import with_flags

    _, apps, _ = app.parse_commands(sys.argv[1:])
    arguments = apps[-1].assemble_argument_collection(parse_docstring=False)
    names = (name for argument in arguments for name in argument.names if name.startswith("--"))
    return with_flags(str(error), [name.removeprefix("--").replace("-", "_") for name in names])


if __name__ == "__main__":
    main()
