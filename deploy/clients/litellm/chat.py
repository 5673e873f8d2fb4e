"""LiteLLM with a Quire server: a chat, a stream, an answer that matches a schema, and a tool call.

usage: chat.py [URL]    pip install -r requirements.txt
server: quire serve --served-model-name quire --tool-call-parser hermes  # the parser is for the bundled model only
"""

import sys
from typing import Literal

from litellm import completion
from pydantic import BaseModel, Field

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
# After `openai/` comes the served model's name; `api_key` is the server's key, if it has keys.
QUIRE = {"model": "openai/quire", "api_base": URL, "api_key": "none", "max_tokens": 120, "temperature": 0}


class Module(BaseModel):
    """A module of a program."""

    name: str = Field(max_length=20)
    size: Literal["small", "large"]


CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}}


answer = completion(messages=[{"role": "user", "content": "What is a queue?"}], **QUIRE)
print("chat:", answer.choices[0].message.content, answer.usage)

print("stream: ", end="")
for chunk in completion(messages=[{"role": "user", "content": "What is a stack?"}], stream=True, **QUIRE):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

answer = completion(messages=[{"role": "user", "content": "Name a module."}], response_format=Module, **QUIRE)
print("schema:", Module.model_validate_json(answer.choices[0].message.content))

question = [{"role": "user", "content": "How is the weather?"}]
answer = completion(messages=question, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, **QUIRE)
print("tool:", [call.function.arguments for call in answer.choices[0].message.tool_calls])
