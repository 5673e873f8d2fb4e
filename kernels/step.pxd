# The inputs of one step that all ops share: rows, their sequences, and the pages. Ops only read it.
from libc.stdint cimport int32_t, int64_t, uint16_t

from .isa cimport QUIRE_Q8, quire_page, quire_rows

# How the attention of layers with the same heads is divided in a step.
cdef struct Partition:
    int64_t num_kv_heads
    int64_t query_tile              # queries of one attention tile: 64 / (query heads per KV head)
    bint by_split                   # splits of decoding sequences are units of work
    int64_t *unit_start             # [sequences + 1]: units of attention, before each sequence


# The place of a layer's keys and values in the pages of its layer group.
cdef struct Slot:
    int64_t layer_group             # selects the page tables
    int64_t offset                  # bytes from the first page of the pool
    int64_t head_bytes              # K and V of one head
    int64_t padded_head_dim
    int64_t values_in_keys          # leading elements of a key that are also its value; 0: a page has values too


cdef struct Step:
    int64_t rows                    # scheduled tokens
    int64_t samples
    int64_t sequences
    int64_t first_part, end_part, parts     # parts [first_part, end_part) of the items of each op; 0, 1, 1: all
    const int32_t *token_ids        # [rows]
    const int32_t *type_ids         # [rows] of texts; NULL: all 0
    const int32_t *given_of         # [rows]: row of `given` that takes the place of the token's embedding; -1: none
    const float *given              # [given rows, given_columns]; NULL like given_of: no row has one
    int64_t given_columns           # floats of the embedding, then floats for each `AddGiven`
    const float *rotary             # [rows][rotary_dim]: cos | sin of each row; NULL: those of its position in a table
    const int32_t *last_seen        # [rows]: position of the last token that a row sees; NULL: its own
    const int32_t *adapters         # [rows]: slot of each row's adapter; -1: none; NULL: no row has one
    const int32_t *row_start        # [sequences + 1]
    const int32_t *first_position   # [sequences]
    const int32_t *page_start       # [layer groups * sequences + 1], into page_ids: one group's tables after another's
    const int32_t *page_ids
    const int32_t *sample_rows      # [samples]
    int64_t *block_start            # [sequences + 1]: pages to store by chunks of several rows, before each sequence
    bint stores_first               # keys of single rows are stored before any row attends, as those of chunks
    char *kv                        # pages; a layer's part of one is [kv_head]{K, V}, or {K} of latents
    int64_t page_bytes              # distance of a layer's part of a page from its part of the next page
    int64_t padded_head_dim         # size of the widest heads
    int page_size
    int kv_dtype
    char *states                    # [slot][state_bytes]
    int64_t state_bytes
    const int32_t *state_slots      # [sequences]
    char *scratch                   # per worker
    int64_t scratch_bytes


cdef inline int64_t first_item(const Step *step, int64_t items) noexcept nogil:
    """Return the first one of an op's `items` that the step computes."""
    return items * step.first_part // step.parts


cdef inline int64_t end_item(const Step *step, int64_t items) noexcept nogil:
    """Return the end of an op's `items` that the step computes."""
    return items * step.end_part // step.parts


cdef inline const int32_t *table_of(const Step *step, int64_t layer_group, int64_t sequence) noexcept nogil:
    """Return a sequence's page ids; -1 for a released page, which no row of the step can see."""
    return step.page_ids + step.page_start[layer_group * step.sequences + sequence]


cdef inline quire_page page_at(const Step *step, const Slot *slot, int64_t page_id, int64_t head) noexcept nogil:
    """Return one KV head of one page: K, then V unless values are in the keys; for int8, then their scales."""
    cdef quire_page page
    cdef int64_t elements = step.page_size * slot.padded_head_dim
    cdef int64_t all = elements if slot.values_in_keys else 2 * elements
    cdef char *base = step.kv + slot.offset + page_id * step.page_bytes + head * slot.head_bytes
    page.dtype, page.size, page.d, page.k = step.kv_dtype, step.page_size, slot.padded_head_dim, base
    page.shared = slot.values_in_keys
    if step.kv_dtype == QUIRE_Q8:
        page.v = base + elements
        page.k_scales = <uint16_t *>(base + all)
        page.v_scales = <float *>(base + all + elements // 16)
    else:
        page.v = base + slot.head_bytes // 2
        page.k_scales, page.v_scales = NULL, NULL
    return page


# The pointers of an arena region; set once when a program is built.
cdef struct Value:
    quire_rows rows                 # data, and the q8 planes
    int dtype
    int64_t columns
