"""The names of the served models, and the check of a request's model. Must not import routes."""

from __future__ import annotations

from typing import Literal

from ...engine.facade import EngineFacade
from .errors import BadRequest
from .fields import Fields

Task = Literal["text", "vectors", "any"]  # model that a request needs; scores count as vectors


class ServedModels:
    """The names of the served model, of its adapters, and of an embedding model with another name."""

    def __init__(self, name: str, engine: EngineFacade) -> None:
        self.main = name
        self._engine = engine

    @property
    def encoder(self) -> str:
        """The name of the model that makes vectors or scores, which may be the served model."""
        info = self._engine.info
        return (info.encoder.name if info.encoder is not None and info.generates else "") or self.main

    @property
    def names(self) -> tuple[str, ...]:
        own = tuple(dict.fromkeys((self.main, *self._engine.info.adapters)))
        return own if self.encoder == self.main else (*own, self.encoder)

    def check(self, fields: Fields, task: Task) -> str:
        """Return the name of the model in a body. Raises BadRequest for a model that cannot do the task."""
        name = fields.get("model", str, self.encoder if task == "vectors" else self.main)
        if name not in self.names:
            raise BadRequest(
                f"the model {name[:80]!r} does not exist here; this server has {' and '.join(map(repr, self.names))}",
                "model",
                error_code="model_not_found",
                status=404,
            )
        if self.encoder == self.main:
            return name
        encoder = self._engine.info.encoder
        makes = "scores texts" if encoder is not None and encoder.num_labels else "makes vectors"
        if task == "text" and name == self.encoder:
            raise BadRequest(
                f"the model {name!r} {makes} only, and generates no text; {self.main!r} generates text", "model"
            )
        if task == "vectors" and name != self.encoder:
            raise BadRequest(f"the model {name!r} generates text only; {self.encoder!r} {makes}", "model")
        return name
