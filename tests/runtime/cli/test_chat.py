"""Chats at the keyboard: commands, streamed answers on a terminal and in a pipe, and the choice of the server."""

from __future__ import annotations

import io
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.cli import chat_server
from quire.runtime.cli.chat_api import ChatAPI, ChatPiece
from quire.runtime.cli.chat_session import Conversation
from quire.runtime.cli.chat_terminal import ChatTerminal
from quire.runtime.cli.main import run
from quire.runtime.common.errors import (
    ConfigError,
    InvalidRequest,
    Overloaded,
    ProtocolError,
    QuireError,
    Unauthenticated,
    Unavailable,
)
from quire.runtime.common.settings import resolve_settings

from tests.support.adapters import write_adapter

CARDS = [
    {"id": "org/tiny", "owned_by": "quire", "capabilities": ["completion", "chat"]},
    {"id": "vectors", "owned_by": "quire", "capabilities": ["embedding"]},
]


def event(**delta: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"
ANSWER = (
    event(role="assistant") + event(reasoning_content="Hm.") + event(content="Hel") + event(content="lo") + USAGE + DONE
)


class ScriptedAPI(ThreadingHTTPServer):
    """A server whose next answers to chats a test sets: a status and a body each."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.cards: object = {"data": CARDS}
        self.answers: list[tuple[int, bytes]] = []
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedAPI

    def log_message(self, *_: object) -> None:
        """Stay quiet."""

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("Authorization"))
        self._send(200, json.dumps(self.server.cards).encode())

    def do_POST(self) -> None:
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self._send(*(self.server.answers.pop(0) if self.server.answers else (200, ANSWER)))

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def api() -> Iterator[ScriptedAPI]:
    server = ScriptedAPI()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def conversed(api: ScriptedAPI, typed: str, kind: type[io.StringIO] = io.StringIO) -> tuple[str, Conversation]:
    """Return the output of a chat, and the conversation."""
    out = kind()
    conversation = Conversation()
    ChatTerminal(kind(typed), out).converse(ChatAPI(api.url), "org/tiny", conversation)
    return out.getvalue(), conversation


def test_in_a_pipe_the_output_has_the_answers_only(api: ScriptedAPI) -> None:
    out, conversation = conversed(api, "Hi\n\nAgain\n")
    assert out == "Hello\nHello\n"
    said = [(each["role"], each["content"]) for each in conversation.messages]
    assert said == [("user", "Hi"), ("assistant", "Hello"), ("user", "Again"), ("assistant", "Hello")]
    assert api.requests[1]["messages"] == conversation.messages[:3]
    assert (api.requests[0]["model"], api.requests[0]["stream"]) == ("org/tiny", True)


def test_on_a_terminal_thoughts_are_dimmed_and_the_speed_follows(api: ScriptedAPI) -> None:
    out, _ = conversed(api, "Hi\n", Terminal)
    before, _, rest = out.partition("\n")
    assert before == "\x1b[2morg/tiny; /help lists the commands\x1b[0m"
    assert rest.startswith("\x1b[2mHm.\x1b[0m\n\nHello\n\x1b[2m[3 tokens, ")
    assert rest.endswith(" tokens/s]\x1b[0m\n")


def test_an_answer_cannot_change_the_terminal(api: ScriptedAPI) -> None:
    api.answers = [(200, event(content="a\x1b]0;title\x07b\x9bc\td") + USAGE + DONE)]
    out, conversation = conversed(api, "Hi\n", Terminal)
    assert "a]0;titlebc\td\n" in out
    assert conversation.messages[-1]["content"] == "a\x1b]0;title\x07b\x9bc\td"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ('"""one\ntwo\n"""\n', "one\ntwo\n"),
        ('"""one"""\n', "one"),
        ("one\\\ntwo\\\nthree\n", "one\ntwo\nthree"),
        ("one\\\n", "one\\"),
        ("no newline", "no newline"),
    ],
)
def test_a_message_may_have_several_lines(api: ScriptedAPI, typed: str, message: str) -> None:
    assert conversed(api, typed)[1].messages[0]["content"] == message


def test_a_message_without_its_end_is_refused(api: ScriptedAPI) -> None:
    with pytest.raises(ConfigError, match='the input ends before the """ that ends a message'):
        conversed(api, '"""one\n')


def test_an_interrupt_keeps_the_part_that_was_read(api: ScriptedAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    def pieces(*_: object) -> Iterator[ChatPiece]:
        yield ChatPiece(text="Hel")
        raise KeyboardInterrupt

    monkeypatch.setattr(ChatAPI, "chat", pieces)
    out, conversation = conversed(api, "Hi\n/bye\nnever\n", Terminal)
    assert "Hel\n" in out
    assert [each["content"] for each in conversation.messages] == ["Hi", "Hel"]
    with pytest.raises(KeyboardInterrupt):
        conversed(api, "Hi\n")


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (
            400,
            b'{"error": {"message": "max_tokens must be at least 1"}}',
            InvalidRequest,
            "max_tokens must be at least 1",
        ),
        (404, b"nothing", InvalidRequest, "/v1 answers with status 404"),
        (401, b'{"error": {"message": "no key"}}', Unauthenticated, "no key; set QUIRE_TOKEN to the server's key"),
        (429, b'{"error": {"message": "the queue is full"}}', Overloaded, "the queue is full"),
        (503, b'{"error": "starting"}', Unavailable, "starting"),
        (200, event(content="Hel"), Unavailable, "the answer was cut"),
        (200, b'data: {"error": {"message": "engine lost"}}\n\n', Unavailable, "engine lost"),
        (200, b"data: [1]\n\n", ProtocolError, "does not answer as OpenAI's API does"),
        (200, b'data: {"choices": 5}\n\n', ProtocolError, "does not answer as OpenAI's API does"),
        (200, b'data: {"usage": 5}\n\n', ProtocolError, "does not answer as OpenAI's API does"),
        (200, b'data: {"choices": [{"delta": [1]}]}\n\n', ProtocolError, "does not answer as OpenAI's API does"),
        (
            200,
            b'data: {"choices": [{"delta": {"content": 5}}]}\n\n',
            ProtocolError,
            "does not answer as OpenAI's API does",
        ),
        (200, b"data: {\n\n", ProtocolError, "does not answer in JSON"),
    ],
)
def test_an_error_ends_a_pipe_and_not_a_terminal(
    api: ScriptedAPI, status: int, body: bytes, error: type[QuireError], message: str
) -> None:
    api.answers = [(status, body)] * 2
    with pytest.raises(error, match=message):
        conversed(api, "Hi\n")
    out, conversation = conversed(api, "Hi\nAgain\n", Terminal)
    assert message in out
    assert [each["content"] for each in conversation.messages][-2:] == ["Again", "Hello"]


