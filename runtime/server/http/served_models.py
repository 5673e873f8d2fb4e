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
    info = found.info.encoder
    makes = "scores texts" if info is not None and info.num_labels else "makes vectors"
    encoder = found.model.encoder
    if encoder == found.model.name:
        if len(models.models) > 1:  # one model alone refuses with what its server lacks
            _check_ability(found, task, makes)
        return found
    if task == "text" and found.is_encoder:
        raise BadRequest(
            f"the model {name!r} {makes} only, and generates no text; {found.model.name!r} generates text", "model"
        )
    if task == "vectors" and not found.is_encoder:
        raise BadRequest(f"the model {name!r} generates text only; {encoder!r} {makes}", "model")
    return found


def _check_ability(found: ModelName, task: Task, makes: str) -> None:
    """Raise BadRequest if a model without an encoder beside it cannot do the task, whether it is loaded or not."""
    if task == "text" and not found.info.generates:
        raise BadRequest(f"the model {found.name!r} {makes} only, and generates no text", "model")
    if task == "vectors" and found.info.encoder is None:
        raise BadRequest(f"the model {found.name!r} generates text only", "model")
