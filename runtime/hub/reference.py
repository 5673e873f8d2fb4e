"""The name of a model on a hub: `ORGANIZATION/NAME`, and after a colon a GGUF file or its quantization."""

from __future__ import annotations

import re
from dataclasses import dataclass
from os.path import exists

from ..model.files import is_gguf

_HUB = r"(?:(?:https://)?(?:hf\.co|huggingface\.co)/)?"
_NAME = r"[A-Za-z0-9][\w.-]*"
_TAG = r"\w[\w.-]*(?:/\w[\w.-]*)*"
_REFERENCE = re.compile(rf"{_HUB}(?P<repo>{_NAME}/{_NAME})(?::(?P<tag>{_TAG}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelReference:
    """A model on a hub. `tag` is a GGUF file or a quantization, empty if none was given."""

    repo: str
    tag: str = ""

    def __str__(self) -> str:
        return f"{self.repo}:{self.tag}" if self.tag else self.repo


def parse_reference(text: str) -> ModelReference | None:
    """Return the model on a hub that a setting names; None for a path, which a file or folder of that name is."""
    found = _REFERENCE.fullmatch(text)
    if found is None or exists(text) or (found["tag"] is None and is_gguf(text)):
        return None
    return ModelReference(found["repo"], found["tag"] or "")
