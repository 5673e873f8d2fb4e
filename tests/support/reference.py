"""The numpy reference of every op: the definition of a correct result, written to be read.

`ReferenceProgram` runs the same list of ops as `Program` and keeps the same values, so a test can run both and compare
any region. Arithmetic is float64; values are rounded as their dtype rounds (bf16, q8, the KV cache's dtype).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from quire.kernels.ops import (
    BIAS_PADDING,
    BLOCK,
    GATED,
    QUERY_DTYPES,
    ROWS_IN_CACHE,
    AddGiven,
    AddNorm,
    Attention,
    CausalConv,
    Combine,
    Convert,
    Dispatch,
    Embed,
    EphemeralAttention,
    ExpertLinear,
    GatedNorm,
    GateRows,
    Gather,
    HeadLinear,
    HeadNorm,
    KVDtype,
    LatentAttention,
    Linear,
    LinearRecurrence,
    Normed,
    NormRows,
    Op,
    PoolRows,
    Region,
    RouteRows,
    ShortConv,
    SplitHeads,
    StoredDtype,
    padded,
)

from .reference_recurrence import Recurrences, gated_norm, normed_heads, silu

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]


def round_bf16(x: Array) -> Array:
    """Round finite values to the nearest bf16, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def quantize_q8(x: Array, group: int = 0) -> Array:
    """Quantize each row's blocks of 32 columns to int8, or its groups of blocks, rotated; and widen them again.

    The scale is max|x| / 127 in float32. Without groups, the scale of a block is rounded up to two bits of mantissa.
    """
    if group:
        return rotated_back(_quantize_groups(rotated(x, group), group), group)[:, : x.shape[1]]
    stored = np.zeros((x.shape[0], padded(x.shape[1])))
    stored[:, : x.shape[1]] = x
    blocks = stored.reshape(x.shape[0], -1, BLOCK)
    top = np.abs(blocks).max(axis=2, keepdims=True)
    exact = np.where(top > 0, top.astype(np.float32) / np.float32(127), np.float32(1))
    step = np.exp2(np.floor(np.log2(exact.astype(np.float64)))) / 4
    scale = np.ceil(exact / step) * step
    rounded: Array = (np.rint(blocks / scale) * scale).reshape(x.shape[0], -1)[:, : x.shape[1]]
    return rounded


def _quantize_groups(x: Array, group: int) -> Array:
    rounded = np.zeros_like(x)
    for first, end in _groups(x.shape[1], group):
        top = np.abs(x[:, first:end]).max(axis=1, keepdims=True).astype(np.float32)
        scale = np.where(top > 0, top / np.float32(127), np.float32(1))
        rounded[:, first:end] = np.rint(x[:, first:end] / scale) * scale
    return rounded


def rotated(x: Array, group: int) -> Array:
    """Return the rows of `x`, padded with zeros, with each group of blocks rotated: H (s * x), orthonormal."""
    stored = np.zeros((x.shape[0], padded(x.shape[1])))
    stored[:, : x.shape[1]] = x
    for first, end in _groups(stored.shape[1], group):
        stored[:, first:end] = stored[:, first:end] * SIGNS[: end - first] @ _hadamard(end - first)
    return stored


def rotated_back(x: Array, group: int) -> Array:
    """Return the inverse of `rotated`, padding included."""
    out = np.empty_like(x)
    for first, end in _groups(x.shape[1], group):
        out[:, first:end] = x[:, first:end] @ _hadamard(end - first) * SIGNS[: end - first]
    return out


def _groups(width: int, group: int) -> Iterator[tuple[int, int]]:
    for first in range(0, width, BLOCK * group):
        yield first, min(first + BLOCK * group, width)


