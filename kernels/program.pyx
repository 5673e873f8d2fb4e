# cython: language_level=3
"""Programs: a list of ops bound to memory, run on all workers in one call per step, without Python.

The constructor checks every size once. `run` checks what changes from step to step (rows, positions, pages, ids), so
that no op has to. No memory is allocated in a step.
"""
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy, memset

import numpy as np

from .attention cimport AttentionOp, attention_scratch_bytes, attention_shared_bytes, num_units
from .experts cimport CombineOp, DispatchOp, RouteOp, RoutingTables, grouping_scratch_bytes
from .heads cimport HeadsOp
from .isa cimport (QUIRE_ADD, QUIRE_CLAMPED, QUIRE_GEGLU, QUIRE_MAX_HEAD, QUIRE_STORE, QUIRE_SWIGLU, QUIRE_TILE,
                   quire_head, tiles_of)
from .isa import DTYPE_CODES
from .linear cimport ROWS_IN_CACHE, LinearOp, Weight, linear_scratch_bytes
from .ops import (BLOCK, GATED, INPUT_DTYPES, QUERY_DTYPES, AddNorm, Attention, Combine, Convert, Dispatch, Embed,
                  ExpertLinear, Gather, Linear, Normed, RouteRows, aligned, max_groups, padded)
from .pack cimport PackedMatrix
from .pool cimport QUIRE_SHARE_ITEMS, QUIRE_SHARE_OPS, Pool, quire_pool_run, quire_progress, quire_share
from .regions cimport Regions
from .regions import aligned_zeros
from .replay cimport (ADD_NORM, ATTENTION, COMBINE, CONVERT, DISPATCH, EMBED, GATHER, LINEAR, ROUTE, Record, Replay,
                      now, replay_ops)
from .rows cimport ConvertOp
from .step cimport Step, Value

_EPILOGUES = {"store": QUIRE_STORE, "add": QUIRE_ADD, "swiglu": QUIRE_SWIGLU, "geglu": QUIRE_GEGLU,
              "swiglu_clamped": QUIRE_CLAMPED}


def scratch_nbytes(head_dim, workers, ops):
    """Return the bytes of all workers' scratch: each worker's own, which every op uses, and the heads they share."""
    linears = [op.weight if isinstance(op, Linear) else op.weights[0] for op in ops
               if isinstance(op, (Linear, ExpertLinear))]
    widths = [padded(weight.in_features) for weight in linears if "q4" in [dtype for _, dtype in weight.ranges]]
    num_experts = max((op.routing.num_experts for op in ops if isinstance(op, RouteRows)), default=0)
    own = aligned(max(attention_scratch_bytes(padded(head_dim)), linear_scratch_bytes(max(widths, default=0)),
                      grouping_scratch_bytes(num_experts)))
    return workers * (own + attention_shared_bytes(padded(head_dim)))


