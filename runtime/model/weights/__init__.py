"""The weights of a model: tensors in a checkpoint, and packed matrices."""

from .safetensors import Checkpoint

__all__ = ["Checkpoint"]
