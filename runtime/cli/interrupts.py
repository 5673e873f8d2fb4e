"""The immediate exit of a command that is interrupted where no cleanup is needed, as during imports and loading."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from ..common.errors import QuireError

INTERRUPTED = 130  # exit status


def leave(*_: object) -> NoReturn:
    """Exit at once, as a handler of SIGINT."""
    os._exit(INTERRUPTED)


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Make Ctrl-C end the process at once: threads that read and pack weights cannot be interrupted."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def exit_status(error: QuireError) -> int:
    """Return the exit status after an error."""
    return 1 if error.retryable else 2
