"""The keyboard and the screen of a chat: lines with history, streamed answers, and the same in a pipe.

On a terminal, thoughts are dimmed, and a line with the speed follows each answer. In a pipe, standard output has the
answers only.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TextIO

from ..common.errors import ConfigError, QuireError
from .chat_api import ChatAPI, ChatPiece
from .chat_session import Conversation

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
QUOTES = '"""'
MAX_HISTORY = 1000  # lines
# A model's text must not move the cursor or change the terminal.
CONTROLS = dict.fromkeys(code for code in chain(range(0x20), range(0x7F, 0xA0)) if chr(code) not in "\n\t")


class ChatTerminal:
    """Standard input and output of one chat."""

    def __init__(self, stdin: TextIO | None = None, stdout: TextIO | None = None) -> None:
        self._in = stdin or sys.stdin
        self._out = stdout or sys.stdout
        self.is_interactive = self._in.isatty() and self._out.isatty()
        self._is_dim = False

    def converse(self, api: ChatAPI, model: str, conversation: Conversation) -> None:
        """Answer messages until the input ends or the user leaves."""
        with _history(self.is_interactive):
            if self.is_interactive:
                self._note(f"{model}; /help lists the commands")
            while not conversation.is_over:
                try:
                    message = self._message()
                except KeyboardInterrupt:
                    if not self.is_interactive:
                        raise
                    self._write("\n")
                    continue
                if message is None:
                    break
                self._handle(api, model, conversation, message)

    def answer(self, api: ChatAPI, model: str, conversation: Conversation) -> None:
        """Print the answer to the conversation's last message, and add it. Ctrl-C ends it early on a terminal."""
        start = time.monotonic()
        text: list[str] = []
        tokens: int | None = None
        try:
            with closing(api.chat(model, conversation.messages, conversation.options)) as pieces:  # type: ignore[type-var]
                for piece in pieces:
                    tokens = tokens if piece.completion_tokens is None else piece.completion_tokens
                    text.append(piece.text)
                    self._show(piece)
        except KeyboardInterrupt:
            if not self.is_interactive:
                raise
        finally:
            conversation.hear("".join(text))
            self._end_line()
        if self.is_interactive and tokens:
            self._note(f"[{tokens} tokens, {tokens / (time.monotonic() - start):.1f} tokens/s]")

    def _handle(self, api: ChatAPI, model: str, conversation: Conversation, message: str) -> None:
        try:
            if message.startswith("/"):
                if shown := conversation.command(message):
                    self._note(shown)
            elif message.strip():
                conversation.say(message)
                self.answer(api, model, conversation)
        except QuireError as error:
            if not self.is_interactive:
                raise
            self._note(str(error))

    def _message(self) -> str | None:
        """Return the next message, which may have several lines; None at the end of the input."""
        line = self._line(">>> ")
        if line is None:
            return None
        lines = [line]
        if line.lstrip().startswith(QUOTES):
            lines = [line.lstrip().removeprefix(QUOTES)]
            while not lines[-1].rstrip().endswith(QUOTES):
                if (line := self._line("... ")) is None:
                    raise ConfigError(f"the input ends before the {QUOTES} that ends a message")
                lines.append(line)
            lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        while lines[-1].endswith("\\") and (line := self._line("... ")) is not None:
            lines[-1:] = [lines[-1].removesuffix("\\"), line]
        return "\n".join(lines)

    def _line(self, prompt: str) -> str | None:
        if self.is_interactive and self._in is sys.stdin:
            try:
                return input(prompt)  # edited by readline
            except EOFError:
                self._write("\n")
                return None
            except UnicodeDecodeError as error:
                raise ConfigError(f"the input is no UTF-8 text: {error.reason}") from error
        line = self._in.readline()
        return line.removesuffix("\n") if line else None

    def _show(self, piece: ChatPiece) -> None:
        if piece.reasoning and self.is_interactive:
            self._write(piece.reasoning, dim=True)
        if piece.text:
            self._write(piece.text)

    def _write(self, text: str, *, dim: bool = False) -> None:
        if self.is_interactive:
            text = text.translate(CONTROLS)
            if dim != self._is_dim:
                self._out.write(DIM if dim else f"{PLAIN}\n\n")
                self._is_dim = dim
        self._out.write(text)
        self._out.flush()

    def _end_line(self) -> None:
        self._out.write(f"{PLAIN}\n" if self._is_dim else "\n")
        self._is_dim = False
        self._out.flush()

    def _note(self, text: str) -> None:
        """Show a text that is not the model's: dimmed, or on standard error in a pipe."""
        if self.is_interactive:
            self._out.write(f"{DIM}{text.translate(CONTROLS)}{PLAIN}\n")
            self._out.flush()
        else:
            print(text, file=sys.stderr)


@contextmanager
def _history(is_interactive: bool) -> Iterator[None]:
    """Let readline edit lines, with the lines of earlier chats; keep them at the end."""
    try:
        import readline
    except ImportError:  # some builds of Python lack it
        is_interactive = False
    if not is_interactive:
        yield
        return
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    path = Path(state).expanduser() / "quire" / "history"
    readline.set_history_length(MAX_HISTORY)
    with suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)
