"""The builder of programs: its methods are the layers of a decoder, its result is a list of ops.

Independent of models. `recorder.py` keeps the ops and places their values in the arena.

Values (`values.py`) have `max_tokens` rows, after `gather` `max_samples`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from ....kernels.ops import (
    BLOCK,
    AddGiven,
    AddNorm,
    CausalConv,
    Combine,
    Convert,
    Dispatch,
    Embed,
    EphemeralPages,
    Epilogue,
    ExpertLinear,
    GatedNorm,
    GateRows,
    Gather,
    HeadLinear,
    KVDtype,
    Linear,
    LoraShrink,
    Normed,
    NormKind,
    NormRows,
    Op,
    Pooling,
    PoolRows,
    Ring,
    RouteRows,
    RoutingRule,
    SharedExpert,
    ShortConv,
    SplitHeads,
    ephemeral_pages,
    max_groups,
    padded,
)
from ....kernels.pack import PackedMatrix
from .attention import HeadWeights, ephemeral_attention, paged_attention
from .latent import LatentHeads, latent_attention
from .recorder import OpRecorder
from .recurrence import Recurrence, recurrence
from .values import (
    F32,
    Heads,
    Logits,
    LoraTargets,
    LoraValue,
    NormedValue,
    RoutingValue,
    RowForm,
    Value,
    Vector,
    input_form,
    multiplied_form,
)

AnyValue = TypeVar("AnyValue", Value, NormedValue, Value | NormedValue)


class ProgramBuilder(OpRecorder):
    """Adds the layers of a program, in order, for steps of up to `max_tokens` rows, `max_samples` of which sample.

    With `ephemeral`, attention has no pages: keys and values have this dtype and are in the arena. Adapters may change
    the layers in `lora`.
    """

    def __init__(
        self, max_tokens: int, max_samples: int, ephemeral: KVDtype | None = None, lora: LoraTargets | None = None
    ) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        self.max_samples = max_samples
        self.ephemeral = ephemeral
        self._lora = lora or LoraTargets()
        self._norm_inputs: dict[int, Value] = {}  # normed rows -> the rows before the norm
        self._keys_values: tuple[Value, EphemeralPages] | None = None  # keys and values of every layer in turn
        self._norm_writers: dict[int, int] = {}  # value -> the op that wrote it last and can still write its norm

    def input(self, name: str, columns: int) -> Value:
        """Return a value that the caller writes before each step, padding included: f32 [tokens, columns]."""
        value = self._value(name, self.max_tokens, columns, "f32", writer=0)
        self._inputs.append(value)
        return value

    def embed(
        self,
        weight: PackedMatrix,
        scale: float = 1.0,
        types: PackedMatrix | None = None,
        positions: PackedMatrix | None = None,
    ) -> Value:
        """Start the residual stream: the embedding of each token times `scale`, f32 [tokens, hidden].

        The embeddings of the token's type and position in its text are added, where there are any.
        """
        out = self._value("residual", self.max_tokens, weight.in_features, "f32")
        self._norm_writers[out.index] = len(self._emit)
        self._add([out], lambda at: Embed(weight, out.placed(at), scale=scale, types=types, positions=positions))
        return out

    def norm(self, x: Value, weight: Vector, eps: float, form: RowForm) -> NormedValue:
        """Norm each row (RMS norm), in the form that the next linear layer reads.

        This is no op of its own: the op that wrote `x` writes the norm too. Raises ValueError if that op is not
        `embed`, `linear_add`, `add_norm`, `add_given` or `gather`, or if it writes a norm already.
        """
        writer = self._norm_writers.pop(x.index, None)
        if writer is None:
            raise ValueError(f"the op that wrote {x.name} cannot write its norm, or already writes one")
        out = NormedValue(
            self._value("normed", x.rows, x.columns, form.dtype, writer, form.group),
            self._value("squares", x.rows, padded(x.columns) // BLOCK, "f32", writer),
            weight,
            eps,
        )
        self._norm_inputs[out.data.index] = x
        write = self._emit[writer]
        self._emit[writer] = lambda at: _with_norm(write(at), out.placed(at))
        return out

    def norm_rows(
        self,
        x: Value,
        kind: NormKind,
        weight: Vector | None,
        bias: Vector | None,
        eps: float,
        form: RowForm,
    ) -> Value:
        """Return each row of `x` normed."""
        out = self._value("normed", x.rows, x.columns, form.dtype, group=form.group)
        self._add(
            [x, out],
            lambda at: NormRows(
                x.placed(at),
                kind,
                weight,
                bias,
                eps,
                out=out.placed(at) if form == F32 else None,
                converted=None if form == F32 else out.placed(at),
            ),
        )
        return out

    def norm_in_place(
        self,
        x: Value,
        kind: NormKind,
        weight: Vector | None,
        bias: Vector | None,
        eps: float,
        form: RowForm,
    ) -> Value:
        """Norm each row of `x` in place, and return it as `norm_rows` does; `x` itself if that is its form."""
        self._norm_writers.pop(x.index, None)
        converted = None
        if form != x.form:
            converted = self._value("normed", x.rows, x.columns, form.dtype, group=form.group)
        self._add(
            [x] if converted is None else [x, converted],
            lambda at: NormRows(
                x.placed(at),
                kind,
                weight,
                bias,
                eps,
                out=x.placed(at),
                converted=None if converted is None else converted.placed(at),
            ),
        )
        return x if converted is None else converted

    def convert(self, x: Value, form: RowForm) -> Value:
        """Convert `x` to another form; return `x` itself if it has that form."""
        if x.form == form:
            return x
        out = self._value(f"{x.name}:{form.dtype}", x.rows, x.columns, form.dtype, group=form.group)
        self._add([x, out], lambda at: Convert(x.placed(at), out.placed(at)))
        return out

    def linear(
        self, x: Value | NormedValue, weight: PackedMatrix, bias: Vector | None, name: str, scale: float = 1.0
    ) -> Value:
        """Compute (x @ weight.T + bias) * scale, f32 [rows, out_features]."""
        x, lora = self._adapted(x, weight, scale)
        out = self._value(name, x.rows, weight.out_features, "f32")
        self._add_linear(x, weight, bias, out, "store", scale, lora)
        return out

    def linear_f32(self, x: Value, normed: NormedValue, weight: PackedMatrix, bias: Vector | None, name: str) -> Value:
        """Compute `normed` @ weight.T + bias from `x`, the f32 rows before the norm: for numbers that must be exact.

        The weight is f32, and its columns have been multiplied by the norm's weights.
        """
        return self.linear(replace(normed, data=x), weight, bias, name)

    def linear_add(
        self, x: Value, weight: PackedMatrix, bias: Vector | None, residual: Value, scale: float = 1.0
    ) -> None:
        """Add (x @ weight.T + bias) * scale to `residual`, in place."""
        x, lora = self._adapted(x, weight, scale)
        self._norm_writers[residual.index] = len(self._emit)
        self._add_linear(x, weight, bias, residual, "add", scale, lora)

    def add_given(self, residual: Value, level: int) -> None:
        """Add a level, from 1, of the rows that the step provides in place of embeddings to `residual`, in place."""
        self._norm_writers[residual.index] = len(self._emit)
        self._add([residual], lambda at: AddGiven(level, residual.placed(at)))

    def add_norm(self, x: Value, weight: Vector, eps: float, residual: Value, scale: float = 1.0) -> None:
        """Add the RMS norm of `x` to `residual` and multiply the sum by `scale`, in place."""
        self._norm_writers[residual.index] = len(self._emit)
        self._add([x, residual], lambda at: AddNorm(x.placed(at), weight, eps, residual.placed(at), scale=scale))

    def gate_rows(
        self, x: Value, a: Value, b: Value, column: int, weight: Vector, eps: float, scale: float, form: RowForm
    ) -> Value:
        """Return GELU(x) * (the RMS norm of `a` + `b`) * scale, with columns of `a` and `b` from `column` on."""
        out = self._value("gated rows", x.rows, x.columns, form.dtype, group=form.group)
        self._add(
            [x, a, b, out],
            lambda at: GateRows(x.placed(at), a.placed(at), b.placed(at), column, weight, eps, scale, out.placed(at)),
        )
        return out

    def activated(
        self,
        x: Value | NormedValue,
        weight: PackedMatrix,
        bias: Vector | None,
        columns: int,
        epilogue: Epilogue,
        form: RowForm,
        scale: float = 1.0,
    ) -> Value:
        """Compute the activation of (x @ weight.T + bias) * scale that `epilogue` names, [rows, columns].

        With a gated epilogue, the weight alternates 16 columns of gate and 16 of up, and the result is their product.
        """
        x, lora = self._adapted(x, weight, scale)
        out = self._value("activated", x.rows, columns, form.dtype, group=form.group)
        self._add_linear(x, weight, bias, out, epilogue, scale, lora)
        return out

    def route(
        self,
        logits: Value,
        num_experts: int,
        top_k: int,
        rule: RoutingRule,
        bias: Vector | None,
        scales: Vector | None = None,
    ) -> RoutingValue:
        """Choose the `top_k` experts of each row, and group the rows by expert.

        A `bias` affects only the choice, `scales` only the weights of the chosen experts.
        """
        routing = RoutingValue(
            num_experts,
            top_k,
            self._value("expert weights", logits.rows, top_k, "f32"),
            self._value("expert places", logits.rows, top_k, "i32"),
            self._value("expert groups", 1 + max_groups(logits.rows, num_experts, top_k), 3, "i32"),
        )
        self._kept.append(routing.groups)
        self._add(
            [logits, *routing.parts],
            lambda at: RouteRows(logits.placed(at), routing.placed(at), rule, bias, scales),
        )
        return routing

    def dispatch(self, x: NormedValue, routing: RoutingValue) -> NormedValue:
        """Copy each row of `x` to the places of its experts, [tokens * top_k, columns]."""
        rows = x.rows * routing.top_k
        out = NormedValue(
            self._value("dispatched", rows, x.data.columns, x.data.dtype, group=x.data.group),
            self._value("squares", rows, x.squares.columns, "f32"),
            x.weight,
            x.eps,
        )
        self._add(
            [*x.parts, *routing.parts, *out.parts],
            lambda at: Dispatch(x.placed(at), routing.placed(at), out.placed(at)),
        )
        return out

    def expert_gated(
        self,
        x: NormedValue,
        weights: tuple[PackedMatrix, ...],
        biases: tuple[Vector, ...] | None,
        routing: RoutingValue,
        columns: int,
        epilogue: Epilogue,
        form: RowForm,
    ) -> Value:
        """Compute `activated` of each place with the weight and bias of its expert."""
        out = self._value("activated", x.rows, columns, form.dtype, group=form.group)
        self._add(
            [*x.parts, *routing.parts, out],
            lambda at: ExpertLinear(x.placed(at), weights, routing.placed(at), out.placed(at), epilogue, biases),
        )
        return out

    def expert_linear(
        self, x: Value, weights: tuple[PackedMatrix, ...], biases: tuple[Vector, ...] | None, routing: RoutingValue
    ) -> Value:
        """Compute x @ weight.T + bias of each place with its expert's weights, f32 [places, out_features]."""
        out = self._value("expert outputs", x.rows, weights[0].out_features, "f32")
        self._add(
            [x, *routing.parts, out],
            lambda at: ExpertLinear(x.placed(at), weights, routing.placed(at), out.placed(at), "store", biases),
        )
        return out

    def combine_add(
        self, x: Value, routing: RoutingValue, residual: Value, shared: Value | None, logits: Value
    ) -> None:
        """Add the weighted sum of each row's places in `x` to `residual`, in place, and the row of a shared expert.

        The weight of the shared expert is the sigmoid of the last logit.
        """
        self._norm_writers[residual.index] = len(self._emit)
        read = [x, *routing.parts] if shared is None else [x, *routing.parts, shared, logits]
        self._add(
            [*read, residual],
            lambda at: Combine(
                x.placed(at),
                routing.placed(at),
                residual.placed(at),
                shared=None if shared is None else SharedExpert(shared.placed(at), logits.placed(at)),
            ),
        )

    def combine(self, x: Value, routing: RoutingValue) -> Value:
        """Return the weighted sum of each row's places in `x`, f32 [tokens, columns]."""
        out = self._value("combined", x.rows // routing.top_k, x.columns, "f32")
        self._add(
            [x, *routing.parts, out],
            lambda at: Combine(x.placed(at), routing.placed(at), out.placed(at), adds=False),
        )
        return out

    def attention(self, qkv: Value, heads: Heads, weights: HeadWeights, form: RowForm) -> Value:
        """Attend over the pages, or with `ephemeral` among the rows of each text, [tokens, num_heads * head_dim].

        Stores K and V in their pages. If the query heads of a KV head do not fill whole blocks, or groups of them, the
        op's result is f32 and a `Convert` to `form` follows.
        """
        whole = heads.num_heads // heads.num_kv_heads * heads.head_dim % (BLOCK * max(1, form.group)) == 0
        written = form if whole else F32
        out = self._value("attended", qkv.rows, heads.num_heads * heads.head_dim, written.dtype, group=written.group)
        if self.ephemeral is None:
            self._add([qkv, out], lambda at: paged_attention(qkv.placed(at), out.placed(at), heads, weights))
        else:
            memory, pages = self._ephemeral_pages(heads)
            self._add(
                [qkv, out, memory],
                lambda at: ephemeral_attention(
                    qkv.placed(at), out.placed(at), replace(pages, offset=memory.placed(at).offset), heads, weights
                ),
            )
        return self.convert(out, form)

    def split_heads(self, x: Value, num_heads: int, stride: int, columns: int, form: RowForm) -> Value:
        """Take the first `columns` of each head of `stride` columns, [num_heads * tokens, columns], head by head."""
        out = self._value("heads", num_heads * x.rows, columns, form.dtype, group=form.group)
        self._add([x, out], lambda at: SplitHeads(x.placed(at), stride, out.placed(at)))
        return out

    def head_linear(self, x: Value, weights: tuple[PackedMatrix, ...], form: RowForm) -> Value:
        """Multiply the rows of each head by the head's weight, [tokens, num_heads * out_features].

        If the columns of a head do not fill whole blocks, or groups of them, the op's result is f32 and a `Convert` to
        `form` follows.
        """
        columns = weights[0].out_features
        written = form if columns % (BLOCK * max(1, form.group)) == 0 else F32
        rows = x.rows // len(weights)
        out = self._value("of heads", rows, len(weights) * columns, written.dtype, group=written.group)
        self._add([x, out], lambda at: HeadLinear(x.placed(at), weights, out.placed(at)))
        return self.convert(out, form)

    def latent_attention(
        self, queries: Value, absorbed: Value, keys: Value, heads: LatentHeads, form: RowForm
    ) -> Value:
        """Attend over pages of latents; return their weighted sums, [num_heads * tokens, rank], head by head."""
        out = self._value("latents", heads.num_heads * queries.rows, heads.rank, form.dtype, group=form.group)
        self._add(
            [queries, absorbed, keys, out],
            lambda at: latent_attention(
                queries.placed(at), absorbed.placed(at), keys.placed(at), out.placed(at), heads
            ),
        )
        return out

    def short_conv(self, x: Value, weight: Vector, bias: Vector | None, ring: Ring, form: RowForm) -> Value:
        """Convolve the value of each row, between its gates: x is gate | gate | value, f32 [tokens, 3 * columns]."""
        out = self._value("convolved", x.rows, x.columns // 3, form.dtype, group=form.group)
        self._add([x, out], lambda at: ShortConv(x.placed(at), weight, bias, ring, out.placed(at)))
        return out

    def causal_conv(
        self,
        x: Value,
        column: int,
        weight: Vector,
        bias: Vector | None,
        ring: Ring,
        *,
        num_normed: int = 0,
        head_dim: int = 0,
        eps: float = 0.0,
    ) -> Value:
        """Return SiLU of the convolved columns of `x` from `column` on; the first heads are divided by their length."""
        out = self._value("convolved", x.rows, weight.shape[1], "f32")
        self._add(
            [x, out],
            lambda at: CausalConv(x.placed(at), column, weight, bias, ring, out.placed(at), num_normed, head_dim, eps),
        )
        return out

    def recurrence(self, x: Value, gates: Value, shape: Recurrence) -> Value:
        """Apply the tokens of `x` to the matrices of their sequences, f32 [tokens, heads * value_dim]."""
        out = self._value("recurrence", x.rows, shape.state.num_heads * shape.state.value_dim, "f32")
        self._add([x, gates, out], lambda at: recurrence(x.placed(at), gates.placed(at), out.placed(at), shape))
        return out

    def gated_norm(
        self,
        x: Value,
        gate: Value,
        column: int,
        weight: Vector | None,
        eps: float,
        form: RowForm,
        *,
        group: int,
        gate_first: bool = False,
    ) -> Value:
        """Return the norm of each `group` columns of `x`, times SiLU of the columns of `gate` from `column` on.

        The norm overwrites `x`. Without a weight there is no norm, only the gate.
        """
        out = self._value("gated", x.rows, x.columns, form.dtype, group=form.group)
        self._add(
            [x, gate, out],
            lambda at: GatedNorm(x.placed(at), gate.placed(at), column, weight, eps, group, gate_first, out.placed(at)),
        )
        return out

    def _ephemeral_pages(self, heads: Heads) -> tuple[Value, EphemeralPages]:
        """Return the pages that all layers share, and the value that reserves their space in the arena."""
        if self._keys_values is None:
            assert self.ephemeral is not None, "only attention that keeps nothing has its pages in the arena"
            num_pages = ephemeral_pages(self.max_tokens, self.max_samples)
            pages = EphemeralPages(0, num_pages, heads.num_kv_heads, heads.head_dim, self.ephemeral)
            self._keys_values = self._value("keys, values", num_pages, -(-pages.nbytes // num_pages // 4), "f32"), pages
        return self._keys_values

    def pool(self, x: Value, pooling: Pooling) -> Value:
        """Return the mean, the first or the last row of each text, f32 [samples, columns]."""
        out = self._value("pooled", self.max_samples, x.columns, "f32")
        self._add([x, out], lambda at: PoolRows(x.placed(at), out.placed(at), pooling))
        return out

    def gather(self, x: Value) -> Value:
        """Take the rows of `x` that sample, [samples, columns]."""
        out = self._value("sampled", self.max_samples, x.columns, x.dtype)
        self._norm_writers[out.index] = len(self._emit)
        self._add([x, out], lambda at: Gather(x.placed(at), out.placed(at)))
        return out

    def logits(
        self,
        x: Value | NormedValue,
        weight: PackedMatrix,
        bias: Vector | None = None,
        scale: float = 1.0,
        softcap: float = 0.0,
    ) -> Logits:
        """Compute the logits of the rows that sample: (x @ weight.T + bias) * scale, soft-capped if there is a cap."""
        values = self._value("logits", x.rows, weight.out_features, "f32")
        maxima = self._value("maxima", x.rows, padded(weight.out_features) // BLOCK, "f32")
        self._add(
            [*x.parts, values, maxima],
            lambda at: Linear(
                x.placed(at),
                weight,
                bias,
                values.placed(at),
                "store",
                maxima=maxima.placed(at),
                scale=scale,
                softcap=softcap,
            ),
        )
        return Logits(values, maxima)

    def form_of(self, weight: PackedMatrix) -> RowForm:
        """Return the form of a linear layer's input that no RMS norm precedes: f32 if adapters read the rows, too."""
        return input_form(weight) if self._lora.number(weight) is None else F32

    def _add_linear(
        self,
        x: Value | NormedValue,
        weight: PackedMatrix,
        bias: Vector | None,
        out: Value,
        epilogue: Epilogue,
        scale: float,
        lora: LoraValue | None,
    ) -> None:
        self._add(
            [*x.parts, out] if lora is None else [*x.parts, out, lora.rows],
            lambda at: Linear(
                x.placed(at),
                weight,
                bias,
                out.placed(at),
                epilogue,
                scale=scale,
                lora=None if lora is None else lora.placed(at),
            ),
        )

    def _adapted(self, x: AnyValue, weight: PackedMatrix, scale: float) -> tuple[AnyValue, LoraValue | None]:
        """Return `x` as the weight multiplies it; first emit the products of adapters with `x`, if there are any."""
        target = self._lora.number(weight)
        if target is None:
            return self._in_order(x, weight), None
        rows = self._value("adapter rows", x.rows, self._lora.ranks(target), "f32")
        normed = x if isinstance(x, NormedValue) else None
        source = x if isinstance(x, Value) else self._norm_inputs[x.data.index]
        self._add(
            [source, *x.parts, rows],
            lambda at: LoraShrink(
                source.placed(at), None if normed is None else normed.placed(at), target, rows.placed(at), scale
            ),
        )
        if isinstance(x, Value) and weight.input_order is None:
            x = self.convert(x, input_form(weight))
        return self._in_order(x, weight), LoraValue(target, rows)

    def _in_order(self, x: AnyValue, weight: PackedMatrix) -> AnyValue:
        """Return `x` with its columns in the order of the weight's inputs, in the dtype that the weight multiplies."""
        if (order := weight.input_order) is None:
            return x
        data = x.data if isinstance(x, NormedValue) else x
        form = multiplied_form(weight)
        out = self._value("sorted", data.rows, data.columns, form.dtype, group=form.group)
        self._add([data, out], lambda at: Convert(data.placed(at), out.placed(at), order))
        return replace(x, data=out) if isinstance(x, NormedValue) else out


def _with_norm(op: Op, normed: Normed) -> Op:
    assert isinstance(op, Embed | Linear | Gather | AddNorm | AddGiven | Combine)
    return replace(op, normed=normed)
