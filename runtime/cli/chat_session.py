"""A conversation at the keyboard: its messages, and the commands that change it. No input or output but files."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..common.errors import ConfigError
from ..common.options import options_of, suggestion
from ..common.types import SamplingParams

HELP = """\
/set              show the settings; /set NAME VALUE changes one, /set NAME alone restores its default
/set think off    switch the model's thinking off (on: back on)
/system TEXT      set the system prompt; without TEXT, remove it
/image FILE       send an image with the next message
/save FILE        write the conversation: JSON, or Markdown if FILE ends with .md
/clear            forget the conversation
/bye              leave (also Ctrl-D)
A line that ends with \\, and lines from \"\"\" to \"\"\", are one message. Ctrl-C stops an answer."""
CHAT_SETTINGS = (  # sampling parameters that the HTTP API takes under the same names
    "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "stop",
)  # fmt: skip
THINKING_SWITCH = "think"
MAX_CHAT_IMAGE_BYTES = 64 << 20
ON_OFF = {"on": True, "off": False}


class Conversation:
    """The messages of a chat and the options of its requests."""

    def __init__(self, system: str | None = None) -> None:
        self.options: dict[str, Any] = {}
        self.is_over = False
        self._system = system
        self._turns: list[dict[str, Any]] = []
        self._images: list[tuple[str, bytes]] = []  # images of the next message: names and bytes

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages to send."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self._turns]

    def say(self, text: str) -> None:
        """Add a message of the user, with the images that wait for it."""
        content: Any = text
        if self._images:
            parts = [{"type": "image_url", "image_url": {"url": _data_url(*image)}} for image in self._images]
            content = [*parts, {"type": "text", "text": text}]
            self._images = []
        self._turns.append({"role": "user", "content": content})

    def hear(self, text: str) -> None:
        """Add the model's answer; without a text, remove the message that it would answer."""
        if text:
            self._turns.append({"role": "assistant", "content": text})
        else:
            self._turns.pop()

    def command(self, line: str) -> str:
        """Run a line that begins with /; return the text to show. Raises ConfigError that says what is allowed."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/help" | "/?":
                return HELP
            case "/bye" | "/exit" | "/quit":
                self.is_over = True
                return ""
            case "/clear":
                self._turns.clear()
                self._images.clear()
                return "the conversation is empty"
            case "/system":
                self._system = rest or None
                return "the system prompt is set" if rest else "there is no system prompt"
            case "/set":
                return self._set(*rest.partition(" ")[::2])
            case "/image":
                return self.add_image(rest)
            case "/save":
                return self._save(rest)
        commands = ("/help", "/bye", "/clear", "/system", "/set", "/image", "/save")
        raise ConfigError(f"{name} is not a command{suggestion(name, commands) or '; /help lists them'}")

    def add_image(self, name: str) -> str:
        """Send the image in a file with the next message; return the text to show. Raises ConfigError."""
        if not name:
            raise ConfigError("/image needs the name of a file")
        path = Path(name).expanduser()
        try:
            if not path.is_file():
                raise ConfigError(f"there is no file {path}")
            if path.stat().st_size > MAX_CHAT_IMAGE_BYTES:
                raise ConfigError(f"{path} has more than {MAX_CHAT_IMAGE_BYTES:,} bytes")
            self._images.append((path.name, path.read_bytes()))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        return f"{path.name} goes with the next message"

    def _set(self, name: str, text: str) -> str:
        text = text.strip()
        if not name:
            return "\n".join(f"{each} {self._shown(each)}" for each in (*CHAT_SETTINGS, THINKING_SWITCH))
        if name == THINKING_SWITCH:
            return self._set_thinking(text)
        if name not in CHAT_SETTINGS:
            nearest = suggestion(name, (*CHAT_SETTINGS, THINKING_SWITCH))
            raise ConfigError(
                f"{name} is not a setting{nearest or '; they are ' + ', '.join((*CHAT_SETTINGS, THINKING_SWITCH))}"
            )
        self.options.pop(name, None)
        if text:
            option = options_of(SamplingParams)[name]
            value = (text,) if name == "stop" else option.convert(text, name)
            self.options[name] = msgspec.to_builtins(value)
        return f"{name} {self._shown(name)}"

    def _set_thinking(self, text: str) -> str:
        if text not in (*ON_OFF, ""):
            raise ConfigError(f"{THINKING_SWITCH} must be on or off, not {text!r}")
        self.options.pop("chat_template_kwargs", None)
        if text:
            self.options["chat_template_kwargs"] = {"enable_thinking": ON_OFF[text]}
        return f"{THINKING_SWITCH} {self._shown(THINKING_SWITCH)}"

    def _shown(self, name: str) -> str:
        if name == THINKING_SWITCH:
            variables = self.options.get("chat_template_kwargs")
            return "default" if variables is None else "on" if variables["enable_thinking"] else "off"
        return str(self.options.get(name, "default"))

    def _save(self, name: str) -> str:
        if not name:
            raise ConfigError("/save needs the name of a file")
        path = Path(name).expanduser()
        text = self._markdown() if path.suffix == ".md" else json.dumps(self._saved(), indent=1, ensure_ascii=False)
        try:
            path.write_text(f"{text}\n", "utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
        return f"{len(self.messages)} messages are in {path}"

    def _saved(self) -> Mapping[str, Any]:
        return {"messages": self.messages, **self.options}

    def _markdown(self) -> str:
        return "\n\n".join(f"**{message['role']}**\n\n{_text(message['content'])}" for message in self.messages)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "(image)") for part in content)


def _data_url(name: str, data: bytes) -> str:
    kind = {".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".gif": "gif"}.get(Path(name).suffix.lower(), "png")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
