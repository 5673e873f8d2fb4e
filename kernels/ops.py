"""The ops of a program, and the layout of values in its arena.

`runtime/model/decoder.py` emits a model as a list of ops and `program.pyx` runs it; `tests/support/reference.py` is the
numpy reference. Every op reads and writes `Region`s of one arena and is described completely by its own fields.

The rows of a step are the scheduled tokens of all sequences, one sequence after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from .pack import PackedMatrix

DType = Literal["f32", "bf16", "q8"]  # dtype of activations
WeightDtype = Literal["bf16", "q8", "q4", "q4_k", "q5_k", "q6_k", "mxfp4", "q4_z", "f32"]
Epilogue = Literal[
    "store",
    "add",
    "gelu",
    "gelu_tanh",
    "relu",
    "relu_squared",
    "tanh",
    "swiglu",
    "geglu",
    "swiglu_clamped",
    "geglu_exact",
]
GATED: tuple[Epilogue, ...] = (  # epilogues of weights with alternating columns of gate and up
    "swiglu",
    "geglu",
    "swiglu_clamped",
    "geglu_exact",
)
NormKind = Literal["layer", "rms", "l2"]
HeadNorm = Literal["rms", "layer", "rotated"]  # norms of query and key heads: see `Attention`
Pooling = Literal["mean", "first", "last"]
StoredDtype = Literal["f32", "bf16", "q8", "i32"]  # dtype of a region: activations, and tables of numbers

KVDtype = Literal["bf16", "f16", "f32", "int8"]
StateDtype = Literal["f32", "bf16"]  # dtype of the matrices in states
# KV dtype -> dtype of queries
QUERY_DTYPES: dict[KVDtype, DType] = {"bf16": "bf16", "f16": "f32", "f32": "f32", "int8": "q8"}
INPUT_DTYPES: dict[WeightDtype, DType] = {  # weight's dtype -> dtype of the input
    "bf16": "bf16",
    "q8": "q8",
    "q4": "q8",
    "q4_k": "q8",
    "q5_k": "q8",
    "q6_k": "q8",
    "mxfp4": "q8",
    "q4_z": "q8",
    "f32": "f32",
}
BLOCK = 32  # columns that share one activation scale; every row is padded to a multiple of it
ALIGNMENT = 64  # alignment in bytes of every plane of a region
EPHEMERAL_PAGE_SIZE = 32  # tokens
BIAS_PADDING = 63  # columns of a bias that belong to no key: whole tiles of 64 tokens are read, and then masked
SEGMENT = 64  # value columns of a head that a recurrence computes together: their state stays in L1
LANES = 16  # columns of a vector; rows of a state are padded to a multiple of it
MOST_HEADS = 64  # query heads that attend together; a unit of attention has as many rows
ROWS_IN_CACHE = 192  # activations that stay in L2 while the weights of a linear layer pass over them


def padded(columns: int) -> int:
    """Return the number of columns as stored: a multiple of BLOCK. The padding is always zero."""
    return -(-columns // BLOCK) * BLOCK


def aligned(size: int) -> int:
    """Return `size` rounded up to ALIGNMENT."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Region:
    """A [rows, columns] value at `offset` bytes in the arena. `rows` is the capacity; a step uses the first rows.

    f32, bf16, i32: [rows, padded(columns)]. q8: three planes, each aligned: int8 [rows, padded], f32 scales
    [rows, padded / 32], int32 sums [rows, padded / 32] holding `-128 * sum(block)`. With a `group`, the columns are
    rotated before they are rounded, and `group` blocks share a scale and a sum, which stand at the first of them.
    """

    offset: int
    rows: int
    columns: int
    dtype: StoredDtype
    group: int = 0

    @property
    def nbytes(self) -> int:
        return region_nbytes(self.rows, self.columns, self.dtype)