def test_an_error_before_the_answer_takes_the_message_back(api: ScriptedAPI) -> None:
    api.answers = [(400, b"{}")]
    assert conversed(api, "Hi\n", Terminal)[1].messages == []


def test_settings_and_the_system_prompt_are_sent(api: ScriptedAPI) -> None:
    lines = [
        "/set temperature 0.5",
        "/set stop END",
        "/set think off",
        "/set seed 3",
        "/set seed",
        "/system Be brief.",
        "Hi",
    ]
    conversed(api, "\n".join(lines), Terminal)
    (request,) = api.requests
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    sent = {name: request.get(name) for name in ("temperature", "stop", "seed", "chat_template_kwargs")}
    assert sent == {
        "temperature": 0.5, "stop": ["END"], "seed": None, "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("/set temperature 0.5", "temperature 0.5"),
        ("/set think on", "think on"),
        ("/set top_k", "top_k default"),
        ("/system x", "the system prompt is set"),
        ("/system", "there is no system prompt"),
        ("/clear", "the conversation is empty"),
    ],
)
def test_a_command_shows_what_it_changed(line: str, shown: str) -> None:
    assert Conversation().command(line) == shown


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/sav x", "^/sav is not a command \\(did you mean '/save'"),
        ("/fly", "^/fly is not a command; /help lists them$"),
        ("/set temprature 1", "^temprature is not a setting \\(did you mean 'temperature'"),
        ("/set logprobs 1", "^logprobs is not a setting; they are max_tokens, temperature, .*, think$"),
        ("/set temperature hot", "^temperature must be a number, not 'hot'"),
        ("/set think maybe", "^think must be on or off, not 'maybe'$"),
        ("/image", "^/image needs the name of a file$"),
        ("/image /nowhere", "^there is no file /nowhere$"),
        ("/save", "^/save needs the name of a file$"),
        ("/save /nowhere/x", "^/nowhere/x cannot be written: No such file or directory$"),
    ],
)
def test_a_wrong_command_says_what_is_allowed(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Conversation().command(line)


def test_an_image_goes_with_the_next_message_only(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"abc")
    conversation = Conversation()
    assert conversation.command(f"/image {tmp_path}/a.jpg") == "a.jpg goes with the next message"
    conversation.say("What is it?")
    conversation.hear("A cat.")
    conversation.say("Sure?")
    url = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,YWJj"}}
    contents = [each["content"] for each in conversation.messages]
    assert contents == [[url, {"type": "text", "text": "What is it?"}], "A cat.", "Sure?"]


def test_a_conversation_is_saved(tmp_path: Path) -> None:
    conversation = Conversation("Be brief.")
    conversation.say("Hi")
    conversation.hear("Höllo")
    conversation.command("/set seed 1")
    assert conversation.command(f"/save {tmp_path}/a.json") == f"3 messages are in {tmp_path}/a.json"
    conversation.command(f"/save {tmp_path}/a.md")
    assert json.loads((tmp_path / "a.json").read_text("utf-8")) == {"messages": conversation.messages, "seed": 1}
    assert (tmp_path / "a.md").read_text(
        "utf-8"
    ) == "**system**\n\nBe brief.\n\n**user**\n\nHi\n\n**assistant**\n\nHöllo\n"


@pytest.mark.parametrize("arguments", [[], ["org/tiny"]])
def test_a_server_on_this_machine_that_serves_the_model_is_used(
    api: ScriptedAPI, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_OPENAI_PORT", str(api.server_port))
    monkeypatch.setenv("QUIRE_TOKEN", "secret-key")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hi")))
    assert run(["run", *arguments]) == 0
    assert capsys.readouterr().out == "Hello\n"
    assert api.requests[0]["model"] == "org/tiny"
    assert api.keys == ["Bearer secret-key"]


def test_a_program_of_another_user_does_not_get_the_key(
    api: ScriptedAPI, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_OPENAI_PORT", str(api.server_port))
    monkeypatch.setenv("QUIRE_TOKEN", "secret-key")
    monkeypatch.setattr(chat_server, "listening_user", {api.server_port: os.getuid() + 1}.get)
    assert run(["run", "org/tiny", "Hi"]) == 0
    assert capsys.readouterr().out == "Hello\n"
    assert api.keys == [None]


def test_a_url_is_used_or_refused(api: ScriptedAPI, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run", "org/tiny", "Hi", "--url", api.url]) == 0
    assert capsys.readouterr().out == "Hello\n"
    for arguments, status, message in (
        (["other", "Hi", "--url", api.url], 2, f"{api.url} does not serve other; it serves org/tiny"),
        (
            ["org/tiny", "Hi", "--url", "ftp://x"],
            2,
            "--url must be a URL such as http://127.0.0.1:8000/v1, not 'ftp://x'",
        ),
        (["org/tiny", " ", "--url", api.url], 2, "the prompt is empty"),
    ):
        assert run(["run", *arguments]) == status
        assert capsys.readouterr().err == f"quire: {message}\n"
    assert run(["run", "a", "Hi", "--url", "http://127.0.0.1:9/v1"]) == 1
    assert "http://127.0.0.1:9/v1 does not answer: " in capsys.readouterr().err
    api.cards = {"data": CARDS[1:]}
    assert run(["run", "vectors", "Hi", "--url", api.url]) == 2
    assert capsys.readouterr().err == f"quire: {api.url} serves no model that chats\n"
    api.cards = {}
    assert run(["run", "a", "Hi", "--url", api.url]) == 2
    assert "does not list models; is it the base URL of OpenAI's API?" in capsys.readouterr().err


def test_without_a_server_the_command_starts_its_own(
    api: ScriptedAPI, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    api.cards = {"data": [{"id": "demo_model"}]}  # Another program has the port.
    monkeypatch.setenv("QUIRE_OPENAI_PORT", str(api.server_port))
    monkeypatch.setenv("QUIRE_TUNE", "off")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"/set max_tokens 5\n/set temperature 0\nHi\n/bye\n")))
    assert run(["chat", "--kv-cache-memory", "16MiB"]) == 0
    shown = capsys.readouterr()
    assert len(shown.out) > 1
    assert shown.err == "quire: loading demo_model\nmax_tokens 5\ntemperature 0.0\n"
    assert api.requests == []


def test_an_adapter_of_the_command_answers(
    api: ScriptedAPI, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("QUIRE_OPENAI_PORT", str(api.server_port))  # has no such adapter
    monkeypatch.setenv("QUIRE_TUNE", "off")
    answers = []
    for adapter in ([], ["--lora", f"sql={write_adapter(tmp_path / 'sql', 1)}", "--max-lora-rank=16"]):
        monkeypatch.setattr(
            "sys.stdin", io.TextIOWrapper(io.BytesIO(b"/set max_tokens 8\n/set temperature 0\nHi\n/bye\n"))
        )
        api.cards = {"data": [{"id": "demo_model"}]}
        assert run(["chat", "--kv-cache-memory", "16MiB", *adapter]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] != answers[1]


def test_the_options_of_the_command_are_passed_to_its_server() -> None:
    settings = resolve_settings(
        {"model": "m", "weights": "q8", "kv_cache_memory": "1MiB", "enable_prefix_caching": False, "lora": "a=x,b=y"},
        environ={},
    )
    assert chat_server.flags_of(settings, "org/m") == [
        "m", "--weights=q8", "--kv-cache-memory=1048576", "--no-enable-prefix-caching", "--lora=a=x,b=y",
        "--max-num-seqs=2", "--served-model-name=org/m",
    ]  # fmt: skip
