"""The table of KV cache sizes of well-known models, which docs/planning.md shows.

This file has only the models' published shapes; `KVLayout` computes the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....pager.layout import KVHeads, KVLayout
from ...common.config import KVCacheDtype

SIZED_DTYPES: dict[str, KVCacheDtype] = {"f32": "f32", "f16 and bf16": "f16"}  # column -> data type


@dataclass(frozen=True, slots=True)
class KnownShape:
    """A published model's KV shape and a context length. `windows` has one per layer; empty: all layers are full.

    Only layers that store keys and values count. A `KVLayout` has the same `heads` and `values_in_keys`.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_tokens: int
    windows: tuple[int, ...] = ()
    heads: tuple[KVHeads, ...] = ()
    values_in_keys: int = 0

    def kv_bytes(self, dtype: KVCacheDtype) -> int:
        """Return the bytes of one sequence of `num_tokens`; a sliding layer holds the tokens in its window."""
        layout = KVLayout(
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            dtype,
            windows=self.windows,
            heads=self.heads,
            values_in_keys=self.values_in_keys,
        )
        return layout.sequence_bytes(self.num_tokens)


GEMMA_4_E2B_WINDOWS = tuple(0 if layer % 5 == 4 else 512 for layer in range(15))  # 20 further layers read their keys
GEMMA_3_4B_WINDOWS = tuple(0 if layer % 6 == 5 else 1_024 for layer in range(34))
KNOWN_SHAPES = (
    KnownShape("Quire demo (4 M)", 4, 2, 64, 2_048),
    KnownShape("Qwen2.5-0.5B", 24, 2, 64, 4_096),
    KnownShape("Qwen3-0.6B", 28, 8, 128, 1_024),
    KnownShape("Llama-3.2-1B", 16, 8, 64, 8_192),
    KnownShape("Qwen3-1.7B", 28, 8, 128, 8_192),
    KnownShape("Llama-3.2-3B", 28, 8, 128, 8_192),
    KnownShape("Qwen3-4B", 36, 8, 128, 8_192),
    KnownShape("Gemma-3-4B", 34, 4, 256, 4_096, GEMMA_3_4B_WINDOWS),
    KnownShape(
        "Gemma-4-E2B",
        15,
        1,
        256,
        4_096,
        GEMMA_4_E2B_WINDOWS,
        tuple((1, 256) if window else (1, 512) for window in GEMMA_4_E2B_WINDOWS),
    ),
    KnownShape("DeepSeek-V2-Lite", 27, 1, 512 + 64, 4_096, values_in_keys=512),
    KnownShape("Qwen2.5-7B", 28, 4, 128, 4_096),
    KnownShape("Mistral-7B-v0.1", 32, 8, 128, 8_192, (4_096,) * 32),
    KnownShape("Mistral-7B-v0.3", 32, 8, 128, 8_192),
    KnownShape("Qwen3-8B", 36, 8, 128, 8_192),
    KnownShape("Llama-3-8B", 32, 8, 128, 8_192),
    KnownShape("Llama-3-70B", 80, 8, 128, 8_192),
    KnownShape("Llama-3-405B", 126, 8, 128, 131_072),
)


def describe_sizes() -> str:
    """Return the table as text: exact bytes and binary units. Models with windows are shown without them too."""
    header = f"{'model':<18}{'tokens':>8}" + "".join(f"{column + ', bytes':>20}{'':>11}" for column in SIZED_DTYPES)
    return "\n".join([header.rstrip(), *(_row(shape) for known in KNOWN_SHAPES for shape in _variants(known))])


def _variants(shape: KnownShape) -> list[KnownShape]:
    return [shape, replace(shape, name="  were all full", windows=())] if shape.windows else [shape]


def _row(shape: KnownShape) -> str:
    sizes = [shape.kv_bytes(dtype) for dtype in SIZED_DTYPES.values()]
    return f"{shape.name:<18}{shape.num_tokens:>8,}" + "".join(f"{size:>20,}{human(size):>11}" for size in sizes)


def human(size: int) -> str:
    """Return a size as text, for example 1.5 MiB, 1,022 MiB, 2.0 GiB or 126 GiB."""
    mib = size / (1 << 20)
    gib = size / (1 << 30)
    if gib < 1:
        return f"{mib:.3g} MiB" if mib < 100 else f"{mib:,.0f} MiB"
    return f"{gib:.1f} GiB" if gib < 10 else f"{gib:.0f} GiB"
