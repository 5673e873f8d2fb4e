"""The quantization of a folder's matrices, as far as its tensors do not show it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SORTED = " sorted by group"  # suffix of the name of a matrix in blocks with sorted inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The declaration of quantized tensors in config.json. The folder's tensors show which matrices are quantized."""

    layout: Literal["gptq", "awq", "compressed-tensors"]  # format of integers in int32 words
    bits: int = 4  # bits of GPTQ's numbers where a matrix has no g_idx
    group_size: int = 0  # inputs of each of GPTQ's groups; 0: all inputs
    zero_offset: int = 0  # offset added to GPTQ's zero points
    block: tuple[int, int] | None = None  # rows and columns of the blocks that share a scale; None: no blocks