def _hadamard(columns: int) -> Array:
    """Return Sylvester's orthonormal matrix of the largest power of two that divides `columns`, along a diagonal."""
    size = columns & -columns
    half = 0.5**0.5
    matrix: npt.NDArray[np.floating] = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.kron(np.array([[half, half], [half, -half]]), matrix)
    blocks: Array = np.kron(np.eye(columns // size), matrix)
    return blocks


_PI = 0x03707344_13198A2E_85A308D3_243F6A88  # the first 128 bits of the fraction of pi, the first 32 of them lowest
SIGNS: Array = np.array([-1.0 if _PI >> column & 1 else 1.0 for column in range(128)])


def as_dtype(x: Array, dtype: StoredDtype, group: int = 0) -> Array:
    if dtype == "bf16":
        return round_bf16(x)
    return quantize_q8(x, group) if dtype == "q8" else x.astype(np.float32).astype(np.float64)


def as_stored(x: Array, kv_dtype: str) -> Array:
    """Round numbers as the cache stores them in bf16, f16 or f32."""
    if kv_dtype == "f16":
        return x.astype(np.float32).astype(np.float16).astype(np.float64)
    return as_dtype(x, "bf16" if kv_dtype == "bf16" else "f32")


def as_key(x: Array, kv_dtype: str) -> Array:
    """Round heads [.., head_dim] as the cache stores keys: int8 by blocks of 32 with a scale in fp16."""
    if kv_dtype != "int8":
        return as_stored(x, kv_dtype)
    stored = np.zeros((len(x), padded(x.shape[1])))
    stored[:, : x.shape[1]] = x
    blocks = stored.reshape(len(x), -1, BLOCK)
    scale = (np.abs(blocks).max(axis=2, keepdims=True) / 127).astype(np.float16).astype(np.float64)
    rounded: Array = np.clip(np.rint(blocks / np.where(scale > 0, scale, 1)), -127, 127) * scale
    return rounded.reshape(len(x), -1)[:, : x.shape[1]]


def as_value(x: Array, kv_dtype: str) -> Array:
    """Round heads [.., head_dim] as the cache stores values: int8 with one scale per token."""
    if kv_dtype != "int8":
        return as_stored(x, kv_dtype)
    scale = np.abs(x).max(axis=1, keepdims=True) / 127
    values: Array = np.rint(x / np.where(scale > 0, scale, 1)) * scale
    return values


def as_latent(x: Array, rank: int, kv_dtype: str) -> Array:
    """Round a key [rank + rotary_dim] as the cache stores it: int8 with one scale in fp16 for the latent."""
    if kv_dtype != "int8":
        rounded: Array = as_key(x[None], kv_dtype)[0]
        return rounded
    scale = np.float64(np.float16(np.abs(x[:rank]).max() / 127))
    latent = np.clip(np.rint(x[:rank] / (scale or 1)), -127, 127) * scale
    key: Array = np.concatenate([latent, as_key(x[None, rank:], kv_dtype)[0]])
    return key


def rms_norm(x: Array, weight: npt.NDArray[np.float32], eps: float) -> Array:
    """Return the RMS norm over the last axis (Zhang and Sennrich, 2019)."""
    scaled: Array = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * weight
    return scaled


def norm_heads(heads: Array, weight: npt.NDArray[np.float32], eps: float, kind: HeadNorm, norms_rows: bool) -> Array:
    """Return the norm of each head [rows, heads, head_dim], or of all heads of a row together."""
    if kind == "layer":
        return rms_norm(heads - heads.mean(axis=-1, keepdims=True), weight.reshape(heads.shape[1:]), eps)
    rows = heads.reshape(len(heads), -1) if norms_rows else heads
    return rms_norm(rows, weight, eps).reshape(heads.shape)


def norm_rows(x: Array, op: NormRows) -> Array:
    """Return the norm of each row: Ba et al., 2016; Zhang and Sennrich, 2019; or of length 1."""
    if op.kind == "l2":
        unit: Array = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), op.eps)
        return unit
    assert op.weight is not None
    if op.kind == "rms":
        return rms_norm(x, op.weight, op.eps)
    centered = x - x.mean(axis=1, keepdims=True)
    return rms_norm(centered, op.weight, op.eps) + (0 if op.bias is None else op.bias)


def gelu(x: Array) -> Array:
    """Return the approximation of GELU with tanh (Hendrycks and Gimpel, 2016)."""
    activated: Array = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return activated


erf = np.vectorize(math.erf)


def gelu_exact(x: Array) -> Array:
    """Return GELU by the error function (Hendrycks and Gimpel, 2016)."""
    activated: Array = 0.5 * x * (1 + erf(x / np.sqrt(2)))
    return activated


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu_exact,
    "gelu_tanh": gelu,
    "relu": lambda y: np.maximum(y, 0),
    "relu_squared": lambda y: np.maximum(y, 0) ** 2,
    "tanh": np.tanh,
}


