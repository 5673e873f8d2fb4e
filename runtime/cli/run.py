"""`quire run`: the answer of a model to one prompt; without a prompt, a chat in the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from ..common.errors import ConfigError
from .chat import ServerURL, SystemPrompt
from .chat_server import chat_server
from .chat_session import Conversation
from .chat_terminal import ChatTerminal
from .flags import MemoryFlags, ModelFolder
from .generate import standard_input


def run(
    model: ModelFolder = None,
    prompt: Annotated[
        str | None,
        Parameter(help="The message to answer; - reads standard input, as no prompt in a pipe does. Default: a chat."),
    ] = None,
    /,
    *,
    url: ServerURL = None,
    system: SystemPrompt = None,
    image: Annotated[
        tuple[str, ...], Parameter(help="A file with an image for the message.", negative="", show_default=False)
    ] = (),
    memory: MemoryFlags | None = None,
) -> None:
    """Print the answer. Raises ModelError, ConfigError, Unavailable or the server's errors."""
    conversation = Conversation(system)
    for file in image:
        conversation.add_image(file)
    if prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        prompt = standard_input()
    if prompt is not None and not prompt.strip():
        raise ConfigError("the prompt is empty")
    with chat_server(url, model, memory) as (api, name):
        terminal = ChatTerminal()
        if prompt is None:
            terminal.converse(api, name, conversation)
        else:
            conversation.say(prompt)
            terminal.answer(api, name, conversation)
