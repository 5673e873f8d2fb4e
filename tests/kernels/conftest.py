"""A small decoder with odd sizes, bound to the kernels and to the numpy reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from quire.kernels import PackedMatrix, Pool, Program, packed_nbytes
from quire.kernels.ops import (
    BLOCK,
    INPUT_DTYPES,
    AddNorm,
    Attention,
    CausalConv,
    Combine,
    Convert,
    Dispatch,
    Embed,
    ExpertLinear,
    GatedNorm,
    Gather,
    Linear,
    LinearRecurrence,
    MatrixState,
    Normed,
    Region,
    Ring,
    RouteRows,
    Routing,
    RoutingRule,
    SharedExpert,
    ShortConv,
    max_groups,
    padded,
    region_nbytes,
)
from quire.pager.layout import KVLayout, first_kept_token, place_layers

from tests.support.ggml import random_blocks
from tests.support.reference import ReferenceProgram

BLOCK_DTYPES = {
    "q4_k": 256,
    "q5_k": 256,
    "q6_k": 256,
    "mxfp4": 32,
    "q4_z": 32,
}  # dtypes with random blocks as weights: K of a block
VOCAB = 333
MAX_ROWS = 160
MAX_SAMPLES = 40
NUM_PAGES = 48
MAX_POSITIONS = 700


def aligned_bytes(nbytes: int, fill: int = 0) -> np.ndarray:
    raw = np.full(nbytes + 64, fill, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


@dataclass
class Toy:
    """A decoder of a few layers. `weights` and `kv` are dtypes; `windows` has one per layer.

    The weights `rotated` are q8 in groups of `group` blocks, 4 by default.
    """

    weights: str = "f32"
    kv: str = "f32"
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 24
    windows: tuple[int, ...] = (0,)
    shapes: tuple[tuple[int, int], ...] = ()  # number and size of the KV heads of each layer; (): all have the same
    sources: tuple[int, ...] = ()  # layer whose keys and values each layer reads; (): its own
    hidden: int = 80
    intermediate: int = 176
    experts: int = 0  # experts of each layer; 0: a dense MLP
    gated: bool = False  # attention has gates, and a mixture has a shared expert
    taps: int = 0  # taps of a gated convolution before each attention; 0: none
    ring: int = 0  # rows of its ring beyond the taps
    recurrence: dict[str, Any] | None = None  # shape of a recurrence before each attention
    top_k: int = 2
    normalized: bool = True
    sigmoid: bool = False  # the router has sigmoids, groups if the experts can be halved, and a bias for the choice
    bias: bool = False  # every linear layer has a bias, not only qkv
    group: int = 0  # blocks that share a scale in q8
    page_size: int = 32
    isa: str | None = None
    choices: dict[str, str] = field(default_factory=dict)  # functions of other levels
    threads: int = 2
    qk_norm: bool = True
    head_norm: str = "rms"
    unusual: bool = False  # every option that most families leave alone is used
    seed: int = 7
    max_rows: int = MAX_ROWS
    num_pages: int = NUM_PAGES
    memory: Callable[..., np.ndarray] = aligned_bytes  # allocator of weights, KV pages and the rotary table
    ops: list = field(init=False)

    def __post_init__(self) -> None:
        if self.weights == "rotated":
            self.weights, self.group = "q8", self.group or 4
        self.rng = np.random.default_rng(self.seed)
        self.offset = self.state_end = 0
        stored = [layer for layer in range(len(self.windows)) if self._source(layer) == layer]
        windows, shapes = (tuple(each[layer] for layer in stored) for each in (self.windows, self._shapes()))
        heads = shapes if self.shapes else ()
        self.layout = KVLayout(len(stored), self.kv_heads, self.head_dim, self.kv, self.page_size, windows, heads)
        self.places = dict(zip(stored, place_layers(windows, shapes), strict=True))
        self.ops = self._ops()
        # Full of NaN, so that a kernel that reads memory it has not written is noticed.
        self.kv_memory = self.memory(self.num_pages * self.layout.page_bytes, 0xFF)
        self.program = self.bind()
        self.reference = ReferenceProgram(self.ops, self.kv, self.page_size, self.num_pages)

    def _shapes(self) -> tuple[tuple[int, int], ...]:
        return self.shapes or ((self.kv_heads, self.head_dim),) * len(self.windows)

    def _source(self, layer: int) -> int:
        return self.sources[layer] if self.sources else layer

    def bind(self) -> Program:
        """Build the program."""
        program = Program(
            self.ops,
            self.offset,
            self.kv_memory,
            self.layout,
            self.num_pages,
            Pool(self.threads),
            max_rows=self.max_rows,
            max_samples=MAX_SAMPLES,
            max_sequences=MAX_SAMPLES,
            vocab_size=VOCAB,
            isa=self.isa,
        )
        program.choose(self.choices)
        return program

    def run(self, *sequences) -> np.ndarray:
        """Run (token_ids, first_position, tables) sequences and return the logits of each sequence's last row.

        `tables` is a list of page id arrays, one for each layer group, or a single array.
        """
        self.program.run(**self.step(*sequences))
        return self.program.view(self.logits)[: len(sequences), :VOCAB].copy()

    def run_reference(self, *sequences) -> np.ndarray:
        """Run the sequences in the numpy reference and return their logits, which are the same for all ISA levels."""
        self.reference.run(**self.step(*sequences))
        return self.reference.regions[self.logits]

    def step(self, *sequences) -> dict[str, np.ndarray]:
        """Return the arrays of `Program.run` for such sequences."""
        counts = [len(s[0]) for s in sequences]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        by_sequence = [s[2] if isinstance(s[2], list) else [s[2]] for s in sequences]
        tables = [table for of_group in zip(*by_sequence, strict=True) for table in of_group]
        return {
            "token_ids": np.concatenate([s[0] for s in sequences]).astype(np.int32),
            "row_start": starts,
            "first_position": np.array([s[1] for s in sequences], np.int32),
            "page_ids": np.concatenate(tables).astype(np.int32),
            "page_start": np.concatenate([[0], np.cumsum([len(table) for table in tables])]).astype(np.int32),
            "sample_rows": starts[1:] - 1,
        }

    def release_pages(self, tables: list[np.ndarray], num_tokens: int) -> None:
        """Release pages as a pager does after `num_tokens` tokens, and fill them with NaN as their next owner might."""
        memory = self.kv_memory.reshape(self.layout.planes, self.num_pages, -1)
        for table, window in zip(tables, self.layout.group_windows, strict=True):
            released = table[: first_kept_token(num_tokens, window) // self.page_size]
            memory[:, released[released >= 0]] = 0xFF
            released[:] = -1

    def _region(self, rows: int, columns: int, dtype: str, group: int = 0) -> Region:
        region = Region(self.offset, rows, columns, dtype, group)
        self.offset += region_nbytes(rows, columns, dtype)
        return region

    def _normed(self, rows: int) -> Normed:
        data = self._region(rows, self.hidden, INPUT_DTYPES[self.weights], self.group)
        return Normed(data, self._region(rows, padded(self.hidden) // 32, "f32"), self._norm(self.hidden), 1e-6)

    def _random(self, *shape: int) -> np.ndarray:
        return (self.rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    def _norm(self, n: int) -> np.ndarray:
        return (1 + 0.1 * self.rng.standard_normal(n)).astype(np.float32)

    def _bias(self, n: int) -> np.ndarray | None:
        return self._norm(n) if self.bias else None

    def _gate_up_bias(self) -> np.ndarray | None:
        """Return a bias interleaved by 16 as the columns are; zero for padding."""
        if not self.bias:
            return None
        column = np.arange(self.intermediate)
        bias = np.zeros(2 * padded(self.intermediate), np.float32)
        for phase in (0, 1):
            bias[column // 16 * 32 + 16 * phase + column % 16] = self._norm(self.intermediate)
        return bias

    def _packed(self, n: int, k: int, *sources: np.ndarray, dtype: str | None = None) -> PackedMatrix:
        group = self.group if dtype is None else 0
        dtype = dtype or self.weights
        matrix = PackedMatrix(n, k, dtype, self.memory(packed_nbytes(n, k, dtype, group)), group=group)
        for index, source in enumerate(sources):
            interleave = index if len(sources) == 2 else None
            if dtype in BLOCK_DTYPES:
                ggml_type = dtype.upper()
                blocks = random_blocks(self.rng, ggml_type, *source.shape, size=float(source.std()))
                matrix.fill_blocks(blocks, ggml_type, interleave=interleave)
            else:
                matrix.fill(source, interleave=interleave)
        return matrix

    def _ops(self) -> list:
        x, h = self._region(self.max_rows, self.hidden, "f32"), self._normed(self.max_rows)
        self.activated = self._region(self.max_rows, self.intermediate, INPUT_DTYPES[self.weights], self.group)
        embedding = self._packed(VOCAB, self.hidden, self._random(VOCAB, self.hidden) * 8)
        smallest = min(head_dim for _, head_dim in self._shapes())
        dim = max(2, smallest // 4 * 2) if self.unusual else smallest
        rotary = self.memory(MAX_POSITIONS * dim * 4).view(np.float32).reshape(MAX_POSITIONS, dim)
        rotary[:] = self.rng.uniform(-1, 1, rotary.shape)
        ops: list = [Embed(embedding, x, h, **({"scale": 0.7} if self.unusual else {}))]
        for layer in range(len(self.windows)):
            after = self._normed(self.max_rows) if layer + 1 < len(self.windows) else None
            ops += self._layer(layer, x, h, rotary, after)
            h = after
        s, h = self._region(MAX_SAMPLES, self.hidden, "f32"), self._normed(MAX_SAMPLES)
        self.logits = self._region(MAX_SAMPLES, VOCAB, "f32")
        self.maxima = self._region(MAX_SAMPLES, padded(VOCAB) // 32, "f32")
        capped = {"scale": 0.5, "softcap": 2.0} if self.unusual else {}
        head = Linear(h, embedding, None, self.logits, "store", maxima=self.maxima, **capped)
        return [*ops, Gather(x, s, h), head]

    def _layer(self, layer: int, x: Region, h1: Normed, rotary: np.ndarray, after: Normed | None) -> list:
        heads = self.heads
        kv_heads, d = self._shapes()[layer]
        hidden = self.hidden
        source = self._source(layer)
        is_tied = bool(self.shapes) and not self.windows[layer]  # values are keys
        kv_matrices = 0 if source != layer else 1 if is_tied else 2
        qkv = self._region(self.max_rows, (heads * (1 + self.gated) + kv_matrices * kv_heads) * d, "f32")
        h2 = self._normed(self.max_rows)
        a_converted = self._region(self.max_rows, heads * d, INPUT_DTYPES[self.weights], self.group)
        is_converted = heads // kv_heads * d % (BLOCK * max(1, self.group)) and a_converted.dtype != "f32"
        a = self._region(self.max_rows, heads * d, "f32") if is_converted else a_converted
        mlp = self._expert_ops(x, h2, after) if self.experts else self._mlp_ops(x, h2, after)
        norms_rows = self.unusual and self.qk_norm and not self.gated and self.head_norm == "rms"
        heads_of_norms = (heads, kv_heads) if norms_rows or self.head_norm == "layer" else (1, 1)
        q_norm, k_norm = (self._norm(d * n) for n in heads_of_norms) if self.qk_norm else (None, None)
        qkv_weight = self._packed(qkv.columns, hidden, self._random(qkv.columns, hidden))
        o_weight = self._packed(hidden, heads * d, self._random(hidden, heads * d))
        place = self.places[source]
        convolution: list = []
        if self.taps:
            convolution, h1 = self._convolution_ops(x, h1)
        if self.recurrence is not None:
            recurrence, h1 = self._recurrence_ops(x, h1, **self.recurrence)
            convolution += recurrence
        window = self.windows[layer]
        attention = Attention(qkv, a, *place, heads, kv_heads, d, q_norm, k_norm, 1e-6, rotary, d**-0.5, window)
        attention = replace(attention, gated=self.gated, head_norm=self.head_norm)
        if self.shapes:
            attention = replace(
                attention,
                v_norm=self._norm(d),
                stores=source == layer,
                values_are_keys=is_tied,
                rotary_span=d // 4 * 4 if rotary.shape[1] <= d // 4 * 4 else 0,
            )
        added = [Linear(a_converted, o_weight, self._bias(hidden), x, "add", h2)]
        if self.unusual:
            sinks = self.rng.normal(0, 2, heads).astype(np.float32)
            scales = self.rng.uniform(0.5, 1.5, MAX_POSITIONS).astype(np.float32)
            attention = replace(attention, softcap=1.5, norms_rows=norms_rows, sinks=sinks, query_scales=scales)
            branch = self._region(self.max_rows, hidden, "f32")
            added = [
                Linear(a_converted, o_weight, self._bias(hidden), branch, "store"),
                AddNorm(branch, self._norm(hidden), 1e-6, x, h2),
            ]
        return [
            *convolution,
            Linear(h1, qkv_weight, self._norm(qkv.columns), qkv, "store"),
            attention,
            *([] if a is a_converted else [Convert(a, a_converted)]),
            *added,
            *mlp,
        ]

    def _convolution_ops(self, x: Region, h: Normed) -> tuple[list, Normed]:
        gates = self._region(self.max_rows, 3 * self.hidden, "f32")
        convolved = self._region(self.max_rows, self.hidden, INPUT_DTYPES[self.weights], self.group)
        into, out = (self._packed(n, self.hidden, self._random(n, self.hidden)) for n in (3 * self.hidden, self.hidden))
        ring = self._ring(self.taps + self.ring, self.hidden)
        weight = self.rng.standard_normal((self.taps, self.hidden)).astype(np.float32)
        after = self._normed(self.max_rows)
        ops = [
            Linear(h, into, self._bias(3 * self.hidden), gates, "store"),
            ShortConv(gates, weight, self._bias(self.hidden), ring, convolved),
            Linear(convolved, out, self._bias(self.hidden), x, "add", after),
        ]
        return ops, after

    def _ring(self, rows: int, columns: int) -> Ring:
        ring = Ring(self.state_end, rows)
        self.state_end += ring.nbytes(columns)
        return ring

    def _recurrence_ops(
        self,
        x: Region,
        h: Normed,
        *,
        heads: int,
        keys: int,
        key_dim: int,
        value_dim: int,
        taps: int,
        rollback: int,
        delta: bool,
        dtype: str,
        tiled: bool = False,
    ) -> tuple[list, Normed]:
        """Return the ops of a recurrence of rows q | k | v | gate | rate | decay, and the norm after them."""
        key_size, inner = keys * key_dim, heads * value_dim
        size = 2 * key_size + inner
        mixed = self._region(self.max_rows, size + inner + 2 * heads, "f32")
        convolved, recurrent = (self._region(self.max_rows, columns, "f32") for columns in (size, inner))
        gated = self._region(self.max_rows, inner, INPUT_DTYPES[self.weights], self.group)
        into = self._packed(mixed.columns, self.hidden, self._random(mixed.columns, self.hidden))
        out = self._packed(self.hidden, inner, self._random(self.hidden, inner))
        weight = self.rng.standard_normal((taps, size)).astype(np.float32)
        ring = self._ring(taps - 1 + rollback, size)
        state = MatrixState(self.state_end, heads, key_dim, value_dim, rollback, dtype)
        self.state_end += state.nbytes
        rate = size + inner if delta else None
        after = self._normed(self.max_rows)
        ops = [
            Linear(h, into, None, mixed, "store"),
            CausalConv(mixed, 0, weight, self._bias(size), ring, convolved, 2 * keys if delta else 0, key_dim, 1e-6),
            LinearRecurrence(
                convolved,
                0,
                key_size,
                2 * key_size,
                keys,
                mixed,
                size + inner + heads,
                rate,
                a=-np.exp(self.rng.normal(0, 1, heads)).astype(np.float32),
                bias=self._norm(heads),
                state=state,
                out=recurrent,
                scale=key_dim**-0.5,
                skip=None if delta else self._norm(heads),
                tiled=tiled,
            ),
            GatedNorm(recurrent, mixed, size, self._norm(inner), 1e-6, value_dim if delta else inner, not delta, gated),
            Linear(gated, out, self._bias(self.hidden), x, "add", after),
        ]
        return ops, after

    def _gate_up(self) -> PackedMatrix:
        gate, up = self._random(self.intermediate, self.hidden), self._random(self.intermediate, self.hidden)
        return self._packed(2 * padded(self.intermediate), self.hidden, gate, up)

    def _down(self) -> PackedMatrix:
        return self._packed(self.hidden, self.intermediate, self._random(self.hidden, self.intermediate))

    def _mlp_ops(self, x: Region, h: Normed, after: Normed | None) -> list:
        last = {"scale": 0.6} if self.unusual else {}
        gated = "geglu" if self.unusual else "swiglu"
        return [
            Linear(h, self._gate_up(), self._gate_up_bias(), self.activated, gated),
            Linear(self.activated, self._down(), self._bias(self.hidden), x, "add", after, **last),
        ]

    def _expert_ops(self, x: Region, h: Normed, after: Normed | None) -> list:
        places = self.max_rows * self.top_k
        logits = self._region(self.max_rows, self.experts + self.gated, "f32")
        router = self._packed(logits.columns, self.hidden, self._random(logits.columns, self.hidden) * 4, dtype="f32")
        shared, shared_ops = self._shared_expert(h, logits) if self.gated else (None, [])
        self.routing = Routing(
            self.experts,
            self.top_k,
            self._region(self.max_rows, self.top_k, "f32"),
            self._region(self.max_rows, self.top_k, "i32"),
            self._region(1 + max_groups(self.max_rows, self.experts, self.top_k), 3, "i32"),
        )
        dispatched = self._normed(places)
        activated = self._region(places, self.intermediate, INPUT_DTYPES[self.weights], self.group)
        outputs = self._region(places, self.hidden, "f32")
        gate_up, down = ([make() for _ in range(self.experts)] for make in (self._gate_up, self._down))
        experts = range(self.experts)
        gate_up_biases = tuple(self._gate_up_bias() for _ in experts) if self.bias else None
        down_biases = tuple(self._norm(self.hidden) for _ in experts) if self.bias else None
        gated = "swiglu_clamped" if self.unusual else "swiglu"
        return [
            Linear(replace(h, data=x), router, self._bias(logits.columns), logits, "store"),
            *shared_ops,
            RouteRows(logits, self.routing, *self._routing_rule()),
            Dispatch(h, self.routing, dispatched),
            ExpertLinear(dispatched, tuple(gate_up), self.routing, activated, gated, gate_up_biases),
            ExpertLinear(activated, tuple(down), self.routing, outputs, "store", down_biases),
            Combine(outputs, self.routing, x, after, shared),
        ]

    def _routing_rule(self) -> tuple[RoutingRule, np.ndarray | None]:
        if not self.sigmoid:
            return RoutingRule(normalized=self.normalized), None
        groups = 2 if self.experts % 2 == 0 and self.experts > 2 else 1
        kept = 1 if self.top_k * groups <= self.experts else groups
        rule = RoutingRule(
            normalized=self.normalized, sigmoid=True, groups=groups, kept_groups=kept, eps=1e-6, scale=2.5
        )
        return rule, self._random(1, self.experts)[0]

    def _shared_expert(self, h: Normed, logits: Region) -> tuple[SharedExpert, list]:
        rows = self._region(self.max_rows, self.hidden, "f32")
        ops = [
            Linear(h, self._gate_up(), self._gate_up_bias(), self.activated, "swiglu"),
            Linear(self.activated, self._down(), self._bias(self.hidden), rows, "store"),
        ]
        return SharedExpert(rows, logits), ops


@pytest.fixture
def toy():
    return Toy
