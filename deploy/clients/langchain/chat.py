"""LangChain with a Quire server: a chat, a stream, an answer that matches a schema, and a tool call.

usage: chat.py [URL]    pip install -r requirements.txt
server: quire serve --served-model-name quire --tool-call-parser hermes  # the parser is for the bundled model only
"""

import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"


class Module(BaseModel):
    """A module of a program."""

    name: str = Field(max_length=20)
    size: Literal["small", "large"]


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather of a city."""
    return f"It rains in {city}."


# `model` is the served model's name; `api_key` the server's key, if it has keys.
model = ChatOpenAI(base_url=URL, api_key="none", model="quire", max_tokens=120, temperature=0)
answer = model.invoke("What is a queue?")
print("chat:", answer.content, answer.usage_metadata)

print("stream: ", end="")
for chunk in model.stream("What is a stack?", stream_usage=True):
    print(chunk.content, end="", flush=True)
print()

print("schema:", model.with_structured_output(Module, method="json_schema").invoke("Name a module."))

asked = model.bind_tools([weather], tool_choice="required", parallel_tool_calls=False).invoke("How is the weather?")
print("tool:", [weather.invoke(call["args"]) for call in asked.tool_calls])
