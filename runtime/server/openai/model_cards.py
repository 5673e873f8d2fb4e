"""The served models by name: the cards of `/v1/models`, and the check of a request's model. Must not import routes."""

from __future__ import annotations

from typing import Literal

from ...common.default_sampling import http_sampling
from ...engine.facade import EncoderInfo, EngineFacade, EngineInfo
from .errors import BadRequest
from .fields import Fields

Task = Literal["text", "vectors", "any"]  # model that a request needs; scores count as vectors


def model_card(name: str, info: EngineInfo, created: int, *, is_main: bool) -> dict[str, object]:
    """Return the card of a model. `is_main` distinguishes the served model from a separate embedding model.

    If both have the same name, one card has the capabilities of both.
    """
    encoder = info.encoder
    limits = info if is_main or encoder is None else encoder
    card: dict[str, object] = {"id": name, "object": "model", "created": created, "owned_by": "quire"}
    card["max_model_len"] = limits.max_model_len
    capabilities: list[str] = []
    if is_main and info.generates:
        capabilities += ["completion", "chat"] if info.has_chat_template else ["completion"]
        card["default_sampling_params"] = http_sampling(info.default_sampling)
        if info.max_images:
            card["input_modalities"] = ["text", "image"]
    if encoder is not None and (not is_main or not info.generates or encoder.name == name):
        capabilities += _capabilities(encoder)
        if encoder.prompts:
            card["prompt_names"] = list(encoder.prompts)
    return {**card, "capabilities": capabilities}


def _capabilities(encoder: EncoderInfo) -> list[str]:
    """Return the capabilities of an encoder: vectors rank texts by their cosine, a single label is a pair's score."""
    if not encoder.num_labels:
        return ["embedding", "rerank"]
    return ["rerank", "classify"] if encoder.num_labels == 1 else ["classify"]


class ServedModels:
    """The names of the served model, and of an embedding model with another name."""

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
        return (self.main,) if self.encoder == self.main else (self.main, self.encoder)

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
        if task == "vectors" and name == self.main:
            raise BadRequest(f"the model {name!r} generates text only; {self.encoder!r} {makes}", "model")
        return name
