# cython: language_level=3
"""Binding: every op of a program as a record of pointers and sizes, which are checked here.

A method for each kind of op; no size is checked in a step.
"""
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

import numpy as np

from .attention cimport AttentionOp
from .experts cimport CombineOp, DispatchOp, RouteOp, RoutingTables
from .heads cimport HeadsOp
from .isa cimport (QUIRE_ADD, QUIRE_CLAMPED, QUIRE_GEGLU, QUIRE_GEGLU_EXACT, QUIRE_GELU, QUIRE_GELU_TANH, QUIRE_L2_NORM,
                   QUIRE_LAYER_NORM, QUIRE_MAX_EXPERTS, QUIRE_RELU, QUIRE_RELU_SQUARED, QUIRE_RMS_NORM, QUIRE_STORE,
                   QUIRE_SWIGLU, QUIRE_TANH, QUIRE_TILE, quire_head)
from .isa import WEIGHT_CODES
from .latent cimport bind_latent_heads, bind_split
from .linear cimport ROWS_IN_CACHE, LinearOp, Weight, linear_scratch_bytes, packed_rows_bytes
from .lora cimport LoraOp
from .ops import (BIAS_PADDING, BLOCK, GATED, INPUT_DTYPES, AddGiven, AddNorm, Attention, CausalConv, Combine,
                  Convert, Dispatch, Embed, EphemeralAttention, ExpertLinear, GatedNorm, GateRows, Gather, HeadLinear,
                  LatentAttention, Linear, LinearRecurrence, LoraShrink, Normed, NormRows, PoolRows, RouteRows,
                  ShortConv, SplitHeads, ephemeral_pages, has_half_blocks, has_minimums, head_groups, max_groups,
                  padded)
from .pack cimport PackedMatrix, Panels
from .pool cimport QUIRE_SHARE_ITEMS
from .recurrence cimport bind_causal_conv, bind_gated_norm, bind_recurrence, bind_short_conv
from .replay cimport (ADD_GIVEN, ADD_NORM, ATTENTION, COMBINE, CONVERT, CONVOLUTION, DISPATCH, EMBED, GATED_NORM,
                      GATE_ROWS, GATHER, LINEAR, LORA, NORM, POOL, RECURRENCE, ROUTE, SPLIT, Record)
from .rows cimport FIRST, LAST, MEAN, ConvertOp, NormOp
from .step cimport Value

cdef enum:
    MAX_LEVEL = 1024                # highest level of given rows
    ROWS_AHEAD = 8                  # prefetch distance of a head: rows are too far apart for the processor to see

_EPILOGUES = {"store": QUIRE_STORE, "add": QUIRE_ADD, "gelu": QUIRE_GELU, "gelu_tanh": QUIRE_GELU_TANH,
              "relu": QUIRE_RELU, "relu_squared": QUIRE_RELU_SQUARED, "tanh": QUIRE_TANH, "swiglu": QUIRE_SWIGLU,
              "geglu": QUIRE_GEGLU, "swiglu_clamped": QUIRE_CLAMPED, "geglu_exact": QUIRE_GEGLU_EXACT}
_NORMS = {"layer": QUIRE_LAYER_NORM, "rms": QUIRE_RMS_NORM, "l2": QUIRE_L2_NORM}
_POOLINGS = {"mean": MEAN, "first": FIRST, "last": LAST}