def gated(y: Array, epilogue: str) -> Array:
    """Return activation(gate) * up; the columns alternate between 16 of gate and 16 of up."""
    pairs = y.reshape(len(y), -1, 2, 16)
    gate, up = pairs[:, :, 0], pairs[:, :, 1]
    if epilogue == "swiglu_clamped":
        gate = np.minimum(gate, 7)
        activated: Array = gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -7, 7) + 1)
    else:
        activated = {"swiglu": silu, "geglu": gelu, "geglu_exact": gelu_exact}[epilogue](gate) * up
    return activated.reshape(len(y), -1)


def soft_cap(x: Array, cap: float) -> Array:
    """Return cap * tanh(x / cap); x itself without a cap."""
    return cap * np.tanh(x / cap) if cap else x


def groups_of(experts: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Yield (expert, first place, end) of each group, given the expert of each place, ascending."""
    for expert in np.unique(experts):
        first, end = (int(np.searchsorted(experts, expert, side=side)) for side in ("left", "right"))
        parts = -(-(end - first) // ROWS_IN_CACHE)
        borders = [first + (end - first) * part // parts for part in range(parts + 1)]
        yield from ((int(expert), *border) for border in pairwise(borders))


def rotate_halves(x: Array, rotary: Array, span: int = 0) -> Array:
    """Apply the rotary embedding (Su et al., 2021) by halves to the first elements; `rotary` [.., dim]: cos | sin.

    With a `span`, these are the first elements of each half of the first `span`.
    """
    half = rotary.shape[-1] // 2
    at = span // 2 or half
    cosine = rotary[..., :half]
    sine = rotary[..., half:]
    a = x[..., :half]
    b = x[..., at : at + half]
    between = x[..., half:at]
    rest = x[..., at + half :]
    return np.concatenate([a * cosine - b * sine, between, b * cosine + a * sine, rest], axis=-1)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    normalized: Array = weights / weights.sum(axis=-1, keepdims=True)
    return normalized


class ReferenceProgram:
    """Runs ops one by one on arrays. The KV cache is `keys` and `values` of each place: [page, token, kv_head, d]."""

    def __init__(self, ops: Sequence[Op], kv_dtype: KVDtype, page_size: int, num_pages: int) -> None:
        self.ops = ops
        self.kv_dtype = kv_dtype
        self.page_size = page_size
        layers = [op for op in ops if isinstance(op, Attention)]
        shapes = {(op.group, op.layer): (num_pages, page_size, op.num_kv_heads, op.head_dim) for op in layers}
        self.keys = {place: np.zeros(shape) for place, shape in shapes.items()}
        self.values = {place: np.zeros(shape) for place, shape in shapes.items()}
        self.latents: dict[tuple[int, int, int], Array] = {}  # (layer, page, token) -> a key of latent attention
        self.inputs: dict[tuple[int, int], dict[int, Array]] = {}  # (ring, state slot) -> inputs of a convolution
        self.recurrences = Recurrences(round_bf16)
        self.regions: dict[Region, npt.NDArray[Any]] = {}  # float64; int64 for the places and groups of experts

    def run(
        self,
        token_ids: Ints,
        row_start: Ints,
        first_position: Ints,
        page_ids: Ints,
        page_start: Ints,
        sample_rows: Ints,
        given_of: Ints | None = None,
        given: npt.NDArray[np.float32] | None = None,
        rotary: npt.NDArray[np.float32] | None = None,
        last_seen: Ints | None = None,
        state_slots: Ints | None = None,
    ) -> None:
        """Run the same step as `Program.run`."""
        counts = np.diff(row_start)
        self.token_ids = token_ids
        self.sample_rows = sample_rows
        self.given_of = given_of
        self.given = given
        self.rotary = rotary
        self.sequence = np.repeat(np.arange(len(counts)), counts)
        self.position = first_position[self.sequence] + np.arange(len(token_ids)) - row_start[self.sequence]
        self.last_seen = self.position if last_seen is None else last_seen
        self.state_slots = np.arange(len(counts)) if state_slots is None else state_slots
        tables = [page_ids[first:end] for first, end in pairwise(page_start)]
        each = len(counts)
        self.tables = [tables[first : first + each] for first in range(0, len(tables), each)]  # group -> tables
        for op in self.ops:
            self._run(op)

    def run_texts(
        self,
        token_ids: Ints,
        row_start: Ints,
        type_ids: Ints | None = None,
        rotary: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Run the same texts as `Program.run_texts`."""
        counts = np.diff(row_start)
        self.token_ids = token_ids
        self.row_start = row_start
        self.sample_rows = row_start[1:] - 1
        self.type_ids = np.zeros_like(token_ids) if type_ids is None else type_ids
        self.given_of = self.given = None
        self.rotary = rotary
        self.sequence = np.repeat(np.arange(len(counts)), counts)
        self.position = np.arange(len(token_ids)) - row_start[self.sequence]
        for op in self.ops:
            self._run(op)

    def _run(self, op: Op) -> None:
        match op:
            case Embed():
                self._embed(op)
            case Convert():
                x = self.regions[op.input]
                self._write(op.out, x if op.order is None else x[:, op.order])
            case Gather():
                self._write(op.out, self.regions[op.input][self.sample_rows], op.normed)
            case Linear():
                self._linear(op)
            case Attention():
                self._attention(op)
            case EphemeralAttention():
                self._ephemeral_attention(op)
            case SplitHeads():
                self._split_heads(op)
            case HeadLinear():
                self._head_linear(op)
            case LatentAttention():
                self._latent_attention(op)
            case ShortConv():
                gate, out_gate, value = np.split(self.regions[op.input], 3, axis=1)
                self._write(op.out, out_gate * self._convolved(op, gate * value))
            case CausalConv():
                x = self.regions[op.input][:, op.column : op.column + op.out.columns]
                self._write(op.out, normed_heads(op, silu(self._convolved(op, x))))
            case LinearRecurrence():
                self._write(
                    op.out, self.recurrences.run(op, self.regions, zip(self._slots(), self.position, strict=True))
                )
            case GatedNorm():
                gate = silu(self.regions[op.gate][:, op.column : op.column + op.input.columns])
                self._write(op.out, gated_norm(op, self.regions[op.input], gate))
            case NormRows():
                y = norm_rows(self.regions[op.input], op)
                for region in (op.out, op.converted):
                    if region is not None:
                        self._write(region, y)
            case PoolRows():
                pooled = {"mean": lambda x: x.mean(axis=0), "first": lambda x: x[0], "last": lambda x: x[-1]}
                texts = np.split(self.regions[op.input], self.row_start[1:-1])
                self._write(op.out, np.array([pooled[op.pooling](text) for text in texts]))
            case AddGiven():
                x = self.regions[op.out].copy()
                if self.given_of is not None and self.given is not None:
                    columns = slice(op.level * op.out.columns, (op.level + 1) * op.out.columns)
                    x[self.given_of >= 0] += self.given[self.given_of[self.given_of >= 0], columns]
                self._write(op.out, x, op.normed)
            case AddNorm():
                branch = rms_norm(self.regions[op.input], op.weight, op.eps)
                self._write(op.out, (self.regions[op.out] + branch) * op.scale, op.normed)
            case GateRows():
                columns = slice(op.column, op.column + op.input.columns)
                rows = rms_norm(self.regions[op.a][:, columns], op.weight, op.eps) + self.regions[op.b][:, columns]
                self._write(op.out, gelu(self.regions[op.input]) * rows * op.scale)
            case RouteRows():
                self._route(op)
            case Dispatch():
                self._dispatch(op)
            case ExpertLinear():
                self._expert_linear(op)
            case Combine():
                self._combine(op)

    def _write(self, out: Region, x: Array, normed: Normed | None = None) -> None:
        self.regions[out] = as_dtype(x, out.dtype, out.group)
        if normed is not None:
            self.regions[normed.data] = as_dtype(x * normed.weight, normed.data.dtype, normed.data.group)
            self.regions[normed.squares] = np.add.reduceat(x**2, np.arange(0, x.shape[1], BLOCK), axis=1)

    def _embed(self, op: Embed) -> None:
        x = op.weight.unpack().astype(np.float64)[self.token_ids] * op.scale
        if self.given_of is not None and self.given is not None:
            x[self.given_of >= 0] = self.given[self.given_of[self.given_of >= 0], : x.shape[1]]
        if op.types is not None:
            x = x + op.types.unpack()[self.type_ids]
        if op.positions is not None:
            x = x + op.positions.unpack()[self.position]
        self._write(op.out, x, op.normed)

    def _linear(self, op: Linear) -> None:
        y = self._input(op.input) @ op.weight.unpack().astype(np.float64).T
        if op.bias is not None:
            y = y + op.bias
        y = soft_cap(y * op.scale, op.softcap)
        if op.epilogue in FUNCTIONS:
            y = FUNCTIONS[op.epilogue](y)
        if op.epilogue in GATED:
            y = gated(y, op.epilogue)[:, : op.out.columns]
        self._write(op.out, self.regions[op.out] + y if op.epilogue == "add" else y, op.normed)
        if op.maxima is not None:
            self.regions[op.maxima] = np.maximum.reduceat(y, np.arange(0, y.shape[1], BLOCK), axis=1)

    def _input(self, source: Region | Normed) -> Array:
        """Return the rows that a linear layer multiplies."""
        if not isinstance(source, Normed):
            return self.regions[source]
        squares = self.regions[source.squares].sum(axis=1, keepdims=True)
        scaled: Array = self.regions[source.data] / np.sqrt(squares / source.data.columns + source.eps)
        return scaled

    def _slots(self) -> list[int]:
        """Return the state slot of each row."""
        return [int(slot) for slot in np.asarray(self.state_slots)[self.sequence]]

    def _convolved(self, op: ShortConv | CausalConv, x: Array) -> Array:
        taps = len(op.weight)
        out = np.zeros_like(x)
        for row, (slot, position) in enumerate(zip(self._slots(), self.position, strict=True)):
            inputs = self.inputs.setdefault((op.ring.offset, slot), {})
            inputs[position] = x[row]
            seen = range(max(0, position - taps + 1), position + 1)
            total = sum(op.weight[i - position - 1] * inputs[i] for i in seen)
            out[row] = total if op.bias is None else total + op.bias
        return out

    def _route(self, op: RouteRows) -> None:
        logits = self.regions[op.logits][:, : op.routing.num_experts]
        top_k = op.routing.top_k
        scores = 1 / (1 + np.exp(-logits)) if op.rule.sigmoid else softmax(logits)
        ranks = scores if op.bias is None else scores + op.bias
        grouped = ranks.reshape(len(ranks), op.rule.groups, -1)
        pairs = np.sort(grouped, axis=2)[:, :, -2:].sum(axis=2)
        kept = np.argsort(-pairs, axis=1, kind="stable")[:, : op.rule.kept_groups]
        is_kept = (np.arange(op.rule.groups) == kept[:, :, None]).any(axis=1)[:, :, None]
        ranks = np.where(is_kept, grouped, -np.inf).reshape(ranks.shape)
        experts = np.argsort(-ranks, axis=1, kind="stable")[:, :top_k]
        chosen = np.take_along_axis(scores, experts, axis=1)
        divisor = chosen.sum(axis=1, keepdims=True) + op.rule.eps if op.rule.normalized else 1
        scales = 1 if op.scales is None else op.scales[experts]
        self.regions[op.routing.weights] = chosen / divisor * op.rule.scale * scales
        order = np.argsort(experts.reshape(-1), kind="stable")  # rows sorted by expert, then by row
        places = np.empty(order.size, np.int64)
        places[order] = np.arange(order.size)
        self.regions[op.routing.places] = places.reshape(-1, top_k)
        self.regions[op.routing.groups] = np.array(list(groups_of(np.sort(experts.reshape(-1)))))

    def _dispatch(self, op: Dispatch) -> None:
        rows = np.repeat(np.arange(len(self.token_ids)), op.routing.top_k)
        for source, out in ((op.input.data, op.out.data), (op.input.squares, op.out.squares)):
            self.regions[out] = np.empty((rows.size, self.regions[source].shape[1]))
            self.regions[out][self.regions[op.routing.places].reshape(-1)] = self.regions[source][rows]

    def _expert_linear(self, op: ExpertLinear) -> None:
        x = self._input(op.input)
        y = np.empty((len(x), op.weights[0].out_features))
        for expert, first, end in self.regions[op.routing.groups]:
            y[first:end] = x[first:end] @ op.weights[expert].unpack().astype(np.float64).T
            if op.biases is not None:
                y[first:end] += op.biases[expert]
        if op.epilogue in FUNCTIONS:
            y = FUNCTIONS[op.epilogue](y)
        self._write(op.out, gated(y, op.epilogue)[:, : op.out.columns] if op.epilogue in GATED else y)

    def _split_heads(self, op: SplitHeads) -> None:
        rows = self.regions[op.input]
        heads = op.out.rows // op.input.rows
        columns = [rows[:, head * op.stride :][:, : op.out.columns] for head in range(heads)]
        self._write(op.out, np.concatenate(columns))

    def _head_linear(self, op: HeadLinear) -> None:
        heads = np.split(self.regions[op.input], len(op.weights))
        products = [x @ weight.unpack().astype(np.float64).T for x, weight in zip(heads, op.weights, strict=True)]
        self._write(op.out, np.concatenate(products, axis=1))

    def _latent_attention(self, op: LatentAttention) -> None:
        rows, heads = len(self.token_ids), op.num_heads
        source = op.rotary[self.position] if self.rotary is None else self.rotary
        rotary = source.astype(np.float64)[:, None, :]
        rotated = self.regions[op.queries][:, : heads * op.stride].reshape(rows, heads, -1)[:, :, -op.rotary_dim :]
        absorbed = self.regions[op.absorbed].reshape(rows, heads, op.rank)
        q = np.concatenate([absorbed, rotate_halves(rotated, rotary)], axis=2) * op.scale
        q = as_dtype(q.reshape(rows * heads, -1), QUERY_DTYPES[self.kv_dtype]).reshape(q.shape)
        keys = self.regions[op.keys][:, op.first_key : op.first_key + op.rank + op.rotary_dim]
        latents = rms_norm(keys[:, : op.rank], op.norm, op.eps)
        keys = np.concatenate([latents, rotate_halves(keys[:, None, op.rank :], rotary)[:, 0]], axis=1)
        for row, (sequence, position) in enumerate(zip(self.sequence, self.position, strict=True)):
            page = self.tables[op.group][sequence][position // self.page_size]
            self.latents[op.layer, page, position % self.page_size] = as_latent(keys[row], op.rank, self.kv_dtype)
        out = np.zeros((heads, rows, op.rank))
        for row, sequence in enumerate(self.sequence):
            seen = np.arange(self.last_seen[row] + 1)
            pages = self.tables[op.group][sequence][seen // self.page_size]
            tokens = zip(pages, seen % self.page_size, strict=True)
            stored = np.array([self.latents[op.layer, page, token] for page, token in tokens])
            out[:, row] = softmax(q[row] @ stored.T) @ stored[:, : op.rank]
        self._write(op.out, out.reshape(heads * rows, op.rank))

    def _combine(self, op: Combine) -> None:
        y = self.regions[op.input][self.regions[op.routing.places]]  # [tokens, top_k, columns]
        added = np.einsum("rkc,rk->rc", y, self.regions[op.routing.weights])
        if op.shared is not None:
            added = added + self.regions[op.shared.rows] * sigmoid(self.regions[op.shared.logits][:, -1:])
        self._write(op.out, self.regions[op.out] + added if op.adds else added, op.normed)

    def _queries(self, op: Attention) -> Array:
        """Return the queries [tokens, num_heads, head_dim] as they multiply the keys; store K and V in their pages."""
        q, k, v = self._rotated(op, op.norms_rows)
        for row, (sequence, position) in enumerate(zip(self.sequence, self.position, strict=True)):
            page = self.tables[op.group][sequence][position // self.page_size]
            token = position % self.page_size
            if op.stores:
                self.keys[op.group, op.layer][page, token] = as_key(k[row], self.kv_dtype)
                self.values[op.group, op.layer][page, token] = as_value(v[row], self.kv_dtype)
        return as_dtype(q.reshape(-1, op.head_dim), QUERY_DTYPES[self.kv_dtype]).reshape(q.shape)

    def _rotated(self, op: Attention | EphemeralAttention, norms_rows: bool) -> tuple[Array, Array, Array]:
        """Return the heads of queries, which are scaled, keys and values, before they are rounded."""
        q, k, v = self._heads(op)
        kind = op.head_norm if isinstance(op, Attention) else "rms"

        def normed(heads: Array, weight: npt.NDArray[np.float32] | None) -> Array:
            return heads if weight is None else norm_heads(heads, weight, op.eps, kind, norms_rows)

        if kind != "rotated":
            q, k = normed(q, op.q_norm), normed(k, op.k_norm)
        span = 0
        if isinstance(op, Attention):
            span = op.rotary_span
            v = v if op.v_norm is None else rms_norm(v, op.v_norm, op.eps)
        rows = np.zeros((len(self.position), 0)) if op.rotary is None else op.rotary[self.position]
        if self.rotary is not None and (op.rotary is not None or isinstance(op, EphemeralAttention)):
            rows = self.rotary
        rotary = rows.astype(np.float64)[:, None, :]
        q, k = rotate_halves(q, rotary, span), rotate_halves(k, rotary, span)
        if kind == "rotated":
            q, k = normed(q, op.q_norm), normed(k, op.k_norm)
        if isinstance(op, Attention) and op.query_scales is not None:
            q = q * op.query_scales[self.position][:, None, None]
        return q * op.scale, k, v

    def _heads(self, op: Attention | EphemeralAttention) -> tuple[Array, Array, Array]:
        heads = self.regions[op.qkv].reshape(len(self.token_ids), -1, op.head_dim)
        if isinstance(op, Attention) and not op.stores:
            return heads, heads[:, :0], heads[:, :0]
        if isinstance(op, Attention) and op.values_are_keys:
            keys = heads[:, -op.num_kv_heads :]
            return heads[:, : -op.num_kv_heads], keys, keys
        k, v = heads[:, -2 * op.num_kv_heads : -op.num_kv_heads], heads[:, -op.num_kv_heads :]
        queries = heads[:, : -2 * op.num_kv_heads]
        return queries[:, :: 2 if isinstance(op, Attention) and op.gated else 1], k, v

    def _gates(self, op: Attention) -> Array:
        """Return the factors of the output: the sigmoid of the gate that follows each query head."""
        heads = self.regions[op.qkv].reshape(len(self.token_ids), -1, op.head_dim)
        return sigmoid(heads[:, 1 : 2 * op.num_heads : 2])

    def _ephemeral_attention(self, op: EphemeralAttention) -> None:
        q, k, v = self._rotated(op, norms_rows=False)
        kv_dtype = op.pages.dtype
        group = op.num_heads // op.num_kv_heads
        q = as_dtype(q.reshape(-1, op.head_dim), QUERY_DTYPES[kv_dtype]).reshape(q.shape)
        keys = np.repeat(as_key(k.reshape(-1, op.head_dim), kv_dtype).reshape(k.shape), group, axis=1)
        values = np.repeat(as_value(v.reshape(-1, op.head_dim), kv_dtype).reshape(v.shape), group, axis=1)
        out = np.zeros_like(q)
        for row, (sequence, position) in enumerate(zip(self.sequence, self.position, strict=True)):
            rows = np.flatnonzero(self.sequence == sequence)
            after = self.position[rows] - position
            behind = op.window - op.causal if op.window else len(q)
            ahead = 0 if op.causal else op.window or len(q)
            seen = rows[(after >= -behind) & (after <= ahead)]
            scores = np.einsum("hd,thd->ht", q[row], keys[seen])
            if op.bias is not None:
                positions = (op.bias.shape[1] + 1 - BIAS_PADDING) // 2
                scores = scores + op.bias[:, positions - 1 + self.position[seen] - position]
            out[row] = np.einsum("ht,thd->hd", softmax(scores), values[seen])
        self._write(op.out, out.reshape(len(q), -1))

    def _attention(self, op: Attention) -> None:
        q = self._queries(op)
        out = np.zeros_like(q)
        for row, (sequence, position) in enumerate(zip(self.sequence, self.position, strict=True)):
            oldest = max(0, position - op.window + 1) if op.window else 0
            seen = np.arange(oldest, self.last_seen[row] + 1)
            pages = self.tables[op.group][sequence][seen // self.page_size]
            tokens = seen % self.page_size
            assert pages.min() >= 0, "pages that a row sees are not released"
            keys = np.repeat(self.keys[op.group, op.layer][pages, tokens], op.num_heads // op.num_kv_heads, axis=1)
            values = np.repeat(self.values[op.group, op.layer][pages, tokens], op.num_heads // op.num_kv_heads, axis=1)
            scores = soft_cap(np.einsum("hd,thd->ht", q[row], keys), op.softcap)
            if op.sinks is not None:
                scores = np.concatenate([scores, op.sinks.astype(np.float64)[:, None]], axis=1)
            out[row] = np.einsum("ht,thd->hd", softmax(scores)[:, : len(seen)], values)
        if op.gated:
            out = out * self._gates(op)
        self._write(op.out, out.reshape(len(q), -1))
