"""The model that a body names, and the vocabularies of models. Must not import routes."""

from __future__ import annotations

from ..models.catalog import ModelCatalog, ModelName, Task
from .errors import BadRequest
from .fields import Fields
from .logprobs import Vocabulary


def vocabularies(models: ModelCatalog) -> dict[str, Vocabulary]:
    """Return the vocabulary of each model by its key."""
    return {model.key: Vocabulary(model.engine.token) for model in models.models}


def check_model(models: ModelCatalog, fields: Fields, task: Task) -> ModelName:
    """Return the model that a body names. Raises BadRequest for a model that cannot do the task."""
    if "model" not in fields.values:
        return models.default(task)
    name = fields.get("model", str, "")
    found = models.find(name)
    if found is None:
        raise BadRequest(models.unknown(name), "model", error_code="model_not_found", status=404)
    encoder = found.model.encoder
    if encoder == found.model.name:
        return found
    info = found.info.encoder
    makes = "scores texts" if info is not None and info.num_labels else "makes vectors"
    if task == "text" and found.is_encoder:
        raise BadRequest(
            f"the model {name!r} {makes} only, and generates no text; {found.model.name!r} generates text", "model"
        )
    if task == "vectors" and not found.is_encoder:
        raise BadRequest(f"the model {name!r} generates text only; {encoder!r} {makes}", "model")
    return found