cdef class Binder:
    """The limits of a program: those of the ops that are bound so far are in `max_positions`."""

    def __init__(self, regions, max_rows, max_samples, vocab_size, workers, kv_layout, num_pages, pages, lora=None):
        self.regions, self.max_rows, self.max_samples, self.vocab_size = regions, max_rows, max_samples, vocab_size
        self.workers, self.kv_layout, self.num_pages, self.pages = workers, kv_layout, num_pages, pages
        self.max_positions = self.num_types = 2**31 - 1
        self.kinds, self.given_columns, self.stores_first = {}, 0, False
        self.rotary_dims, self.needs_rotary = set(), False
        self.lora = lora

    cdef bind(self, Record *record, op):
        """Set the record of an op."""
        if isinstance(op, Embed):
            self._add_embed(record, op)
        elif isinstance(op, Convert):
            self._add_convert(record, op)
        elif isinstance(op, Linear):
            self._add_linear(record, op)
        elif isinstance(op, Attention):
            self._add_attention(record, op)
        elif isinstance(op, ExpertLinear):
            self._add_expert_linear(record, op)
        elif isinstance(op, LatentAttention):
            self._add_latent_attention(record, op)
        elif isinstance(op, HeadLinear):
            self._add_head_linear(record, op)
        elif isinstance(op, SplitHeads):
            record.kind = SPLIT
            bind_split(&record.op.split, op, self.regions, self.max_rows)
        elif isinstance(op, RouteRows):
            self._add_route(record, op)
        elif isinstance(op, Dispatch):
            self._add_dispatch(record, op)
        elif isinstance(op, Combine):
            self._add_combine(record, op)
        elif isinstance(op, AddNorm):
            self._add_add_norm(record, op)
        elif isinstance(op, LoraShrink):
            self._add_lora_shrink(record, op)
        elif isinstance(op, GateRows):
            self._add_gate_rows(record, op)
        elif isinstance(op, AddGiven):
            self._add_add_given(record, op)
        elif isinstance(op, EphemeralAttention):
            self._add_ephemeral_attention(record, op)
        elif isinstance(op, NormRows):
            self._add_norm(record, op)
        elif isinstance(op, PoolRows):
            self._add_pool(record, op)
        elif isinstance(op, ShortConv):
            record.kind = CONVOLUTION
            bind_short_conv(&record.op.convolution, op, self.regions, self.max_rows)
        elif isinstance(op, CausalConv):
            record.kind = CONVOLUTION
            bind_causal_conv(&record.op.convolution, op, self.regions, self.max_rows)
        elif isinstance(op, LinearRecurrence):
            record.kind = RECURRENCE
            bind_recurrence(&record.op.recurrence, op, self.regions, self.max_rows)
        elif isinstance(op, GatedNorm):
            record.kind = GATED_NORM
            bind_gated_norm(&record.op.gated_norm, op, self.regions, self.max_rows)
        elif isinstance(op, Gather):
            record.kind = GATHER
            record.op.gather.input = self.regions.value(op.input, op.out.columns, "f32", self.max_rows)
            record.op.gather.out = self.regions.value(op.out, op.input.columns, "f32", self.max_samples)
            self.regions.sampled.add(op.out)
            record.op.gather.is_normed = self.regions.normed(&record.op.gather.normed, op, self.max_samples)
        else:
            raise ValueError(f"not an op: {op!r}")

    cdef _add_embed(self, Record *record, op):
        cdef PackedMatrix weight = op.weight
        if weight.out_features < self.vocab_size:
            raise ValueError(f"the embedding has {weight.out_features} rows for a vocabulary of {self.vocab_size}")
        if weight.num_parts > 1:
            raise ValueError(f"an embedding has one dtype, not {weight.ranges}")
        self.regions.keep_alive.append(weight)
        record.kind = EMBED
        record.op.embed.out = self.regions.value(op.out, weight.in_features, "f32", self.max_rows)
        record.op.embed.is_normed = self.regions.normed(&record.op.embed.normed, op, self.max_rows)
        record.op.embed.panels, record.op.embed.width = weight.parts[0], weight.width
        self.given_columns = max(self.given_columns, <int64_t>weight.in_features)
        record.op.embed.scale = op.scale
        record.op.embed.has_types = self._learned(&record.op.embed.types, op.types, weight)
        if record.op.embed.has_types:
            self.num_types = min(self.num_types, op.types.out_features)
        record.op.embed.has_positions = self._learned(&record.op.embed.positions, op.positions, weight)
        if record.op.embed.has_positions:
            self.max_positions = min(self.max_positions, op.positions.out_features)

    cdef bint _learned(self, Panels *panels, PackedMatrix table, PackedMatrix weight) except -1:
        """Set the panels of an embedding that is added to `weight`'s; return whether there is one."""
        if table is None:
            return False
        if table.num_parts > 1 or table.in_features != weight.in_features:
            raise ValueError(f"learned embeddings need one dtype and {weight.in_features} columns, not {table.ranges} "
                             f"and {table.in_features}")
        self.regions.keep_alive.append(table)
        panels[0] = table.parts[0]
        return True

    cdef _add_convert(self, Record *record, op):
        cdef ConvertOp *convert = &record.op.convert
        record.kind = CONVERT
        convert.sampled = self.regions.follows(op.input, op.out)
        rows = self.max_samples if convert.sampled else self.max_rows
        convert.input = self.regions.value(op.input, op.out.columns, "f32", rows)
        convert.out = self.regions.output(op.out, op.input.columns, rows)
        convert.order = NULL
        if op.order is not None:
            convert.order = self.regions.order(op.order, op.input.columns)

    cdef _add_add_norm(self, Record *record, op):
        columns = op.out.columns
        record.kind = ADD_NORM
        record.op.add_norm.input = self.regions.value(op.input, columns, "f32", self.max_rows)
        record.op.add_norm.out = self.regions.value(op.out, columns, "f32", self.max_rows)
        record.op.add_norm.weight = self.regions.vector(op.weight, columns, padded(columns))
        record.op.add_norm.eps, record.op.add_norm.scale = op.eps, op.scale
        record.op.add_norm.is_normed = self.regions.normed(&record.op.add_norm.normed, op, self.max_rows)

    cdef _add_gate_rows(self, Record *record, op):
        columns = op.input.columns
        record.kind = GATE_ROWS
        if op.column < 0 or op.column + columns > op.a.columns:
            raise ValueError(f"{columns} columns from {op.column} on are not inside {op.a!r}")
        record.op.gate_rows.input = self.regions.value(op.input, columns, "f32", self.max_rows)
        record.op.gate_rows.a = self.regions.value(op.a, op.a.columns, "f32", self.max_rows)
        record.op.gate_rows.b = self.regions.value(op.b, op.a.columns, "f32", self.max_rows)
        record.op.gate_rows.column = op.column
        record.op.gate_rows.weight = self.regions.vector(op.weight, columns, padded(columns))
        record.op.gate_rows.eps, record.op.gate_rows.scale = op.eps, op.scale
        record.op.gate_rows.out = self.regions.output(op.out, columns, self.max_rows)

    cdef _add_add_given(self, Record *record, op):
        columns = op.out.columns
        if not 1 <= op.level <= MAX_LEVEL:
            raise ValueError(f"given rows are added at levels 1 to {MAX_LEVEL}, not {op.level}")
        record.kind = ADD_GIVEN
        record.op.add_given.out = self.regions.value(op.out, columns, "f32", self.max_rows)
        record.op.add_given.first = op.level * columns
        record.op.add_given.is_normed = self.regions.normed(&record.op.add_given.normed, op, self.max_rows)
        self.given_columns = max(self.given_columns, <int64_t>((op.level + 1) * columns))

    cdef _add_norm(self, Record *record, op):
        cdef NormOp *norm = &record.op.norm
        columns = op.input.columns
        record.kind = NORM
        if op.out is None and op.converted is None:
            raise ValueError("a norm writes `out`, `converted` or both")
        if (op.weight is None) != (op.kind == "l2") or op.bias is not None and op.kind != "layer":
            raise ValueError(f"{op.kind} takes a weight unless it is l2, and a bias if it is layer")
        norm.sampled, norm.keeps, norm.converts = False, op.out is not None, op.converted is not None
        for out in (op.out, op.converted):
            if out is not None:
                norm.sampled = self.regions.follows(op.input, out)
        rows = self.max_samples if norm.sampled else self.max_rows
        norm.kind, norm.eps, norm.weight, norm.bias = _NORMS[op.kind], op.eps, NULL, NULL
        if op.weight is not None:
            norm.weight = self.regions.vector(op.weight, columns, padded(columns))
        if op.bias is not None:
            norm.bias = self.regions.vector(op.bias, columns, padded(columns))
        norm.input = self.regions.value(op.input, columns, "f32", rows)
        if norm.keeps:
            norm.out = self.regions.value(op.out, columns, "f32", rows)
        if norm.converts:
            norm.converted = self.regions.output(op.converted, columns, rows)

    cdef _add_pool(self, Record *record, op):
        record.kind = POOL
        record.op.pool.input = self.regions.value(op.input, op.out.columns, "f32", self.max_rows)
        record.op.pool.out = self.regions.value(op.out, op.input.columns, "f32", self.max_samples)
        record.op.pool.pooling = _POOLINGS[op.pooling]
        self.regions.sampled.add(op.out)

    cdef _add_linear(self, Record *record, op):
        cdef PackedMatrix weight = op.weight
        cdef LinearOp *linear = &record.op.linear
        record.kind = LINEAR
        linear.sampled = self.regions.follows(op.input.data if isinstance(op.input, Normed) else op.input, op.out)
        rows = self.max_samples if linear.sampled else self.max_rows
        linear.groups, linear.heads, linear.capacity, linear.head_columns = NULL, 1, 0, 0
        biases = None if op.bias is None else (op.bias * np.float32(op.scale),)
        self._add_product(linear, op, (weight,), biases, rows, rows // ROWS_IN_CACHE + 1)
        if op.normed is not None:
            linear.converts = self.regions.normed(&linear.converted, op, rows)
            self._add_counts(linear, op.normed.data.group, rows // ROWS_IN_CACHE + 1)
        self._add_maxima(linear, op, rows)
        linear.has_factors, linear.scale = linear.squares != NULL or op.scale != 1, op.scale
        linear.softcap = op.softcap
        if op.lora is not None:
            self._add_lora(linear, op)
        if op.softcap and op.epilogue != "store":
            raise ValueError(f"results are capped when they are stored, not with {op.epilogue}")

    cdef _add_lora(self, LinearOp *linear, op):
        """Let the op add B of adapters to its results."""
        cdef PackedMatrix weight = op.weight
        if self.lora is None or linear.sampled:
            raise ValueError("a program without adapters, or rows that sample, have no linear layers with adapters")
        _, ranks, outputs = self.lora.widths[op.lora.target]
        if outputs > 16 * weight.panels:
            raise ValueError(f"target {op.lora.target} has {outputs} outputs, its layer {16 * weight.panels} columns")
        linear.lora = self.lora.matrices(op.lora.target, True)
        linear.lora_rows = self.regions.value(op.lora.rows, ranks, "f32", self.max_rows)
        linear.lora_scratch = linear_scratch_bytes(
            padded(weight.in_features), linear.has_minimums, has_half_blocks(weight),
            [WEIGHT_CODES[dtype] for _, dtype in weight.ranges], linear.span, weight.group)

    cdef _add_lora_shrink(self, Record *record, op):
        cdef LoraOp *lora = &record.op.lora
        cdef Value squares
        record.kind = LORA
        if self.lora is None:
            raise ValueError("a program without adapters has no products with them")
        inputs, ranks, _ = self.lora.widths[op.target]
        lora.input = self.regions.value(op.input, inputs, "f32", self.max_rows)
        lora.out = self.regions.value(op.out, ranks, "f32", self.max_rows)
        lora.matrices = self.lora.matrices(op.target, False)
        lora.squares, lora.scale, lora.panels = NULL, op.scale, -(-ranks // 16)
        if op.normed is not None:
            squares = self.regions.value(op.normed.squares, padded(inputs) // BLOCK, "f32", self.max_rows)
            lora.squares, lora.squares_width = <float *>squares.rows.data, squares.rows.width
            lora.eps = op.normed.eps

    cdef _add_counts(self, LinearOp *linear, group, groups):
        """Give the op the counts of written blocks, for each group of rows, if blocks of its norm share a scale."""
        cdef uint64_t[::1] written
        if group > 1:
            written = np.zeros(groups * -(-linear.num_blocks // group), np.uint64)
            self.regions.keep_alive.append(written)
            linear.written = &written[0]

    cdef _add_expert_linear(self, Record *record, op):
        cdef LinearOp *linear = &record.op.linear
        cdef RoutingTables routing = self.regions.tables(op.routing)
        record.kind = LINEAR
        shapes = {(weight.out_features, weight.in_features, weight.ranges) for weight in op.weights}
        if len(op.weights) != op.routing.num_experts or len(shapes) != 1:
            raise ValueError(f"{op.routing.num_experts} experts need as many weights of one shape and dtype, "
                             f"not {len(op.weights)} of {len(shapes)}")
        if op.biases is not None and len(op.biases) != len(op.weights):
            raise ValueError(f"{len(op.weights)} experts need as many biases, not {len(op.biases)}")
        linear.sampled, linear.maxima = False, NULL
        linear.groups, linear.groups_width, linear.heads = routing.groups, routing.groups_width, 1
        linear.scale, linear.softcap = 1, 0
        self._add_product(linear, op, op.weights, op.biases, self.max_rows * op.routing.top_k,
                          max_groups(self.max_rows, op.routing.num_experts, op.routing.top_k))
        linear.has_factors = linear.squares != NULL

    cdef _add_head_linear(self, Record *record, op):
        cdef LinearOp *linear = &record.op.linear
        heads, columns = len(op.weights), op.weights[0].out_features
        shapes = {(weight.out_features, weight.in_features, weight.ranges) for weight in op.weights}
        if len(shapes) != 1 or columns % (BLOCK * max(1, op.out.group)) or op.out.columns != heads * columns:
            raise ValueError(f"{heads} heads need weights of one shape and dtype, whose {columns} rows fill blocks of "
                             f"{BLOCK * max(1, op.out.group)} and, of all heads, the columns of {op.out!r}")
        record.kind = LINEAR
        linear.groups, linear.maxima, linear.sampled, linear.heads = NULL, NULL, False, heads
        linear.capacity, linear.head_columns = self.max_rows, columns
        linear.has_factors, linear.scale, linear.softcap = False, 1, 0
        self._add_product(linear, op, op.weights, None, self.max_rows, heads * (self.max_rows // ROWS_IN_CACHE + 1))

    cdef _add_product(self, LinearOp *linear, op, weights, biases, rows, groups):
        """Set the input, the weights and biases, and the output, of a linear layer, of experts, or of heads."""
        cdef PackedMatrix weight = weights[0]
        cdef char[::1] memory = np.zeros(len(weights) * sizeof(Weight), np.int8)
        cdef Weight *packed = <Weight *>&memory[0]
        columns, num_blocks = weight.out_features * linear.heads, weight.panels // 2
        epilogue = "store" if isinstance(op, HeadLinear) else op.epilogue
        if epilogue in GATED:
            columns, num_blocks = min(weight.out_features // 2, op.out.columns), weight.panels // 4
            if padded(op.out.columns) != weight.panels * 8:
                raise ValueError(f"{epilogue} of {weight.panels * 16} columns gives {weight.panels * 8}, "
                                 f"out has {op.out.columns}")
        if groups * num_blocks >= QUIRE_SHARE_ITEMS:
            raise ValueError(f"{rows} rows of {num_blocks} blocks are more than {QUIRE_SHARE_ITEMS - 1} items")
        self._add_linear_input(linear, op.input, weight, rows * linear.heads)
        linear.out = self.regions.value(op.out, columns, "f32" if epilogue == "add" else op.out.dtype, rows)
        linear.converts = op.out.dtype != "f32"
        if linear.converts:
            linear.converted = self.regions.output(op.out, columns, rows)
        linear.written, linear.lora = NULL, NULL
        linear.span = max(1, op.out.group)
        linear.num_spans = -(-num_blocks // linear.span)
        linear.num_blocks, linear.epilogue = num_blocks, _EPILOGUES[epilogue]
        linear.has_minimums, linear.has_half_blocks = has_minimums(weight), has_half_blocks(weight)
        linear.packed_bytes = max([packed_rows_bytes(WEIGHT_CODES[dtype], weight.width, weight.group)
                                   for _, dtype in weight.ranges])
        for index, weight in enumerate(weights):
            memcpy(packed[index].parts, weight.parts, sizeof(weight.parts))
            packed[index].num_parts, packed[index].bias = weight.num_parts, NULL
            if biases is not None:
                packed[index].bias = self.regions.vector(biases[index], weight.out_features, weight.panels * 16)
        linear.weights = packed
        self.regions.keep_alive += [weights, memory]

    cdef _add_route(self, Record *record, op):
        cdef RouteOp *route = &record.op.route
        record.kind = ROUTE
        route.routing = self.regions.tables(op.routing)
        route.logits = self._logits(op.logits, op.routing)
        rule, routing = op.rule, op.routing
        size, rest = divmod(routing.num_experts, rule.groups)
        if routing.num_experts > QUIRE_MAX_EXPERTS:
            raise ValueError(f"a mixture has at most {QUIRE_MAX_EXPERTS} experts, not {routing.num_experts}")
        if rest or size < 2 <= rule.groups or not routing.top_k <= rule.kept_groups * size <= routing.num_experts:
            raise ValueError(f"{routing.top_k} of {routing.num_experts} experts cannot follow {rule!r}")
        route.router.experts, route.router.chosen = routing.num_experts, routing.top_k
        route.router.groups, route.router.kept_groups = rule.groups, rule.kept_groups
        route.router.sigmoid, route.router.normalized = rule.sigmoid, rule.normalized
        route.router.eps, route.router.scale, route.router.bias = rule.eps, rule.scale, NULL
        route.scales = NULL
        if op.scales is not None:
            route.scales = self.regions.vector(op.scales, routing.num_experts, routing.num_experts)
        if op.bias is not None:
            route.router.bias = self.regions.vector(op.bias, routing.num_experts, padded(routing.num_experts))

    cdef _add_dispatch(self, Record *record, op):
        cdef DispatchOp *dispatch = &record.op.dispatch
        cdef Value squares
        places, columns = self.max_rows * op.routing.top_k, op.input.data.columns
        record.kind = DISPATCH
        dispatch.routing = self.regions.tables(op.routing)
        dispatch.input = self.regions.value(op.input.data, op.out.data.columns, op.out.data.dtype, self.max_rows)
        dispatch.out = self.regions.value(op.out.data, columns, op.input.data.dtype, places)
        if op.out.data.group != op.input.data.group:
            raise ValueError(f"{op.out.data!r} does not have the groups of {op.input.data!r}")
        squares = self.regions.value(op.input.squares, padded(columns) // BLOCK, "f32", self.max_rows)
        dispatch.squares, dispatch.squares_width = <float *>squares.rows.data, squares.rows.width
        squares = self.regions.value(op.out.squares, padded(columns) // BLOCK, "f32", places)
        dispatch.out_squares = <float *>squares.rows.data

    cdef _add_combine(self, Record *record, op):
        cdef CombineOp *combine = &record.op.combine
        record.kind = COMBINE
        combine.routing = self.regions.tables(op.routing)
        combine.input = self.regions.value(op.input, op.out.columns, "f32", self.max_rows * op.routing.top_k)
        combine.out = self.regions.value(op.out, op.input.columns, "f32", self.max_rows)
        combine.is_normed = self.regions.normed(&combine.normed, op, self.max_rows)
        combine.has_shared, combine.adds = op.shared is not None, op.adds
        if combine.has_shared:
            combine.shared = self.regions.value(op.shared.rows, op.out.columns, "f32", self.max_rows)
            combine.logits = self._logits(op.shared.logits, op.routing)
            if op.shared.logits.columns == op.routing.num_experts:
                raise ValueError(f"{op.shared.logits!r} has no logit of a shared expert")

    cdef Value _logits(self, region, routing) except *:
        """Return the logits of experts, which the logit of a shared expert may follow."""
        columns = routing.num_experts
        return self.regions.value(region, columns + (region.columns == columns + 1), "f32", self.max_rows)

    cdef _add_maxima(self, LinearOp *linear, op, rows):
        cdef Value maxima
        linear.maxima = NULL
        if op.maxima is not None:
            if op.out.dtype != "f32":
                raise ValueError(f"maxima need f32, not {op.out!r}")
            maxima = self.regions.value(op.maxima, padded(op.out.columns) // BLOCK, "f32", rows)
            linear.maxima, linear.maxima_width = <float *>maxima.rows.data, maxima.rows.width

    cdef _add_linear_input(self, LinearOp *linear, source, PackedMatrix weight, rows):
        cdef Value squares
        linear.squares = NULL
        if isinstance(source, Normed):
            squares = self.regions.value(source.squares, padded(weight.in_features) // BLOCK, "f32", rows)
            linear.squares, linear.squares_width = <float *>squares.rows.data, squares.rows.width
            linear.eps, source = source.eps, source.data
        linear.input = self.regions.value(source, weight.in_features, INPUT_DTYPES[weight.dtype], rows)
        if source.group != weight.group:
            raise ValueError(f"{source!r} does not have the weight's group, {weight.group}")

    cdef _add_heads(self, HeadsOp *heads, op, group, norms_rows, gated, stores, values_are_keys, v_norm, head_norm):
        rotary_dim = self._add_rotary(heads, op)
        heads.query_stride = op.head_dim * (2 if gated else 1)
        heads.first_key = op.num_heads * heads.query_stride
        kv_columns = op.num_kv_heads * op.head_dim
        heads.first_value = heads.first_key + (0 if values_are_keys else kv_columns)
        columns = heads.first_value + kv_columns if stores else heads.first_key
        heads.qkv = self.regions.value(op.qkv, columns, "f32", self.max_rows)
        heads.num_heads, heads.num_kv_heads = op.num_heads, op.num_kv_heads
        heads.group, heads.head_dim = group, op.head_dim
        heads.norms_rows, heads.stores, heads.query_scales = norms_rows, stores, NULL
        heads.own_norms = own = norms_rows or head_norm == "layer"
        heads.query = self._head(op, op.q_norm, op.num_heads if own else 1, rotary_dim, op.scale, head_norm,
                                 -group * heads.query_stride)
        heads.key = self._head(op, op.k_norm, op.num_kv_heads if own else 1, rotary_dim, 1, head_norm, op.head_dim)
        heads.value = self._head(op, v_norm, 1, 0, 1, "rms", op.head_dim)

    cdef _add_query_scales(self, HeadsOp *heads, const float[::1] scales):
        self.regions.keep_alive.append(scales)
        self.max_positions = min(self.max_positions, scales.shape[0])
        heads.query_scales = &scales[0]

    cdef int64_t _add_rotary(self, HeadsOp *heads, op) except -1:
        """Set the rotary table of an op, if it has one; return the number of elements of a head that are rotated."""
        cdef const float[:, ::1] rotary
        given_dim = op.rotary_dim if isinstance(op, EphemeralAttention) else 0
        if op.rotary is None:
            heads.rotary = self.regions.vector(np.zeros(1), 1, 1)      # no element of it is read
            if not 0 <= given_dim <= op.head_dim or given_dim % 2:
                raise ValueError(f"rotary_dim must be even and at most {op.head_dim}, not {given_dim}")
            if given_dim:
                self.rotary_dims.add(given_dim)
                self.needs_rotary = True
            return given_dim
        rotary = op.rotary
        if not 2 <= rotary.shape[1] <= op.head_dim or rotary.shape[1] % 2 or given_dim:
            raise ValueError(f"rotary table must be [positions, 2 .. {op.head_dim}], not {list(op.rotary.shape)}, and "
                             f"rotary_dim 0, not {given_dim}")
        self.regions.keep_alive.append(op.rotary)
        self.max_positions = min(self.max_positions, rotary.shape[0])
        self.rotary_dims.add(rotary.shape[1])
        heads.rotary = &rotary[0, 0]
        return rotary.shape[1]

    cdef quire_head _head(self, op, norm, heads, rotary_dim, scale, head_norm, next) except *:
        """Return the operations on a kind of head; a worker takes heads that are `next` columns apart."""
        cdef quire_head head
        head.head_dim, head.rotary_dim, head.eps, head.factor, head.scale = op.head_dim, rotary_dim, op.eps, 0, scale
        head.rotary_distance = self._rotary_distance(op, rotary_dim) if rotary_dim else 0
        head.centered, head.norm_last = head_norm == "layer", head_norm == "rotated"
        head.norm, head.ahead, head.next = NULL, ROWS_AHEAD * padded(op.qkv.columns), next
        if norm is not None:
            length = op.head_dim * heads
            head.norm = self.regions.vector(norm, length, padded(length + 16))     # a head is read by 16 elements
        return head

    def _rotary_distance(self, op, rotary_dim):
        """Return the distance between the two elements that are rotated together."""
        span = op.rotary_span if isinstance(op, Attention) and op.rotary_span else rotary_dim
        if not rotary_dim <= span <= op.head_dim or span % 2:
            raise ValueError(f"rotary_span must be even and {rotary_dim} to {op.head_dim}, not {span}")
        return span // 2

    cdef _add_attention(self, Record *record, op):
        cdef AttentionOp *attention = &record.op.attention
        if op.norms_rows and op.head_norm != "rms":
            raise ValueError(f"the norm over all heads of a row is an RMS norm before the rotation, not {op.head_norm}")
        attention.heads.slot = self._slot(op.group, op.layer, op.window, (op.num_kv_heads, op.head_dim), 0)
        self._add_heads_and_output(attention, op, op.norms_rows, op.gated, op.stores, op.values_are_keys, op.v_norm,
                                   op.head_norm)
        record.kind = ATTENTION
        attention.causal, attention.softcap = True, op.softcap
        if op.query_scales is not None:
            self._add_query_scales(&attention.heads, op.query_scales)
        if op.sinks is not None:
            attention.sinks = self.regions.vector(op.sinks, op.num_heads, op.num_heads)

    cdef _add_ephemeral_attention(self, Record *record, op):
        cdef AttentionOp *attention = &record.op.attention
        pages = op.pages
        if self.kv_layout is not None or pages != self.pages:
            raise ValueError(f"all attention of a program is in pages of the KV cache or in {self.pages!r}")
        if (op.num_kv_heads, op.head_dim) != (pages.num_kv_heads, pages.head_dim) or op.window < 0:
            raise ValueError(f"{op.num_kv_heads} x {op.head_dim} KV heads with a window of {op.window} do not fit "
                             f"{pages!r}")
        needed = ephemeral_pages(self.max_rows, self.max_samples)
        if pages.num_pages < needed:
            raise ValueError(f"{self.max_rows} rows of {self.max_samples} texts need {needed} pages, "
                             f"not {pages.num_pages}")
        if pages.offset < 0 or pages.offset % 64 or pages.offset + pages.nbytes > self.regions.nbytes:
            raise ValueError(f"{pages!r} are not aligned or not inside an arena of {self.regions.nbytes} bytes")
        record.kind = ATTENTION
        attention.heads.slot.layer_group = attention.heads.slot.offset = attention.heads.slot.values_in_keys = 0
        attention.heads.slot.head_bytes = pages.head_bytes
        attention.heads.slot.padded_head_dim = pages.padded_head_dim
        self._add_heads_and_output(attention, op, False, False)
        attention.causal, attention.softcap = op.causal, 0
        if op.bias is not None:
            self._add_bias(attention, op)

    cdef _add_latent_attention(self, Record *record, op):
        cdef AttentionOp *attention = &record.op.attention
        groups = head_groups(op.num_heads)
        attention.heads.slot = self._slot(op.group, op.layer, 0, (1, op.rank + op.rotary_dim), op.rank)
        bind_latent_heads(&attention.latent, op, self.regions, self.max_rows)
        record.kind = ATTENTION
        attention.heads.stores = True
        attention.heads.num_heads, attention.heads.num_kv_heads = op.num_heads, groups
        attention.heads.group, attention.heads.head_dim = op.num_heads // groups, op.rank
        attention.partition = self._partition(groups, op.num_heads // groups)
        attention.out = self.regions.output(op.out, op.rank, self.max_rows * op.num_heads)
        attention.value_dim, attention.stored_heads = op.rank, 1
        attention.causal, attention.softcap, attention.window, attention.gated = True, 0, 0, False
        attention.sinks, attention.bias = NULL, NULL
        self.stores_first = self.stores_first or groups > 1
        self.rotary_dims.add(op.rotary_dim)
        self.max_positions = min(self.max_positions, op.rotary.shape[0])

    cdef _add_bias(self, AttentionOp *attention, op):
        cdef const float[:, ::1] bias = op.bias
        positions = (bias.shape[1] + 1 - BIAS_PADDING) // 2
        if bias.shape[0] != op.num_heads or positions < 1 or bias.shape[1] != 2 * positions - 1 + BIAS_PADDING:
            raise ValueError(f"bias must be [{op.num_heads}, 2 * positions - 1 + {BIAS_PADDING}], "
                             f"not {list(op.bias.shape)}")
        self.regions.keep_alive.append(op.bias)
        self.max_positions = min(self.max_positions, positions)
        attention.bias, attention.bias_columns, attention.bias_origin = &bias[0, 0], bias.shape[1], positions - 1

    cdef _add_heads_and_output(self, AttentionOp *attention, op, norms_rows, gated, stores=True, values_are_keys=False,
                               v_norm=None, head_norm="rms"):
        group = self._query_heads(op)
        if gated and norms_rows:
            raise ValueError("query heads with gates are normed one by one")
        columns = BLOCK * max(1, op.out.group)
        if op.out.dtype != "f32" and group * op.head_dim % columns:
            raise ValueError(f"{group} heads of {op.head_dim} do not fill blocks of {columns}: out must be f32")
        self._add_heads(&attention.heads, op, group, norms_rows, gated, stores, values_are_keys, v_norm, head_norm)
        attention.out = self.regions.output(op.out, op.num_heads * op.head_dim, self.max_rows)
        attention.window, attention.sinks, attention.bias, attention.gated = op.window, NULL, NULL, gated
        attention.latent.rank, attention.stored_heads = 0, op.num_kv_heads
        attention.value_dim = attention.heads.slot.padded_head_dim
        attention.partition = self._partition(op.num_kv_heads, group)

    cdef const Partition *_partition(self, num_kv_heads, group) except NULL:
        """Return the partition of layers with these KV heads, each with `group` query heads."""
        cdef Partition *partition = &self.partitions[self.kinds.setdefault((num_kv_heads, group), len(self.kinds))]
        partition.num_kv_heads, partition.query_tile = num_kv_heads, QUIRE_TILE // group
        return partition

    cdef Slot _slot(self, group, layer, window, heads, values_in_keys) except *:
        """Return the place of an op's keys and values in the pages of the KV cache."""
        cdef Slot slot
        layout = self.kv_layout
        if layout is None:
            raise ValueError("attention over pages needs a KV cache")
        groups = layout.groups
        if not 0 <= group < len(groups) or window < 0 or window != groups[group].window:
            raise ValueError(f"a window of {window} does not fit layer group {group}; "
                             f"the groups' windows are {[group.window for group in groups]}")
        found = groups[group]
        if not 0 <= layer < len(found.layers) or heads != found.heads or values_in_keys != layout.values_in_keys:
            latents = f", the first {layout.values_in_keys} elements of keys as values" if layout.values_in_keys else ""
            raise ValueError(f"layer {layer} with {heads[0]} x {heads[1]} KV heads does not fit a group "
                             f"of {len(found.layers)} layers with {found.heads[0]} x {found.heads[1]}{latents}")
        slot.layer_group, slot.offset = group, layout.offset(group, layer, self.num_pages)
        slot.head_bytes, slot.padded_head_dim = layout.head_bytes(heads[1]), layout.padded(heads[1])
        slot.values_in_keys = values_in_keys
        return slot

    def _query_heads(self, op):
        """Return the number of query heads per KV head."""
        if op.num_heads < 1 or op.num_heads % op.num_kv_heads:
            raise ValueError(f"{op.num_heads} query heads do not divide among {op.num_kv_heads} KV heads")
        group = op.num_heads // op.num_kv_heads
        if group > QUIRE_TILE:
            raise ValueError(f"at most {QUIRE_TILE} query heads may share a KV head, not {group}")
        return group
