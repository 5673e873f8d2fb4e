from libc.stdint cimport int64_t

from .attention cimport AttentionOp
from .heads cimport HeadsOp
from .isa cimport quire_head
from .linear cimport LinearOp
from .lora cimport LoraTable
from .pack cimport PackedMatrix, Panels
from .regions cimport Regions
from .replay cimport Record
from .step cimport Partition, Slot, Value

cdef class Binder:
    cdef Regions regions
    cdef object kv_layout           # layout of the KV cache, or None
    cdef object pages               # EphemeralPages, or None
    cdef int64_t max_rows, max_samples, vocab_size, workers
    cdef int64_t max_positions      # longest sequence
    cdef int64_t num_types          # token types of the model
    cdef int64_t num_pages
    cdef Partition *partitions      # one for each kind of heads
    cdef object kinds               # (query heads, KV heads) -> index of their partition
    cdef bint stores_first          # groups of query heads share the keys of latent attention
    cdef int64_t given_columns      # floats of a given row: a new embedding, then numbers that are added
    cdef object rotary_dims         # elements of a head that are rotated, of the ops that rotate
    cdef LoraTable lora             # adapters of the program, or None
    cdef bint needs_rotary          # an op has no table: every step gives the rows

    cdef bind(self, Record *record, op)
    cdef _add_embed(self, Record *record, op)
    cdef Slot _slot(self, group, layer, window, heads, values_in_keys) except *
    cdef bint _learned(self, Panels *panels, PackedMatrix table, PackedMatrix weight) except -1
    cdef _add_convert(self, Record *record, op)
    cdef _add_add_norm(self, Record *record, op)
    cdef _add_gate_rows(self, Record *record, op)
    cdef _add_add_given(self, Record *record, op)
    cdef _add_norm(self, Record *record, op)
    cdef _add_pool(self, Record *record, op)
    cdef _add_linear(self, Record *record, op)
    cdef _add_lora(self, LinearOp *linear, op)
    cdef _add_lora_shrink(self, Record *record, op)
    cdef _add_counts(self, LinearOp *linear, group, groups)
    cdef _add_expert_linear(self, Record *record, op)
    cdef _add_head_linear(self, Record *record, op)
    cdef _add_product(self, LinearOp *linear, op, weights, biases, rows, groups)
    cdef _add_route(self, Record *record, op)
    cdef _add_dispatch(self, Record *record, op)
    cdef _add_combine(self, Record *record, op)
    cdef Value _logits(self, region, routing) except *
    cdef _add_maxima(self, LinearOp *linear, op, rows)
    cdef _add_linear_input(self, LinearOp *linear, source, PackedMatrix weight, rows)
    cdef _add_heads(self, HeadsOp *heads, op, group, norms_rows, gated, stores, values_are_keys, v_norm, head_norm)
    cdef _add_query_scales(self, HeadsOp *heads, const float[::1] scales)
    cdef int64_t _add_rotary(self, HeadsOp *heads, op) except -1
    cdef quire_head _head(self, op, norm, heads, rotary_dim, scale, head_norm, next) except *
    cdef _add_attention(self, Record *record, op)
    cdef _add_ephemeral_attention(self, Record *record, op)
    cdef _add_latent_attention(self, Record *record, op)
    cdef _add_bias(self, AttentionOp *attention, op)
    cdef _add_heads_and_output(self, AttentionOp *attention, op, norms_rows, gated, stores=*, values_are_keys=*,
                               v_norm=*, head_norm=*)
    cdef const Partition *_partition(self, num_kv_heads, group) except NULL
