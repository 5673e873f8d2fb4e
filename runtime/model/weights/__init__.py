"""Checkpoints on disk as named arrays; knows no model."""

from .safetensors import Checkpoint

__all__ = ["Checkpoint"]
