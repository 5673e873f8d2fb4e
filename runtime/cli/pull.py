"""`quire pull`: download a model by its name, or the files of it that have changed."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from ..common.config import EngineConfig
from ..common.errors import ConfigError
from ..hub import ModelReference, parse_reference
from ..hub import pull as pull_model
from .model_files import FreeMemory, TerminalProgress

ModelName = Annotated[
    str,
    Parameter(help="ORGANIZATION/NAME on the hub; for a GGUF repository also :QUANTIZATION or :FILE.", metavar="MODEL"),
]


def pull(model: ModelName, /) -> None:
    """Download the model and print its path. Raises ModelNotFound, Unauthenticated, Unavailable or ConfigError."""
    reference = model_reference(model)
    memory = FreeMemory(EngineConfig(), reference, refuses=False)
    print(pull_model(reference, memory, TerminalProgress()), flush=True)


def model_reference(model: str) -> ModelReference:
    """Return the model on a hub that the argument names. Raises ConfigError."""
    reference = parse_reference(model)
    if reference is None:
        raise ConfigError(
            f"{model} is not a name on the hub; write ORGANIZATION/NAME or ORGANIZATION/NAME:QUANTIZATION"
        )
    return reference
