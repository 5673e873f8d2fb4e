"""A small text encoder with odd sizes, bound to the kernels and to the numpy reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from quire.kernels import PackedMatrix, Pool, Program, packed_nbytes
from quire.kernels.ops import (
    BIAS_PADDING,
    BLOCK,
    GATED,
    INPUT_DTYPES,
    Convert,
    Embed,
    EphemeralAttention,
    EphemeralPages,
    Linear,
    NormRows,
    PoolRows,
    Region,
    ephemeral_pages,
    padded,
    region_nbytes,
)

from tests.kernels.conftest import aligned_bytes
from tests.support.reference import ReferenceProgram

VOCAB = 200
TYPES = 2
POSITIONS = 700
MAX_ROWS = 800
MAX_TEXTS = 40


@dataclass
class Encoder:
    """Layers with norms after (`post_norm`, as BERT) or before each branch; `windows` has one per layer.

    In q8 with a `group`, the inputs of linear layers are rotated, and that many blocks share a scale.
    """

    weights: str = "f32"
    kv: str = "f32"
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 24
    hidden: int = 80
    intermediate: int = 112
    windows: tuple[int, ...] = (0, 0)
    causal: bool = False
    post_norm: bool = True
    rotates: bool = False
    qk_norm: bool = False
    biased: bool = False
    epilogue: str = "gelu"
    pooling: str = "mean"
    group: int = 0
    isa: str | None = None
    threads: int = 2
    seed: int = 11
    memory: Callable[..., np.ndarray] = aligned_bytes  # allocator of weights
    ops: list = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.offset = 0
        self._build()
        self.program = self.bind()
        self.reference = ReferenceProgram(self.ops, self.kv, 32, 0)

    def bind(self, **limits: int) -> Program:
        """Build the program."""
        limits = {"max_rows": MAX_ROWS, "max_samples": MAX_TEXTS, "max_sequences": MAX_TEXTS, **limits}
        pool = Pool(self.threads)
        return Program(self.ops, self.offset, None, None, 0, pool, vocab_size=VOCAB, isa=self.isa, **limits)

    def run(self, *texts: Sequence[int], types: np.ndarray | None = None, program: Program | None = None) -> np.ndarray:
        """Return the vectors of some texts, f32 [texts, hidden]."""
        program = program or self.program
        program.run_texts(*self.step(*texts), types)
        return program.view(self.vectors)[: len(texts), : self.hidden].copy()

    def run_reference(self, *texts: Sequence[int], types: np.ndarray | None = None) -> np.ndarray:
        self.reference.run_texts(*self.step(*texts), types)
        return self.reference.regions[self.vectors]

    def step(self, *texts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        counts = [len(text) for text in texts]
        return np.concatenate(texts).astype(np.int32), np.cumsum([0, *counts]).astype(np.int32)

    def region(self, rows: int, columns: int, dtype: str = "f32", group: int = 0) -> Region:
        region = Region(self.offset, rows, columns, dtype, group)
        self.offset += region_nbytes(rows, columns, dtype)
        return region

    def random(self, *shape: int) -> np.ndarray:
        return (self.rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    def packed(self, n: int, k: int, size: float = 1.0, dtype: str | None = None, group: int = 0) -> PackedMatrix:
        dtype = dtype or self.weights
        matrix = PackedMatrix(n, k, dtype, self.memory(packed_nbytes(n, k, dtype, group)), group=group)
        matrix.fill(self.random(n, k) * np.float32(size))
        return matrix

    def linear(self, source: Region, out: Region, epilogue: str = "store") -> Linear:
        columns = 2 * padded(out.columns) if epilogue in GATED else out.columns
        weight = self.packed(columns, source.columns, 2, group=source.group)
        return Linear(source, weight, self.random(columns), out, epilogue)

    def norm(self, source: Region, out: Region | None, converted: Region | None) -> NormRows:
        weight = (1 + 0.3 * self.rng.standard_normal(source.columns)).astype(np.float32)
        return NormRows(source, "layer", weight, self.random(source.columns), 1e-5, out, converted)

    def _build(self) -> None:
        dtype = INPUT_DTYPES[self.weights]
        self.pages = EphemeralPages(
            self.offset, ephemeral_pages(MAX_ROWS, MAX_TEXTS), self.kv_heads, self.head_dim, self.kv
        )
        self.offset += self.pages.nbytes
        x, h = self.region(MAX_ROWS, self.hidden), self.region(MAX_ROWS, self.hidden, dtype, self.group)
        embeddings = [self.packed(n, self.hidden, 8) for n in (VOCAB, TYPES, POSITIONS)]
        self.ops += [Embed(embeddings[0], x, None, 1.0, embeddings[1], embeddings[2])]
        self.ops += [self.norm(x, x, h)]
        for window in self.windows:
            self._add_layer(x, h, window)
        pooled = self.region(MAX_TEXTS, self.hidden)
        projected = self.region(MAX_TEXTS, self.hidden)
        self.vectors = self.region(MAX_TEXTS, self.hidden)
        converted = self.region(MAX_TEXTS, self.hidden, dtype, self.group)
        self.ops += [PoolRows(x, pooled, self.pooling), Convert(pooled, converted)]
        self.ops += [self.linear(converted, projected, "tanh")]
        self.ops += [NormRows(projected, "l2", None, None, 1e-12, self.vectors)]

    def _add_layer(self, x: Region, h: Region, window: int) -> None:
        d = self.head_dim
        group = self.heads // self.kv_heads
        dtype = INPUT_DTYPES[self.weights]
        qkv = self.region(MAX_ROWS, (self.heads + 2 * self.kv_heads) * d)
        is_whole = group * d % (BLOCK * max(1, self.group)) == 0
        a = self.region(MAX_ROWS, self.heads * d, dtype, self.group)
        converted = a
        if not is_whole and dtype != "f32":
            a = self.region(MAX_ROWS, self.heads * d)
        q_norm, k_norm = (1 + self.random(d), 1 + self.random(d)) if self.qk_norm else (None, None)
        rotary = self.rng.uniform(-1, 1, (POSITIONS, d // 2 * 2)).astype(np.float32) if self.rotates else None
        bias = None
        if self.biased:
            bias = self.rng.uniform(-2, 2, (self.heads, 2 * POSITIONS - 1 + BIAS_PADDING)).astype(np.float32)
            bias[:, -BIAS_PADDING:] = 1e30  # padding: the bias of no key
        attention = EphemeralAttention(
            qkv, a, self.pages, self.heads, self.kv_heads, d, q_norm, k_norm, 1e-6, rotary, d**-0.5, self.causal,
            window, bias,
        )  # fmt: skip
        inner = self.region(MAX_ROWS, self.intermediate, dtype, self.group)
        after = self.norm(x, x if self.post_norm else None, h)
        self.ops += [self.linear(h, qkv), attention, *([] if converted is a else [Convert(a, converted)])]
        self.ops += [self.linear(converted, x, "add"), after]
        self.ops += [self.linear(h, inner, self.epilogue), self.linear(inner, x, "add")]
        self.ops += [self.norm(x, x if self.post_norm else None, h)]
