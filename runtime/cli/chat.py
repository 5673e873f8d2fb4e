"""`quire chat`: a conversation with a model in the terminal, or line by line in a pipe."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from .chat_server import chat_server
from .chat_session import Conversation
from .chat_terminal import ChatTerminal
from .flags import MemoryFlags, ModelFolder

ServerURL = Annotated[
    str | None,
    Parameter(
        help="The base URL of OpenAI's API at a server. Default: the server on this machine if it serves the model, "
        "else one of its own. QUIRE_TOKEN is its key.",
        show_default=False,
    ),
]
SystemPrompt = Annotated[str | None, Parameter(help="The system prompt.", show_default=False)]


def chat(
    model: ModelFolder = None,
    /,
    *,
    url: ServerURL = None,
    system: SystemPrompt = None,
    memory: MemoryFlags | None = None,
) -> None:
    """Chat until the input ends. Raises ModelError, ConfigError, Unavailable or the server's errors."""
    with chat_server(url, model, memory) as (api, name):
        ChatTerminal().converse(api, name, Conversation(system))