cdef class Program:
    cdef Replay replay
    cdef Pool pool
    cdef Regions regions
    cdef object records, shares, scratch, block_start, unit_start
    cdef int64_t max_rows, max_sequences, max_samples, vocab_size, num_pages, page_layers, max_positions
    cdef int64_t num_kv_heads, head_dim
    cdef int64_t[::1] windows       # of each layer group

    def __init__(self, ops, arena_bytes, kv_memory, kv_layout, num_pages, Pool pool, *, max_rows, max_samples,
                 max_sequences, vocab_size, isa=None):
        if len(ops) >= QUIRE_SHARE_OPS:
            raise ValueError(f"a program has at most {QUIRE_SHARE_OPS - 1} ops, not {len(ops)}")
        self.pool = pool
        self.max_rows, self.max_samples, self.max_sequences = max_rows, max_samples, max_sequences
        self.vocab_size, self.num_pages, self.page_layers = vocab_size, num_pages, kv_layout.page_layers
        self.num_kv_heads, self.head_dim = kv_layout.num_kv_heads, kv_layout.head_dim
        self.windows = np.array(kv_layout.group_windows, np.int64)
        self.max_positions = 2**31 - 1
        self.regions = Regions(arena_bytes, self.max_rows)
        self.regions.keep_alive.append(kv_memory)
        self._allocate(ops)
        self._lay_out_pages(kv_memory, kv_layout)
        for index, op in enumerate(ops):
            self._add(&self.replay.records[index], op)
        self.replay.num_records = len(ops)
        self.replay.tiles, self.replay.pool = tiles_of(isa), pool.pool

    cdef _allocate(self, ops):
        """Allocate the op records and the workers' scratch: with the arena, all memory of the program."""
        self.records = aligned_zeros(max(1, len(ops)) * sizeof(Record))
        cdef char[::1] records = self.records
        self.replay.records = <Record *>&records[0]
        self.shares = aligned_zeros(self.pool.workers * sizeof(quire_share))
        cdef char[::1] shares = self.shares
        self.replay.shares = <quire_share *>&shares[0]
        self.scratch = aligned_zeros(scratch_nbytes(self.head_dim, self.pool.workers, ops))
        cdef char[::1] scratch = self.scratch
        self.replay.step.scratch = &scratch[0]
        self.replay.step.scratch_bytes = scratch.shape[0] // self.pool.workers
        self.block_start = np.zeros(self.max_sequences + 1, np.int64)
        self.unit_start = np.zeros(self.max_sequences + 1, np.int64)
        cdef int64_t[::1] blocks = self.block_start, units = self.unit_start
        self.replay.step.block_start, self.replay.step.unit_start = &blocks[0], &units[0]

    cdef _lay_out_pages(self, kv_memory, layout):
        cdef char[::1] memory = kv_memory.view(np.int8)
        if memory.shape[0] < self.num_pages * layout.page_bytes:
            raise ValueError(f"{self.num_pages} pages need {self.num_pages * layout.page_bytes} bytes, "
                             f"the KV memory has {memory.shape[0]}")
        if not 1 <= layout.head_dim <= QUIRE_MAX_HEAD or layout.head_dim % 2:
            raise ValueError(f"head_dim must be even and at most {QUIRE_MAX_HEAD}, not {layout.head_dim}")
        if layout.page_size not in (16, 32, 64):
            raise ValueError(f"a page holds 16, 32 or 64 tokens, not {layout.page_size}")
        self.replay.step.kv = &memory[0]
        self.replay.step.layer_bytes = self.num_pages * layout.layer_page_bytes
        self.replay.step.page_bytes = layout.layer_page_bytes
        self.replay.step.head_bytes = layout.head_bytes
        self.replay.step.padded_head_dim = layout.padded_head_dim
        self.replay.step.page_size = layout.page_size
        self.replay.step.kv_dtype = DTYPE_CODES[QUERY_DTYPES[layout.dtype]]
        self.replay.step.query_tile = QUIRE_TILE

    # Building: one method per kind of op. Every size is checked here.

    cdef _add(self, Record *record, op):
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
        elif isinstance(op, RouteRows):
            self._add_route(record, op)
        elif isinstance(op, Dispatch):
            self._add_dispatch(record, op)
        elif isinstance(op, Combine):
            self._add_combine(record, op)
        elif isinstance(op, AddNorm):
            self._add_add_norm(record, op)
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
        record.op.embed.scale = op.scale

    cdef _add_convert(self, Record *record, op):
        cdef ConvertOp *convert = &record.op.convert
        record.kind = CONVERT
        convert.sampled = self.regions.follows(op.input, op.out)
        rows = self.max_samples if convert.sampled else self.max_rows
        convert.input = self.regions.value(op.input, op.out.columns, "f32", rows)
        convert.out = self.regions.output(op.out, op.input.columns, rows)

    cdef _add_add_norm(self, Record *record, op):
        columns = op.out.columns
        record.kind = ADD_NORM
        record.op.add_norm.input = self.regions.value(op.input, columns, "f32", self.max_rows)
        record.op.add_norm.out = self.regions.value(op.out, columns, "f32", self.max_rows)
        record.op.add_norm.weight = self.regions.vector(op.weight, columns, padded(columns))
        record.op.add_norm.eps = op.eps
        record.op.add_norm.is_normed = self.regions.normed(&record.op.add_norm.normed, op, self.max_rows)

    cdef _add_linear(self, Record *record, op):
        cdef PackedMatrix weight = op.weight
        cdef LinearOp *linear = &record.op.linear
        record.kind = LINEAR
        linear.sampled = self.regions.follows(op.input.data if isinstance(op.input, Normed) else op.input, op.out)
        rows = self.max_samples if linear.sampled else self.max_rows
        linear.groups = NULL
        biases = None if op.bias is None else (op.bias * np.float32(op.scale),)
        self._add_product(linear, op, (weight,), biases, rows, rows // ROWS_IN_CACHE + 1)
        if op.normed is not None:
            linear.converts = self.regions.normed(&linear.converted, op, rows)
        self._add_maxima(linear, op, rows)
        linear.has_factors, linear.scale = linear.squares != NULL or op.scale != 1, op.scale
        linear.softcap = op.softcap
        if op.softcap and op.epilogue != "store":
            raise ValueError(f"results are capped when they are stored, not with {op.epilogue}")

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
        linear.groups, linear.groups_width = routing.groups, routing.groups_width
        linear.scale, linear.softcap = 1, 0
        self._add_product(linear, op, op.weights, op.biases, self.max_rows * op.routing.top_k,
                          max_groups(self.max_rows, op.routing.num_experts, op.routing.top_k))
        linear.has_factors = linear.squares != NULL

    cdef _add_product(self, LinearOp *linear, op, weights, biases, rows, groups):
        """Set the input, the weights and biases, and the output: what linear layers with and without experts have."""
        cdef PackedMatrix weight = weights[0]
        cdef char[::1] memory = np.zeros(len(weights) * sizeof(Weight), np.int8)
        cdef Weight *packed = <Weight *>&memory[0]
        columns, num_blocks = weight.out_features, weight.panels // 2
        if op.epilogue in GATED:
            columns, num_blocks = min(weight.out_features // 2, op.out.columns), weight.panels // 4
            if padded(op.out.columns) != weight.panels * 8:
                raise ValueError(f"{op.epilogue} of {weight.panels * 16} columns gives {weight.panels * 8}, "
                                 f"out has {op.out.columns}")
        if groups * num_blocks >= QUIRE_SHARE_ITEMS:
            raise ValueError(f"{rows} rows of {num_blocks} blocks are more than {QUIRE_SHARE_ITEMS - 1} items")
        self._add_linear_input(linear, op.input, weight, rows)
        linear.out = self.regions.value(op.out, columns, "f32" if op.epilogue == "add" else op.out.dtype, rows)
        linear.converts = op.out.dtype != "f32"
        if linear.converts:
            linear.converted = self.regions.output(op.out, columns, rows)
        linear.num_blocks, linear.epilogue = num_blocks, _EPILOGUES[op.epilogue]
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
        route.routing, route.normalised = self.regions.tables(op.routing), op.normalised
        route.logits = self.regions.value(op.logits, op.routing.num_experts, "f32", self.max_rows)

    cdef _add_dispatch(self, Record *record, op):
        cdef DispatchOp *dispatch = &record.op.dispatch
        cdef Value squares
        places, columns = self.max_rows * op.routing.top_k, op.input.data.columns
        record.kind = DISPATCH
        dispatch.routing = self.regions.tables(op.routing)
        dispatch.input = self.regions.value(op.input.data, op.out.data.columns, op.out.data.dtype, self.max_rows)
        dispatch.out = self.regions.value(op.out.data, columns, op.input.data.dtype, places)
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

    cdef _add_heads(self, HeadsOp *heads, op, group):
        self._add_rotary(heads, op)
        heads.qkv = self.regions.value(op.qkv, (op.num_heads + 2 * op.num_kv_heads) * op.head_dim, "f32", self.max_rows)
        heads.layer_group, heads.layer = op.group, op.layer
        heads.num_heads, heads.num_kv_heads = op.num_heads, op.num_kv_heads
        heads.group, heads.head_dim = group, op.head_dim
        rotary_dim = 0 if op.rotary is None else op.rotary.shape[1]
        heads.norms_rows = op.norms_rows
        heads.query = self._head(op, op.q_norm, op.num_heads, rotary_dim, op.scale)
        heads.key = self._head(op, op.k_norm, op.num_kv_heads, rotary_dim, 1)
        heads.value = self._head(op, None, 1, 0, 1)

    cdef _add_rotary(self, HeadsOp *heads, op):
        cdef const float[:, ::1] rotary
        if op.rotary is None:
            heads.rotary = self.regions.vector(np.zeros(1), 1, 1)      # no element of it is read
            return
        rotary = op.rotary
        if not 2 <= rotary.shape[1] <= op.head_dim or rotary.shape[1] % 2:
            raise ValueError(f"rotary table must be [positions, 2 .. {op.head_dim}], not {list(op.rotary.shape)}")
        self.regions.keep_alive.append(op.rotary)
        self.max_positions = min(self.max_positions, rotary.shape[0])
        heads.rotary = &rotary[0, 0]

    cdef quire_head _head(self, op, norm, heads, rotary_dim, scale) except *:
        cdef quire_head head
        head.head_dim, head.rotary_dim, head.eps, head.factor, head.scale = op.head_dim, rotary_dim, op.eps, 0, scale
        head.norm = NULL
        if norm is not None:
            length = op.head_dim * (heads if op.norms_rows else 1)
            head.norm = self.regions.vector(norm, length, padded(length + 16))     # a head is read by 16 elements
        return head

    cdef _add_attention(self, Record *record, op):
        cdef AttentionOp *attention = &record.op.attention
        self._check_place(op)
        group = self._query_heads(op)
        if op.out.dtype != "f32" and group * op.head_dim % BLOCK:
            raise ValueError(f"{group} heads of {op.head_dim} do not fill blocks of {BLOCK}: out must be f32")
        record.kind = ATTENTION
        self._add_heads(&attention.heads, op, group)
        attention.out = self.regions.output(op.out, op.num_heads * op.head_dim, self.max_rows)
        attention.window, attention.softcap, attention.sinks = op.window, op.softcap, NULL
        if op.sinks is not None:
            attention.sinks = self.regions.vector(op.sinks, op.num_heads, op.num_heads)
        self.replay.step.query_tile = min(self.replay.step.query_tile, QUIRE_TILE // group)

    def _check_place(self, op):
        if not 0 <= op.layer < self.page_layers or op.num_kv_heads != self.num_kv_heads or op.head_dim != self.head_dim:
            raise ValueError(f"layer {op.layer} with {op.num_kv_heads} x {op.head_dim} KV heads does not fit a cache "
                             f"of {self.page_layers} layers with {self.num_kv_heads} x {self.head_dim}")
        if not 0 <= op.group < self.windows.shape[0] or op.window < 0 or op.window != self.windows[op.group]:
            raise ValueError(f"a window of {op.window} does not fit layer group {op.group}; "
                             f"the groups' windows are {list(self.windows)}")

    def _query_heads(self, op):
        """Return the number of query heads per KV head."""
        if op.num_heads < 1 or op.num_heads % op.num_kv_heads:
            raise ValueError(f"{op.num_heads} query heads do not divide among {op.num_kv_heads} KV heads")
        group = op.num_heads // op.num_kv_heads
        if group > QUIRE_TILE:
            raise ValueError(f"at most {QUIRE_TILE} query heads may share a KV head, not {group}")
        return group

    # Running.

    def run(self, const int32_t[::1] token_ids, const int32_t[::1] row_start, const int32_t[::1] first_position,
            const int32_t[::1] page_ids, const int32_t[::1] page_start, const int32_t[::1] sample_rows):
        cdef Step *step = &self.replay.step
        cdef int64_t i
        self._check_step(token_ids, row_start, first_position, page_ids, page_start, sample_rows)
        step.rows, step.sequences = token_ids.shape[0], first_position.shape[0]
        step.samples = sample_rows.shape[0]
        step.token_ids, step.row_start, step.first_position = &token_ids[0], &row_start[0], &first_position[0]
        step.page_ids, step.page_start = &page_ids[0], &page_start[0]
        step.sample_rows = &sample_rows[0] if step.samples else NULL
        self._partition(step)
        for i in range(self.replay.num_records):
            memset(&self.replay.records[i].stored, 0, sizeof(quire_progress))
            memset(&self.replay.records[i].progress, 0, sizeof(quire_progress))
        memset(self.replay.shares, 0, self.pool.workers * sizeof(quire_share))
        self.replay.started = now()
        with nogil:
            quire_pool_run(self.pool.pool, replay_ops, &self.replay)

    cdef _check_step(self, const int32_t[::1] token_ids, const int32_t[::1] row_start,
                     const int32_t[::1] first_position, const int32_t[::1] page_ids, const int32_t[::1] page_start,
                     const int32_t[::1] sample_rows):
        cdef int64_t rows = token_ids.shape[0], sequences = first_position.shape[0], i
        cdef int64_t tables = self.windows.shape[0] * sequences
        if not 1 <= rows <= self.max_rows or not 1 <= sequences <= self.max_sequences:
            raise ValueError(f"{rows} rows of {sequences} sequences; this program takes 1..{self.max_rows} of "
                             f"1..{self.max_sequences}")
        if sample_rows.shape[0] > self.max_samples:
            raise ValueError(f"{sample_rows.shape[0]} sampling rows; this program takes {self.max_samples}")
        if (row_start.shape[0] != sequences + 1 or page_start.shape[0] != tables + 1 or row_start[0] != 0
                or page_start[0] != 0 or row_start[sequences] != rows or page_start[tables] != page_ids.shape[0]):
            raise ValueError("row_start and page_start must run from 0 to the number of rows and pages")
        for i in range(rows):
            if not 0 <= token_ids[i] < self.vocab_size:
                raise ValueError(f"token id {token_ids[i]} is outside the vocabulary of {self.vocab_size}")
        for i in range(sequences):
            if (row_start[i + 1] <= row_start[i] or first_position[i] < 0
                    or <int64_t>first_position[i] + row_start[i + 1] - row_start[i] > self.max_positions):
                raise ValueError(f"sequence {i} must run at least one row at positions 0..{self.max_positions - 1}")
        self._check_tables(row_start, first_position, page_ids, page_start)
        for i in range(sample_rows.shape[0]):
            if not 0 <= sample_rows[i] < rows:
                raise ValueError(f"sampling row {sample_rows[i]} is outside the step's {rows}")

    cdef _check_tables(self, const int32_t[::1] row_start, const int32_t[::1] first_position,
                       const int32_t[::1] page_ids, const int32_t[::1] page_start):
        """Check that each table covers all tokens, without -1 from the first tile on that the first row sees."""
        cdef int64_t sequences = first_position.shape[0], size = self.replay.step.page_size
        cdef int64_t window, group, i, table, page, pages, first, seen, end
        for group in range(self.windows.shape[0]):
            window = self.windows[group]
            for i in range(sequences):
                first, table = first_position[i], page_start[group * sequences + i]
                pages, end = page_start[group * sequences + i + 1] - table, first + row_start[i + 1] - row_start[i]
                if pages * size < end or table + pages > page_ids.shape[0]:
                    raise ValueError(f"sequence {i} has {pages} pages for {end} tokens")
                seen = max(<int64_t>0, first - window + 1) // QUIRE_TILE * QUIRE_TILE // size if window else 0
                for page in range(pages):
                    if not (0 if page >= seen else -1) <= page_ids[table + page] < self.num_pages:
                        raise ValueError(f"page {page_ids[table + page]} is outside the pool of {self.num_pages}")

    cdef void _partition(self, Step *step) noexcept nogil:
        """Count the units of attention before each sequence: pages to store, then query tiles or splits."""
        cdef int64_t i, n, first, size = step.page_size
        step.block_start[0] = step.unit_start[0] = 0
        for i in range(step.sequences):
            first, n = step.first_position[i], step.row_start[i + 1] - step.row_start[i]
            step.block_start[i + 1] = step.block_start[i]
            if n > 1:       # a single row is stored where it attends
                step.block_start[i + 1] += (first + n - 1) // size - first // size + 1
            step.unit_start[i + 1] = step.unit_start[i] + num_units(step, i, self.num_kv_heads, self.pool.workers)

    def op_seconds(self):
        """Return the seconds spent in each op since the last call, the wait for the slowest worker included."""
        cdef int64_t i
        seconds = []
        for i in range(self.replay.num_records):
            seconds.append(self.replay.records[i].nanoseconds * 1e-9)
            self.replay.records[i].nanoseconds = 0
        return seconds

    def view(self, region):
        return self.regions.view(region)
