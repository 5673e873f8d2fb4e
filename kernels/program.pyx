# cython: language_level=3
"""Programs: a list of ops bound to memory, run on all workers in one call per step, without Python.

The constructor checks every size once. `run` checks what changes from step to step (rows, positions, pages, ids), so
that no op has to. No memory is allocated in a step. A program runs sequences with pages of a KV cache, or whole texts
whose keys and values stay in its arena.
"""
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memset

import numpy as np

from .attention cimport attention_scratch_bytes, attention_shared_bytes, num_units, partitions_by_split
from .bind cimport Binder
from .experts cimport grouping_scratch_bytes
from .isa cimport QUIRE_MAX_HEAD, QUIRE_TILE, mix_levels, quire_tiles
from .isa import KV_CODES, WEIGHT_CODES
from .linear cimport ROWS_IN_CACHE, linear_scratch_bytes
from .lora cimport LoraTable
from .ops import (BLOCK, GATED, Attention, Convert, Embed, EphemeralAttention, EphemeralPages, ExpertLinear, HeadLinear,
                  LatentAttention, Linear, NormRows, RouteRows, aligned, ephemeral_pages, has_half_blocks,
                  has_minimums, head_groups, padded, state_nbytes)
from .pool cimport QUIRE_SHARE_OPS, Pool, quire_pool_run, quire_progress, quire_share
from .regions cimport Regions
from .regions import aligned_zeros
from .replay cimport ATTENTION, CONVERT, EMBED, LINEAR, NORM, POOL, Record, Replay, now, replay_ops
from .step cimport Partition, Step

cdef enum:
    MAX_PARTS = 1 << 24             # parts that the items of an op are divided into

_NO_PAGES = EphemeralPages(0, 0, 1, 2, "f32")       # pages of texts without attention


def scratch_nbytes(workers, ops):
    """Return the bytes of all workers' scratch: each worker's own, which every op uses, and the heads they share."""
    head_dim = _largest_head(ops)
    linears = [(op.weight if isinstance(op, Linear) else op.weights[0], max(1, op.out.group)) for op in ops
               if isinstance(op, (Linear, ExpertLinear, HeadLinear))]
    sizes = [linear_scratch_bytes(padded(weight.in_features), has_minimums(weight), has_half_blocks(weight),
                                  [WEIGHT_CODES[dtype] for _, dtype in weight.ranges], span, weight.group)
             for weight, span in linears]
    if any(isinstance(op, Linear) and op.lora is not None and op.epilogue in GATED for op in ops):
        sizes.append(max(sizes) + ROWS_IN_CACHE * BLOCK * 4)    # results of gate and up, before and after an adapter
    rows = [padded(op.out.columns) for op in ops if isinstance(op, Embed)]
    rows += [padded(op.input.columns) for op in ops
             if isinstance(op, NormRows) or isinstance(op, Convert) and op.order is not None]
    num_experts = max((op.routing.num_experts for op in ops if isinstance(op, RouteRows)), default=0)
    values_in_keys = max((op.rank for op in ops if isinstance(op, LatentAttention)), default=0)
    own = aligned(max(attention_scratch_bytes(head_dim, values_in_keys), max(sizes, default=0),
                      max(rows, default=0) * 4, grouping_scratch_bytes(num_experts)))
    return workers * (own + attention_shared_bytes(head_dim))


def _largest_head(ops):
    """Return the elements of the largest head, padded to whole blocks."""
    sizes = [op.head_dim for op in ops if isinstance(op, (Attention, EphemeralAttention))]
    sizes += [op.rank + op.rotary_dim for op in ops if isinstance(op, LatentAttention)]
    return padded(max(sizes, default=2))


