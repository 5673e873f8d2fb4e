"""The models of a server at the operator port: `GET /models`, and `POST /models/NAME/load`, `unload`, `pin`, `unpin`.

A page of another site cannot post: a request with an `Origin` is refused. Must not import HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import unquote

import msgspec

from ..models.residency import Residency, ResidentStatus

OPERATOR_MODELS = "/models"


class ModelsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The models of a server with several, and their memory."""

    memory_bytes: int | None  # limit for all models together; None: all fit
    used_bytes: int
    models: list[ResidentStatus]


class OperationAnswer(NamedTuple):
    """The answer to an operator: a status, and JSON or text."""

    status_code: int
    content: bytes
    is_json: bool = False


class ModelOperations:
    """Answers requests of operators: the states of models; to load, unload and pin models."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._actions: dict[str, Callable[[str], None]] = {
            "load": residency.load,
            "unload": residency.unload,
            "pin": lambda name: residency.pin(name, is_pinned=True),
            "unpin": lambda name: residency.pin(name, is_pinned=False),
        }

    def status(self) -> ModelsStatus:
        residency = self._residency
        return ModelsStatus(
            memory_bytes=residency.memory_bytes, used_bytes=residency.used_bytes, models=residency.statuses()
        )

    def act(self, path: str, origin: bytes | None) -> OperationAnswer:
        """Do the action that a POST to `path` names, and return the models as they are now."""
        parent, _, action = path.removeprefix(f"{OPERATOR_MODELS}/").rpartition("/")
        name = unquote(parent)
        if origin is not None:
            return OperationAnswer(403, b"pages of browsers may not change models\n")
        if action not in self._actions:
            return OperationAnswer(404, f"not found; the actions are {', '.join(self._actions)}\n".encode())
        if name not in self._residency.residents:
            known = ", ".join(self._residency.residents) or "none: this server has one model"
            return OperationAnswer(404, f"no model {name[:80]!r}; the models are {known}\n".encode())
        self._actions[action](name)
        return OperationAnswer(202, msgspec.json.encode(self.status()), is_json=True)