def region_nbytes(rows: int, columns: int, dtype: StoredDtype) -> int:
    width = padded(columns)
    if dtype == "q8":
        return aligned(rows * width) + 2 * aligned(rows * width // BLOCK * 4)
    return aligned(rows * width * (2 if dtype == "bf16" else 4))


@dataclass(frozen=True, slots=True)
class EphemeralPages:
    """Pages in the arena for the keys and values of one layer, laid out as pages of the KV cache.

    A text's pages are consecutive, each with its KV heads one after another. `ephemeral_pages` returns their number.
    """

    offset: int  # bytes in the arena
    num_pages: int
    num_kv_heads: int
    head_dim: int
    dtype: KVDtype

    @property
    def page_size(self) -> int:
        return EPHEMERAL_PAGE_SIZE

    @property
    def head_dims(self) -> tuple[int, ...]:
        return (self.head_dim,)

    @property
    def padded_head_dim(self) -> int:
        unit = BLOCK if self.dtype == "int8" else BLOCK // 2
        return -(-self.head_dim // unit) * unit

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head of a page: keys, then values; for int8, then their scales."""
        elements = EPHEMERAL_PAGE_SIZE * self.padded_head_dim
        if self.dtype == "int8":
            return aligned(2 * elements + elements // 16 + EPHEMERAL_PAGE_SIZE * 4)
        return 2 * elements * (4 if self.dtype == "f32" else 2)

    @property
    def page_stride(self) -> int:
        """Bytes of a page."""
        return self.num_kv_heads * self.head_bytes

    @property
    def nbytes(self) -> int:
        return self.num_pages * self.page_stride


def ephemeral_pages(tokens: int, texts: int) -> int:
    """Return the largest number of pages that `texts` texts with `tokens` tokens in total can take."""
    texts = min(texts, tokens)
    return texts + (tokens - texts) // EPHEMERAL_PAGE_SIZE


@dataclass(frozen=True, slots=True)
class Normed:
    """RMS norm of an f32 x [rows, columns], in two halves that need no pass over memory.

    The op that writes 32 columns of x also writes data = convert(x * weight), in the dtype the next linear layer reads,
    and squares = sum(x²) of these columns. The linear layer multiplies its sums of each row by
    1 / sqrt(sum(squares) / columns + eps): a factor of a whole row can be taken out of a sum over K, and out of q8.
    """

    data: Region  # [rows, columns]
    squares: Region  # f32 [rows, padded(columns) / 32]
    weight: npt.NDArray[np.float32]  # [columns]
    eps: float


@dataclass(frozen=True, slots=True)
class Embed:
    """out[r] = column token_ids[r] of `weight`, widened to f32, times `scale`; or a row that the step provides instead.

    Encoders with learned embeddings of the type and the position of a token add a column of each: first
    `types`[type_ids[r]], then `positions`[number of the row in its sequence].
    """

    weight: PackedMatrix  # [vocab, hidden]
    out: Region  # f32 [tokens, hidden]
    normed: Normed | None = None  # norm of out
    scale: float = 1.0
    types: PackedMatrix | None = None  # [type ids, hidden]
    positions: PackedMatrix | None = None  # [positions, hidden]


@dataclass(frozen=True, slots=True)
class AddGiven:
    """out[r] += columns of the row that the step provides in place of the embedding of row r, if it provides one.

    A provided row holds the embedding and then the columns of each level: this op adds the columns of its `level`, from
    1.
    """

    level: int
    out: Region  # f32 [tokens, columns of the embedding]
    normed: Normed | None = None  # norm of out


@dataclass(frozen=True, slots=True)
class Convert:
    """out = input in another dtype; a q8 scale depends on 32 columns of one row only, or on the columns of a group.

    With an `order`, column i of `out` is column order[i] of `input`.
    """

    input: Region  # f32 [rows, columns]
    out: Region
    order: npt.NDArray[np.int32] | None = None  # [columns], each column once


@dataclass(frozen=True, slots=True)
class Lora:
    """The part of the adapters in a linear layer: B times the rows that a `LoraShrink` has written.

    A `target` is a linear layer that adapters may change; each target has a number.
    """

    target: int
    rows: Region  # f32 [tokens, ranks]


@dataclass(frozen=True, slots=True)
class LoraShrink:
    """out = A x * scale for the rows that have an adapter, with A of that adapter; other rows are not written.

    `normed` is the norm of the input that the linear layer reads: `input` has the rows before the norm, and A's columns
    in adapters have been multiplied by the norm's weights.
    """

    input: Region  # f32 [tokens, in_features]
    normed: Normed | None
    target: int
    out: Region  # f32 [tokens, ranks]
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Linear:
    """y = (input @ weight.T + bias) * scale, then `store`: out = y, or softcap * tanh(y / softcap) with a `softcap`;
    `add`: out += y; `swiglu`: out = silu(gate) * up; `geglu`: out = gelu(gate) * up, by the approximation with tanh;
    `swiglu_clamped`: out = gate * sigmoid(1.702 gate) * (up + 1), with gate at most 7 and up between -7 and 7;
    `geglu_exact`: out = gelu(gate) * up, by the error function. `gelu`, `gelu_tanh`, `relu`, `relu_squared` and `tanh`:
    out is the function of each y; `gelu` uses the error function.

    In a gated layer the weight alternates 16 columns of gate and 16 of up, and `out` has half as many columns. `out`
    may have any dtype, but must be f32 with `add`, `normed` or `maxima` (the maximum of each 32 columns, NaN if one is
    NaN). With `lora`, y of a row that has an adapter also has the adapter's B (A x).
    """

    input: Region | Normed  # [rows, in_features] in the dtype of INPUT_DTYPES
    weight: PackedMatrix
    bias: npt.NDArray[np.float32] | None  # [out_features], laid out as the weight's columns
    out: Region
    epilogue: Epilogue
    normed: Normed | None = None  # norm of out
    maxima: Region | None = None  # f32 [rows, padded(out_features) / 32]
    scale: float = 1.0
    softcap: float = 0.0  # 0: none
    lora: Lora | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention over paged keys and values, from the QKV projection on.

    Splits qkv into heads; applies q_norm and k_norm if given, to each head or, with `norms_rows`, to all query heads of
    a row together and to all key heads together; then the rotary embedding; stores K and V in their pages; computes
    softmax(q K^T) V per head over the sequence's pages, with `window` > 0 over the last `window` tokens. With `softcap`
    > 0, scores become softcap * tanh(score / softcap). With `sinks`, the softmax of a head has one more score, which
    takes a share of the weight and has no value. With `gated`, each query head in qkv is followed by its gate, of as
    many elements, and `out` is multiplied by the sigmoid of the gates.
    `head_norm` is the kind of q_norm and k_norm: an RMS norm before the rotation; `layer`, a LayerNorm without bias
    before the rotation, of which each head has weights of its own; or `rotated`, an RMS norm after the rotation. The
    queries of position p are also multiplied by query_scales[p].
    Layers of one window may share pages: they are a layer group, with one page table per sequence and a slot in its
    pages for each layer. Without `stores`, qkv has queries alone, and the op reads the keys and values that an earlier
    op with the same place has stored. With `values_are_keys`, qkv has queries and keys, and values are the keys before
    norm and rotation.

    `rotary` is f32 [positions, rotary_dim]: cos in the first half of the columns, sin in the second. The first
    rotary_dim elements of a head are rotated, by halves (Hugging Face convention); without a table none are. With
    `rotary_span`, the first rotary_dim / 2 elements of each half of the first `rotary_span` are rotated. A step may
    give a row of cosines and sines for each of its rows, in place of the row of its position. Pages have the
    KV cache's dtype and queries the one in QUERY_DTYPES. `out` has any dtype if the query heads of a KV head fill whole
    blocks of 32 columns, else f32.
    """

    qkv: Region  # f32 [tokens, (num_heads + 2 num_kv_heads) * head_dim], or gated (2 num_heads + 2 num_kv_heads) * …
    out: Region  # [tokens, num_heads * head_dim]
    group: int  # layer group: selects a page table of the sequence
    layer: int  # slot in the group's pages
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: npt.NDArray[np.float32] | None  # [head_dim]; with norms_rows or head_norm `layer` [num_heads * head_dim]
    k_norm: npt.NDArray[np.float32] | None  # [head_dim]; with norms_rows or head_norm `layer` [num_kv_heads * head_dim]
    eps: float
    rotary: npt.NDArray[np.float32] | None
    scale: float  # factor of q, usually head_dim ** -0.5
    window: int
    softcap: float = 0.0  # 0: none
    norms_rows: bool = False
    sinks: npt.NDArray[np.float32] | None = None  # [num_heads]
    gated: bool = False
    v_norm: npt.NDArray[np.float32] | None = None  # [head_dim]
    stores: bool = True
    values_are_keys: bool = False
    rotary_span: int = 0  # 0: rotary_dim
    head_norm: HeadNorm = "rms"
    query_scales: npt.NDArray[np.float32] | None = None  # [positions]


@dataclass(frozen=True, slots=True)
class EphemeralAttention:
    """Attention among the tokens of each text, whose keys and values nothing reads after the op.

    As `Attention`, but with `pages` in the arena instead of the KV cache's, for the layer that runs. All ops of
    a program have the same `pages`. With `causal`, a row sees itself and the rows before it, of them the last `window`
    with `window` > 0; else it sees the whole text, with `window` > 0 the rows that are at most `window` away. With a
    `bias`, `bias[head, positions - 1 + key - query]` is added to the score of a query and a key, which are positions.
    With a `rotary_dim` in place of a table, every step gives the cosines and sines of its rows.
    """

    qkv: Region  # f32 [tokens, (num_heads + 2 num_kv_heads) * head_dim]
    out: Region  # [tokens, num_heads * head_dim], as in Attention
    pages: EphemeralPages
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: npt.NDArray[np.float32] | None  # [head_dim]
    k_norm: npt.NDArray[np.float32] | None  # [head_dim]
    eps: float
    rotary: npt.NDArray[np.float32] | None
    scale: float  # factor of q
    causal: bool
    window: int = 0
    bias: npt.NDArray[np.float32] | None = None  # [num_heads, 2 * positions - 1 + BIAS_PADDING]
    rotary_dim: int = 0  # elements of a head that are rotated without a `rotary` table


@dataclass(frozen=True, slots=True)
class SplitHeads:
    """The columns of each head, in another dtype: row h * tokens + r of `out` is head h of row r of `input`.

    The heads are the first columns of `input`, `stride` columns each, of which `out` has the first ones. `tokens` is
    the most rows of a step.
    """

    input: Region  # f32 [tokens, num_heads * stride or more]
    stride: int
    out: Region  # [num_heads * tokens, columns]


@dataclass(frozen=True, slots=True)
class HeadLinear:
    """A linear layer with a matrix for each head, whose results lie side by side.

    out[r] = input[h * tokens + r] @ weights[h].T for each head h. `out` has any dtype if the columns of a head fill
    whole blocks of 32, or groups of them, else f32.
    """

    input: Region  # [num_heads * tokens, in_features], as `SplitHeads` writes it
    weights: tuple[PackedMatrix, ...]  # [num_heads], of one shape and dtype; out_features are a multiple of BLOCK
    out: Region  # [tokens, num_heads * out_features]


def head_groups(num_heads: int) -> int:
    """Return the number of equal groups, of at most MOST_HEADS heads, in which heads read the keys that they share."""
    return next(
        groups for groups in range(1, num_heads + 1) if num_heads <= MOST_HEADS * groups and num_heads % groups == 0
    )


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Causal attention over paged latents (multi-head latent attention, DeepSeek-V2), with absorbed matrices.

    A page has one key per token for all heads: the latent, `rank` elements normed by `norm`, and then the elements that
    `rotary` rotates. The value of a token is its latent. The query of head h has `rank` elements from `absorbed`, the
    product of the head's columns and its matrix of keys, and then the rotated last columns of the head in `queries`,
    where each head has `stride` columns. `out` has the weighted sums of latents, in rows as `SplitHeads` writes them,
    in any dtype. The rest is as in `Attention`.
    """

    queries: Region  # f32 [tokens, num_heads * stride or more]
    stride: int
    absorbed: Region  # f32 [tokens, num_heads * rank]
    keys: Region  # f32 [tokens, first_key + rank + rotary_dim or more]
    first_key: int  # column of the latent, which the rotated part follows
    out: Region  # [num_heads * tokens, rank]
    group: int  # layer group: selects a page table of the sequence
    layer: int  # slot in the group's pages
    num_heads: int
    rank: int  # a multiple of BLOCK
    norm: npt.NDArray[np.float32]  # [rank]
    eps: float
    rotary: npt.NDArray[np.float32]  # [positions, rotary_dim]
    scale: float  # factor of queries

    @property
    def rotary_dim(self) -> int:
        """Elements of a key that are rotated."""
        return int(self.rotary.shape[1])


@dataclass(frozen=True, slots=True)
class Ring:
    """The part of a sequence's state that has the inputs of its last `rows` tokens, f32 [rows, padded columns].

    The input of position p is row p % rows, so a sequence may return to a position `rows` - `taps` tokens earlier.
    """

    offset: int  # bytes from the start of the state
    rows: int  # no fewer than the taps

    def nbytes(self, columns: int) -> int:
        """Return the bytes of a ring of `columns` columns."""
        return aligned(self.rows * padded(columns) * 4)


@dataclass(frozen=True, slots=True)
class ShortConv:
    """Causal convolution of each column over the last tokens of a sequence, between two gates.

    A row of `input` is b | c | x. With u = b * x, out = c * (bias + the sum of weight[i] * u over the last `taps`
    tokens): weight[0] belongs to the oldest one, the last weight to the row itself. Before a sequence, u is 0.
    """

    input: Region  # f32 [tokens, 3 * columns]
    weight: npt.NDArray[np.float32]  # [taps, columns]
    bias: npt.NDArray[np.float32] | None  # [columns]
    ring: Ring
    out: Region  # [tokens, columns]

    @property
    def state_end(self) -> int:
        """The bytes of a state up to the end of this op's part."""
        return self.ring.offset + self.ring.nbytes(self.out.columns)


@dataclass(frozen=True, slots=True)
class CausalConv:
    """SiLU of a causal convolution of each column over the last tokens of a sequence, of columns from `column` on.

    out = silu(bias + the sum of weight[i] * x over the last `taps` tokens), as in `ShortConv`, without gates. The first
    `num_normed` heads of `head_dim` columns are then divided by their length: x / sqrt(sum(x^2) + eps).
    """

    input: Region  # f32 [tokens, column + columns or more]
    column: int
    weight: npt.NDArray[np.float32]  # [taps, columns]
    bias: npt.NDArray[np.float32] | None  # [columns]
    ring: Ring
    out: Region  # f32 [tokens, columns]
    num_normed: int = 0
    head_dim: int = 0
    eps: float = 0.0

    @property
    def state_end(self) -> int:
        """The bytes of a state up to the end of this op's part."""
        return self.ring.offset + self.ring.nbytes(self.out.columns)


@dataclass(frozen=True, slots=True)
class MatrixState:
    """The part of a sequence's state that has a matrix [key_dim, value_dim] for each head.

    The value columns of a head are in segments of `width` columns, each with a part of its own: the number of tokens
    that the matrix has seen, int64 in 64 bytes; the matrix [key_dim, width]; and the inputs of the `rollback` tokens
    after it, f32 [rollback, input_columns]: key, value, decay and rate. The inputs of position p are in row
    p % rollback. So a sequence may return to any of its last `rollback` positions.
    """

    offset: int  # bytes from the start of the state
    num_heads: int
    key_dim: int
    value_dim: int
    rollback: int  # tokens
    dtype: StateDtype = "f32"  # bf16: rounded after every token

    @property
    def segments(self) -> int:
        """Segments of a head."""
        return -(-self.value_dim // SEGMENT)

    @property
    def width(self) -> int:
        """Stored columns of a segment."""
        return min(SEGMENT, whole_vectors(self.value_dim))

    @property
    def matrix_bytes(self) -> int:
        """Bytes of the matrix of a segment."""
        return aligned(self.key_dim * self.width * (2 if self.dtype == "bf16" else 4))

    @property
    def input_columns(self) -> int:
        """Floats of a token's inputs in a segment."""
        return whole_vectors(self.key_dim) + self.width + LANES

    @property
    def segment_bytes(self) -> int:
        return ALIGNMENT + self.matrix_bytes + aligned(self.rollback * self.input_columns * 4)

    @property
    def nbytes(self) -> int:
        return self.num_heads * self.segments * self.segment_bytes


def whole_vectors(columns: int) -> int:
    """Return `columns` rounded up to LANES."""
    return -(-columns // LANES) * LANES


@dataclass(frozen=True, slots=True)
class LinearRecurrence:
    """Linear attention with a matrix S [key_dim, value_dim] per head that decays: the gated delta rule, or Mamba-2.

    For each token, with dt = softplus(its decay input + bias), within `time_limits`, and decay = exp(a * dt):
    * S = decay * S + the outer product of the key and u, and out = scale * S^T query + skip * value;
    * with a `rate` column (gated delta rule), u = rate * (value - decay * S^T key), where rate = rate_scale *
      sigmoid(its rate input); without (Mamba-2: keys are B, queries are C), u = dt * value.
    Before a sequence, S is 0. `num_key_heads` heads of queries and keys serve equal numbers of consecutive heads, or
    with `tiled` each head i the heads i, i + num_key_heads, and so on.
    """

    input: Region  # f32 [tokens, …]: queries, keys and values from these columns on, each one head after another
    query: int
    key: int
    value: int
    num_key_heads: int
    gates: Region  # f32 [tokens, …]: a column per head, from `decay` and from `rate` on
    decay: int
    rate: int | None
    a: npt.NDArray[np.float32]  # [heads], not positive
    bias: npt.NDArray[np.float32]  # [heads]
    state: MatrixState
    out: Region  # f32 [tokens, heads * value_dim]
    scale: float = 1.0
    rate_scale: float = 1.0
    skip: npt.NDArray[np.float32] | None = None  # [heads]
    time_limits: tuple[float, float] = (0.0, float("inf"))
    tiled: bool = False

    @property
    def state_end(self) -> int:
        """The bytes of a state up to the end of this op's part."""
        return self.state.offset + self.state.nbytes


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """RMS norm of each `group` columns of a row, times silu(gate): of the norm, or with `gate_first` of its input.

    Without a weight, out = input * silu(gate). `input` has the result in f32 afterwards.
    """

    input: Region  # f32 [tokens, columns]
    gate: Region  # f32 [tokens, column + columns or more]
    column: int  # first column of the gate
    weight: npt.NDArray[np.float32] | None  # [columns]
    eps: float
    group: int  # columns; divides the columns of the input
    gate_first: bool
    out: Region  # [tokens, columns]


RECURRENT = (ShortConv, CausalConv, LinearRecurrence)  # ops with a part of the state


def state_nbytes(ops: Sequence[Op]) -> int:
    """Return the bytes of the state of a sequence; 0 for a program without recurrent ops."""
    return aligned(max((op.state_end for op in ops if isinstance(op, RECURRENT)), default=0))


@dataclass(frozen=True, slots=True)
class NormRows:
    """Norm each row of `input`: out = the normed row in f32, `converted` = the same in the dtype of the next layer.

    `layer`: (x - mean) / sqrt(variance + eps) * weight + bias; `rms`: x / sqrt(mean(x^2) + eps) * weight;
    `l2`: x / max(|x|, eps). An RMS norm before a linear layer needs no such pass over memory: see `Normed`.
    """

    input: Region  # f32 [rows, columns]
    kind: NormKind
    weight: npt.NDArray[np.float32] | None  # [columns]; None for l2
    bias: npt.NDArray[np.float32] | None  # [columns]; of `layer` only
    eps: float
    out: Region | None  # f32 [rows, columns]; may be `input`
    converted: Region | None = None  # [rows, columns] in any dtype


@dataclass(frozen=True, slots=True)
class PoolRows:
    """out[i] = the mean, the first or the last of the rows of text i: one row per text is computed from here on."""

    input: Region  # f32 [tokens, columns]
    out: Region  # f32 [samples, columns]
    pooling: Pooling


@dataclass(frozen=True, slots=True)
class Gather:
    """out[i] = input[sample_rows[i]]: only the rows that sample are computed from here on."""

    input: Region  # f32 [tokens, columns]
    out: Region  # f32 [samples, columns]
    normed: Normed | None = None  # norm of out


@dataclass(frozen=True, slots=True)
class AddNorm:
    """out = (out + RMS norm of input) * scale: a branch that is normed before it joins the residual stream, `out`.

    The norm of a whole row is needed before the addition, so this is an op of its own: each row is one worker's.
    """

    input: Region  # f32 [tokens, columns]
    weight: npt.NDArray[np.float32]  # [columns]
    eps: float
    out: Region  # f32 [tokens, columns]
    normed: Normed | None = None  # norm of out
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class GateRows:
    """out = gelu_tanh(input) * (RMS norm of a + b) * scale, for columns of `a` and `b` from `column` on."""

    input: Region  # f32 [tokens, columns]
    a: Region  # f32 [tokens, column + columns or more]
    b: Region  # f32, as `a`
    column: int
    weight: npt.NDArray[np.float32]  # [columns]
    eps: float
    scale: float
    out: Region  # [tokens, columns]


@dataclass(frozen=True, slots=True)
class Routing:
    """The experts that a `RouteRows` chose, in two orders: the chosen experts of each row, and the rows of each expert.

    Each choice has a place, a row of the values that the experts compute. The places of one expert are consecutive, in
    the order of its rows. A group is up to ROWS_IN_CACHE places of one expert, as even as possible.

    Nothing else may be stored in `groups` until the end of the step: a worker that was interrupted may read it late.
    """

    num_experts: int
    top_k: int
    weights: Region  # f32 [tokens, top_k], largest first
    places: Region  # i32 [tokens, top_k]
    groups: Region  # i32 [1 + max_groups, 3]: the number of groups, then expert, first place and end of each


def has_minimums(weight: PackedMatrix) -> bool:
    """Return whether blocks of any column have minimums in addition to scales."""
    return any(dtype in ("q4_k", "q5_k") for _, dtype in weight.ranges)


def has_half_blocks(weight: PackedMatrix) -> bool:
    """Return whether half blocks of any column have a scale of their own."""
    return any(dtype == "q6_k" for _, dtype in weight.ranges)


def max_groups(tokens: int, num_experts: int, top_k: int) -> int:
    """Return the largest number of groups of a step."""
    return min(num_experts, tokens * top_k) + tokens * top_k // ROWS_IN_CACHE


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """How logits of experts become scores, and the scores of chosen experts weights.

    Scores are the softmax of the logits, or with `sigmoid` the sigmoid of each logit. With more than one group, of
    equal numbers of consecutive experts, only experts of `kept_groups` groups are chosen: of the groups with the
    largest sums of two scores. Weights are scores * `scale`; with `normalized`, chosen scores are divided by their sum
    + `eps` before.
    """

    normalized: bool
    sigmoid: bool = False
    groups: int = 1
    kept_groups: int = 1
    eps: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class RouteRows:
    """Choose the `top_k` experts with the largest scores for each row; of equal scores, the lower index wins.

    With a `bias`, it is added to the scores for the choice, but not for the weights. With `scales`, each weight is
    multiplied by the scale of its expert. The weights of a row are NaN if one of its logits is NaN.
    """

    logits: Region  # f32 [tokens, num_experts], or one more, which has no effect
    routing: Routing
    rule: RoutingRule
    bias: npt.NDArray[np.float32] | None = None  # [num_experts]
    scales: npt.NDArray[np.float32] | None = None  # [num_experts]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Copy each row of `input` to the places of its experts. `out` is as `input`, with a row for each place."""

    input: Normed
    routing: Routing
    out: Normed


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """A `Linear` of which each expert computes its own places; experts without places are not read."""

    input: Region | Normed  # [places, in_features] in the dtype of INPUT_DTYPES
    weights: tuple[PackedMatrix, ...]  # [num_experts], of one shape and dtype
    routing: Routing
    out: Region  # [places, out_features]; for gated epilogues half as many columns
    epilogue: Epilogue  # any but `add`
    biases: tuple[npt.NDArray[np.float32], ...] | None = None  # [num_experts] of [out_features]


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The results of an expert that computes every row, and the logit after those of the routed experts."""

    rows: Region  # f32 [tokens, columns]
    logits: Region  # f32 [tokens, num_experts + 1]


@dataclass(frozen=True, slots=True)
class Combine:
    """out[r] += the sum of weight * input[place] over the experts of row r, largest weight first.

    With `shared`, sigmoid(logit) * the row of the shared expert is added before. Without `adds`, out is zero before.
    """

    input: Region  # f32 [places, columns]
    routing: Routing
    out: Region  # f32 [tokens, columns]
    normed: Normed | None = None  # norm of out
    shared: SharedExpert | None = None
    adds: bool = True


Op = (
    Embed
    | Convert
    | Linear
    | Attention
    | EphemeralAttention
    | SplitHeads
    | HeadLinear
    | LatentAttention
    | ShortConv
    | CausalConv
    | LinearRecurrence
    | GatedNorm
    | NormRows
    | PoolRows
    | Gather
    | AddNorm
    | GateRows
    | RouteRows
    | Dispatch
    | ExpertLinear
    | Combine
    | AddGiven
    | LoraShrink
)