cdef class Program:
    cdef Replay replay
    cdef quire_tiles tiles
    cdef Pool pool
    cdef Regions regions
    cdef object records, shares, scratch, block_start, unit_start, partition_memory
    cdef Partition *partitions      # one for each kind of heads
    cdef int64_t num_partitions
    cdef int64_t max_rows, max_sequences, max_samples, vocab_size, num_types, num_pages, max_positions
    cdef int64_t given_columns
    cdef object rotary_dims, isa
    cdef LoraTable lora             # adapters, or None
    cdef bint needs_rotary
    cdef bint runs_texts            # 1: whole texts; 0: sequences with pages of a KV cache
    cdef readonly object states     # uint8 [slots, bytes]: the state of a sequence in each slot
    cdef int32_t[::1] slots         # 0, 1, …: the slots of sequences that a step does not name
    cdef int64_t[::1] windows       # window of each layer group
    cdef int32_t[::1] zeros, pages, text_pages, text_ends   # positions, page ids, tables and last rows of texts

    def __init__(self, ops, arena_bytes, kv_memory, kv_layout, num_pages, Pool pool, *, max_rows, max_samples,
                 max_sequences, vocab_size, isa=None, num_states=None, lora=None):
        if len(ops) >= QUIRE_SHARE_OPS:
            raise ValueError(f"a program has at most {QUIRE_SHARE_OPS - 1} ops, not {len(ops)}")
        self.pool = pool
        self.max_rows = max_rows
        self.max_samples = max_samples
        self.max_sequences = max_sequences
        self.vocab_size = vocab_size
        self.num_pages = num_pages
        self.lora = lora
        self.regions = Regions(arena_bytes, self.max_rows)
        self.regions.keep_alive.append(kv_memory)
        pages = None
        self.runs_texts = kv_layout is None
        if self.runs_texts:
            pages = next((op.pages for op in ops if isinstance(op, EphemeralAttention)), _NO_PAGES)
        self._allocate(ops)
        self._allocate_states(state_nbytes(ops), max_sequences if num_states is None else num_states)
        if self.runs_texts:
            self._lay_out_texts(pages)
        else:
            self._lay_out_sequences(kv_memory, kv_layout)
        self._bind(ops, Binder(self.regions, max_rows, max_samples, vocab_size, pool.workers, kv_layout, num_pages,
                               pages, lora))
        self.isa = isa
        self.choose({})
        self.replay.pool = pool.pool

    def choose(self, choices):
        cdef quire_tiles tiles
        mix_levels(self.isa, choices, &tiles)
        self.tiles = tiles
        self.replay.tiles = &self.tiles

    cdef _bind(self, ops, Binder binder):
        binder.partitions = self.partitions
        for index, op in enumerate(ops):
            binder.bind(&self.replay.records[index], op)
        self.replay.num_records = len(ops)
        self.max_positions = binder.max_positions
        self.num_types = binder.num_types
        self.given_columns = binder.given_columns
        self.rotary_dims = binder.rotary_dims
        self.needs_rotary = binder.needs_rotary
        self.num_partitions = len(binder.kinds)
        self.replay.step.stores_first = binder.stores_first

    cdef _allocate(self, ops):
        """Allocate the op records and the workers' scratch: with the arena, all memory of the program."""
        self.records = aligned_zeros(max(1, len(ops)) * sizeof(Record))
        cdef char[::1] records = self.records
        self.replay.records = <Record *>&records[0]
        self.shares = aligned_zeros(self.pool.workers * sizeof(quire_share))
        cdef char[::1] shares = self.shares
        self.replay.shares = <quire_share *>&shares[0]
        self.scratch = aligned_zeros(scratch_nbytes(self.pool.workers, ops))
        cdef char[::1] scratch = self.scratch
        self.replay.step.scratch = &scratch[0]
        self.replay.step.padded_head_dim = _largest_head(ops)
        self.replay.step.scratch_bytes = scratch.shape[0] // self.pool.workers
        self.block_start = np.zeros(self.max_sequences + 1, np.int64)
        cdef int64_t[::1] blocks = self.block_start
        self.replay.step.block_start = &blocks[0]
        self._allocate_partitions(ops)

    cdef _allocate_partitions(self, ops):
        """Allocate a partition for each number of query and KV heads."""
        cdef char[::1] memory
        cdef int64_t[:, ::1] units
        kinds = {(op.num_heads, op.num_kv_heads) for op in ops if isinstance(op, (Attention, EphemeralAttention))}
        kinds |= {(op.num_heads, head_groups(op.num_heads)) for op in ops if isinstance(op, LatentAttention)}
        self.partition_memory = aligned_zeros(max(1, len(kinds)) * sizeof(Partition))
        self.unit_start = np.zeros((max(1, len(kinds)), self.max_sequences + 1), np.int64)
        memory, units = self.partition_memory, self.unit_start
        self.partitions = <Partition *>&memory[0]
        for index in range(len(kinds)):
            self.partitions[index].unit_start = &units[index, 0]

    cdef _allocate_states(self, int64_t nbytes, int64_t slots):
        cdef char[::1] memory
        if nbytes and self.runs_texts:
            raise ValueError("ops with states need sequences, not texts")
        memory = zeros = aligned_zeros(max(1, slots * nbytes))
        self.states = zeros[:slots * nbytes].view(np.uint8).reshape(slots, nbytes)
        self.slots = np.arange(self.max_sequences, dtype=np.int32)
        self.replay.step.states = &memory[0]
        self.replay.step.state_bytes = nbytes

    cdef _lay_out_sequences(self, kv_memory, layout):
        cdef char[::1] memory = kv_memory.view(np.int8)
        if memory.shape[0] < self.num_pages * layout.page_bytes:
            raise ValueError(f"{self.num_pages} pages need {self.num_pages * layout.page_bytes} bytes, "
                             f"the KV memory has {memory.shape[0]}")
        self.windows = np.array(layout.group_windows, np.int64)
        self._lay_out_pages(&memory[0], layout)

    cdef _lay_out_texts(self, pages):
        self.zeros, self.text_ends = np.zeros((2, self.max_sequences), np.int32)
        self.text_pages = np.zeros(self.max_sequences + 1, np.int32)
        self.pages = np.arange(ephemeral_pages(self.max_rows, self.max_sequences), dtype=np.int32)
        self._lay_out_pages(self.regions.data + <int64_t>pages.offset, pages)

    cdef _lay_out_pages(self, char *memory, layout):
        for head_dim in layout.head_dims:
            if not 1 <= head_dim <= QUIRE_MAX_HEAD or head_dim % 2:
                raise ValueError(f"head_dim must be even and at most {QUIRE_MAX_HEAD}, not {head_dim}")
        if layout.page_size not in (16, 32, 64):
            raise ValueError(f"a page holds 16, 32 or 64 tokens, not {layout.page_size}")
        self.replay.step.kv = memory
        self.replay.step.page_bytes = layout.page_stride
        self.replay.step.page_size = layout.page_size
        self.replay.step.kv_dtype = KV_CODES[layout.dtype]

    def run(self, const int32_t[::1] token_ids, const int32_t[::1] row_start, const int32_t[::1] first_position,
            const int32_t[::1] page_ids, const int32_t[::1] page_start, const int32_t[::1] sample_rows,
            const int32_t[::1] given_of=None, const float[:, ::1] given=None, const float[:, ::1] rotary=None,
            const int32_t[::1] last_seen=None, const int32_t[::1] state_slots=None, first=0, end=None,
            const int32_t[::1] adapters=None):
        cdef Step *step = &self.replay.step
        if self.runs_texts:
            raise ValueError("this program runs texts")
        end = self._end_of(first, end)
        self._check_step(token_ids, row_start, first_position, page_ids, page_start, sample_rows)
        self._give(step, token_ids.shape[0], given_of, given)
        self._give_rotary(step, token_ids.shape[0], rotary)
        self._see(step, row_start, first_position, last_seen)
        self._set_slots(step, first_position.shape[0], state_slots)
        self._set_adapters(step, token_ids.shape[0], adapters)
        step.rows = token_ids.shape[0]
        step.sequences = first_position.shape[0]
        step.samples = sample_rows.shape[0]
        step.token_ids = &token_ids[0]
        step.row_start = &row_start[0]
        step.first_position = &first_position[0]
        step.page_ids = &page_ids[0]
        step.page_start = &page_start[0]
        step.sample_rows = &sample_rows[0] if step.samples else NULL
        step.type_ids = NULL
        step.first_part = 0
        step.end_part = step.parts = 1
        self._run(first, end)

    def run_texts(self, const int32_t[::1] token_ids, const int32_t[::1] row_start, const int32_t[::1] type_ids=None,
                  first=0, end=None, const float[:, ::1] rotary=None, part=(0, 1, 1)):
        cdef Step *step = &self.replay.step
        cdef int64_t i
        if not self.runs_texts:
            raise ValueError("this program runs sequences with pages of a KV cache")
        self._check_texts(token_ids, row_start, type_ids)
        self._give_rotary(step, token_ids.shape[0], rotary)
        end = self._end_of(first, end)
        self._set_part(first, end, part)
        step.rows = token_ids.shape[0]
        step.sequences = row_start.shape[0] - 1
        step.samples = step.sequences
        step.token_ids = &token_ids[0]
        step.row_start = &row_start[0]
        step.first_position = &self.zeros[0]
        step.type_ids = &type_ids[0] if type_ids is not None else NULL
        step.given_of = NULL
        step.given = NULL
        step.last_seen = NULL
        step.adapters = NULL
        for i in range(step.sequences):
            self.text_ends[i] = row_start[i + 1] - 1
            self.text_pages[i + 1] = (self.text_pages[i]
                                      + (row_start[i + 1] - row_start[i] + step.page_size - 1) // step.page_size)
        step.page_ids = &self.pages[0]
        step.page_start = &self.text_pages[0]
        step.sample_rows = &self.text_ends[0]
        self._run(first, end)

    cdef int64_t _end_of(self, first, end) except -1:
        """Return the end of a range of ops; without one, the number of all ops."""
        end = self.replay.num_records if end is None else end
        if not 0 <= first <= end <= self.replay.num_records:
            raise ValueError(f"ops {first} to {end} are not a range of the {self.replay.num_records} ops")
        return end

    cdef _set_part(self, int64_t first, int64_t end, part):
        """Set the parts [begin, stop) of the ops' items that the step computes, of `parts` in all."""
        begin, stop, parts = part
        if not 0 <= begin < stop <= parts <= MAX_PARTS:
            raise ValueError(f"{begin} to {stop} are not a range of {parts} parts, of which there are 1 to {MAX_PARTS}")
        if stop - begin < parts and (end - first != 1 or not self._has_parts(&self.replay.records[first])):
            raise ValueError(f"ops {first} to {end} are not one op that has parts")
        self.replay.step.first_part = begin
        self.replay.step.end_part = stop
        self.replay.step.parts = parts

    cdef bint _has_parts(self, const Record *record):
        if record.kind == LINEAR:
            return record.op.linear.groups == NULL
        return record.kind in (ATTENTION, CONVERT, EMBED, NORM, POOL)

    cdef _run(self, int64_t first, int64_t end):
        """Run the ops [first, end) of a step whose inputs are set."""
        cdef int64_t i
        if first == end:
            return
        self._partition(&self.replay.step)
        self.replay.first, self.replay.end = first, end
        for i in range(first, end):
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
        self._check_ids(token_ids)
        for i in range(sequences):
            if (row_start[i + 1] <= row_start[i] or first_position[i] < 0
                    or <int64_t>first_position[i] + row_start[i + 1] - row_start[i] > self.max_positions):
                raise ValueError(f"sequence {i} must run at least one row at positions 0..{self.max_positions - 1}")
        self._check_tables(row_start, first_position, page_ids, page_start)
        for i in range(sample_rows.shape[0]):
            if not 0 <= sample_rows[i] < rows:
                raise ValueError(f"sampling row {sample_rows[i]} is outside the step's {rows}")

    cdef _check_texts(self, const int32_t[::1] token_ids, const int32_t[::1] row_start, const int32_t[::1] type_ids):
        cdef int64_t rows = token_ids.shape[0], texts = row_start.shape[0] - 1, i
        if not 1 <= rows <= self.max_rows or not 1 <= texts <= min(self.max_sequences, self.max_samples):
            raise ValueError(f"{rows} rows of {texts} texts; this program takes 1..{self.max_rows} of "
                             f"1..{min(self.max_sequences, self.max_samples)}")
        if row_start[0] != 0 or row_start[texts] != rows:
            raise ValueError("row_start must run from 0 to the number of rows")
        for i in range(texts):
            if not 1 <= <int64_t>row_start[i + 1] - row_start[i] <= self.max_positions:
                raise ValueError(f"text {i} must have 1..{self.max_positions} tokens")
        self._check_ids(token_ids)
        if type_ids is not None:
            if type_ids.shape[0] != rows:
                raise ValueError(f"{rows} rows need as many type ids, not {type_ids.shape[0]}")
            for i in range(rows):
                if not 0 <= type_ids[i] < self.num_types:
                    raise ValueError(f"type id {type_ids[i]} is outside the {self.num_types} types")

    cdef _give(self, Step *step, int64_t rows, const int32_t[::1] given_of, const float[:, ::1] given):
        """Set the rows that take the place of embeddings: for row i row `given_of[i]` of `given`, none if it is -1."""
        cdef int64_t i
        step.given_of = NULL
        step.given = NULL
        if given_of is None and given is None:
            return
        if given_of is None or given is None or given_of.shape[0] != rows or given.shape[1] != self.given_columns:
            raise ValueError(f"{rows} rows need as many indices of given rows with {self.given_columns} columns")
        for i in range(rows):
            if not -1 <= given_of[i] < given.shape[0]:
                raise ValueError(f"given row {given_of[i]} is outside the {given.shape[0]}")
        if given.shape[0]:
            step.given_of = &given_of[0]
            step.given = &given[0, 0]
            step.given_columns = self.given_columns

    cdef _give_rotary(self, Step *step, int64_t rows, const float[:, ::1] rotary):
        """Set the cosines and sines of each row, in place of the rows of positions."""
        step.rotary = NULL
        if rotary is None:
            if self.needs_rotary:
                raise ValueError("this program has no rotary table: every step needs rotary rows")
            return
        if self.rotary_dims != {rotary.shape[1]} or rotary.shape[0] != rows:
            raise ValueError(f"{rows} rows of heads that are rotated in {sorted(self.rotary_dims)} elements need as "
                             f"many rotary rows, not [{rotary.shape[0]}, {rotary.shape[1]}]")
        step.rotary = &rotary[0, 0]

    cdef _see(self, Step *step, const int32_t[::1] row_start, const int32_t[::1] first_position,
              const int32_t[::1] last_seen):
        """Set the last token that each row sees: the row's own, or the token of a later row of its sequence."""
        cdef int64_t i, row, least, end
        step.last_seen = NULL
        if last_seen is None:
            return
        if last_seen.shape[0] != row_start[first_position.shape[0]]:
            raise ValueError(f"{row_start[first_position.shape[0]]} rows see as many last tokens, "
                             f"not {last_seen.shape[0]}")
        for i in range(first_position.shape[0]):
            least = first_position[i]
            end = <int64_t>first_position[i] + row_start[i + 1] - row_start[i]
            for row in range(row_start[i], row_start[i + 1]):
                least = max(least, <int64_t>first_position[i] + row - row_start[i])
                if not least <= last_seen[row] < end:
                    raise ValueError(f"row {row} sees tokens up to {last_seen[row]}; it may be {least}..{end - 1}: "
                                     "its own or a later one, and no earlier one than the row before")
                least = last_seen[row]
        step.last_seen = &last_seen[0]

    cdef _set_slots(self, Step *step, int64_t sequences, const int32_t[::1] state_slots):
        """Set the slots of the sequences' states, which differ: the given slots, or else slot i for sequence i."""
        cdef int64_t i
        if state_slots is None:
            state_slots = self.slots[:sequences]
        if state_slots.shape[0] != sequences:
            raise ValueError(f"{sequences} sequences need as many state slots, not {state_slots.shape[0]}")
        if step.state_bytes:
            for i in range(sequences):
                if not 0 <= state_slots[i] < self.states.shape[0]:
                    raise ValueError(f"state slot {state_slots[i]} is outside the {self.states.shape[0]}")
            if len(set(state_slots)) < sequences:
                raise ValueError("two sequences have the same state slot")
        step.state_slots = &state_slots[0]

    cdef _set_adapters(self, Step *step, int64_t rows, const int32_t[::1] adapters):
        """Set the slot of each row's adapter, -1 for a row without one."""
        cdef int64_t i, slots = 0 if self.lora is None else self.lora.slots
        step.adapters = NULL
        if adapters is None:
            return
        if adapters.shape[0] != rows:
            raise ValueError(f"{rows} rows need as many slots of adapters, not {adapters.shape[0]}")
        for i in range(rows):
            if not -1 <= adapters[i] < slots:
                raise ValueError(f"slot {adapters[i]} of an adapter is outside the {slots} of this program")
            if adapters[i] >= 0:
                step.adapters = &adapters[0]

    cdef _check_ids(self, const int32_t[::1] token_ids):
        cdef int64_t i
        for i in range(token_ids.shape[0]):
            if not 0 <= token_ids[i] < self.vocab_size:
                raise ValueError(f"token id {token_ids[i]} is outside the vocabulary of {self.vocab_size}")

    cdef _check_tables(self, const int32_t[::1] row_start, const int32_t[::1] first_position,
                       const int32_t[::1] page_ids, const int32_t[::1] page_start):
        """Check that each table covers all tokens, without -1 from the first tile on that the first row sees."""
        cdef int64_t sequences = first_position.shape[0], size = self.replay.step.page_size
        cdef int64_t window, group, i, table, page, pages, first, seen, end
        for group in range(self.windows.shape[0]):
            window = self.windows[group]
            for i in range(sequences):
                first = first_position[i]
                table = page_start[group * sequences + i]
                pages = page_start[group * sequences + i + 1] - table
                end = first + row_start[i + 1] - row_start[i]
                if pages * size < end or table + pages > page_ids.shape[0]:
                    raise ValueError(f"sequence {i} has {pages} pages for {end} tokens")
                seen = max(<int64_t>0, first - window + 1) // QUIRE_TILE * QUIRE_TILE // size if window else 0
                for page in range(pages):
                    if not (0 if page >= seen else -1) <= page_ids[table + page] < self.num_pages:
                        raise ValueError(f"page {page_ids[table + page]} is outside the pool of {self.num_pages}")

    cdef void _partition(self, Step *step) noexcept nogil:
        """Count the units of attention before each sequence: pages to store, then query tiles or splits."""
        cdef int64_t i, n, first, index, size = step.page_size
        cdef Partition *partition
        step.block_start[0] = 0
        for i in range(step.sequences):
            first = step.first_position[i]
            n = step.row_start[i + 1] - step.row_start[i]
            step.block_start[i + 1] = step.block_start[i]
            if n > 1 or step.stores_first:      # a single row may be stored where it attends
                step.block_start[i + 1] += (first + n - 1) // size - first // size + 1
        for index in range(self.num_partitions):
            partition = &self.partitions[index]
            partition.by_split = partitions_by_split(step, partition.num_kv_heads, self.pool.workers)
            partition.unit_start[0] = 0
            for i in range(step.sequences):
                partition.unit_start[i + 1] = partition.unit_start[i] + num_units(step, i, partition)

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
