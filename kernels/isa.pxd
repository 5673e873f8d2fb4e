# C declarations of simd/tiles.h, and tables of functions: of a level by name, and of several levels.
from libc.stdint cimport int8_t, int32_t, int64_t, uint16_t

cdef extern from "simd/tiles.h" nogil:
    enum:
        QUIRE_LANES
        QUIRE_BLOCK
        QUIRE_TILE
        QUIRE_MAX_HEAD
        QUIRE_MAX_EXPERTS
        QUIRE_F32
        QUIRE_BF16
        QUIRE_Q8
        QUIRE_Q4
        QUIRE_Q4_K
        QUIRE_Q5_K
        QUIRE_Q6_K
        QUIRE_MXFP4
        QUIRE_Q4_Z
        QUIRE_DTYPES
        QUIRE_F16
        QUIRE_KV_DTYPES
        QUIRE_SUPER_BLOCK
        QUIRE_STORE
        QUIRE_ADD
        QUIRE_GELU
        QUIRE_GELU_TANH
        QUIRE_RELU
        QUIRE_TANH
        QUIRE_RELU_SQUARED
        QUIRE_SWIGLU
        QUIRE_GEGLU
        QUIRE_CLAMPED
        QUIRE_GEGLU_EXACT
        QUIRE_LAYER_NORM
        QUIRE_RMS_NORM
        QUIRE_L2_NORM
        QUIRE_LEVELS
        QUIRE_ROW_CLASSES
        QUIRE_ENDS
        QUIRE_MAX_TAPS
        QUIRE_MAX_KEY
        QUIRE_SEGMENT
        QUIRE_TOKENS

    ctypedef struct quire_rows:
        void *data
        float *scales
        int32_t *sums
        int64_t width
        int64_t group

    ctypedef struct quire_output:
        int dtype
        quire_rows rows
        const float *norm
        float *squares
        int64_t squares_width

    ctypedef struct quire_block_sums:
        float unit

    ctypedef struct quire_linear_tile:
        const void *w
        void *scratch
        const uint16_t *scales
        int64_t panel_bytes
        quire_rows a
        const void *packed
        const quire_block_sums *block_sums
        const int32_t *half_sums
        const float *factors
        const float *bias
        const char *next
        int next_lines
        const char *next_scales
        float *c
        int64_t ldc
        int epilogue

    ctypedef struct quire_attention_tile:
        quire_rows q
        const int64_t *oldest
        const int64_t *newest
        float softcap
        const float **bias
        int64_t first_token
        int64_t head_dim
        int64_t value_dim
        const void *k[4]
        const uint16_t *k_scales[4]
        const void *v[4]
        const float *v_scales[4]
        int num_pages
        int page_size
        const char *next[4]
        int num_next_pages
        int64_t next_bytes
        float *m
        float *l
        float *s
        void *p
        float *o

    ctypedef struct quire_page:
        int dtype
        int64_t size
        int64_t d
        int64_t shared
        void *k
        void *v
        uint16_t *k_scales
        float *v_scales

    ctypedef struct quire_head:
        int64_t head_dim
        int64_t rotary_dim, rotary_distance
        const float *norm
        float eps
        float factor
        float scale
        bint centered
        bint norm_last
        int64_t ahead
        int64_t next

    ctypedef struct quire_linear:
        void (*multiply)(int rows, const quire_linear_tile *t) noexcept nogil
        int rows
        void (*pack)(const quire_rows *a, int rows, void *out) noexcept nogil

    ctypedef struct quire_convolution:
        int64_t columns
        int64_t part
        int64_t taps
        const float *weight
        const float *bias
        float *ring
        int64_t rows
        int64_t stride
        bint is_normed
        float eps

    ctypedef struct quire_recurrence:
        int64_t key_dim
        int64_t columns
        int64_t width
        bint is_delta
        bint is_bf16
        float a
        float bias
        float low
        float high
        float rate_scale
        float scale
        float skip
        const char *ahead
        int64_t ahead_bytes

    ctypedef struct quire_recurrent_token:
        const float *key
        const float *query
        const float *value
        float decay
        float rate
        float *out

    ctypedef struct quire_gated_norm:
        int64_t columns
        int64_t group
        const float *weight
        float eps
        bint gate_first

    ctypedef struct quire_router:
        int64_t experts
        int64_t chosen
        int64_t groups
        int64_t kept_groups
        const float *bias
        bint sigmoid
        bint normalized
        float eps
        float scale

    ctypedef struct quire_tiles:
        const char *name
        quire_linear linear[QUIRE_DTYPES][QUIRE_ROW_CLASSES]
        void (*sum_blocks)(const quire_rows *a, int64_t rows, quire_block_sums *out) noexcept nogil
        void (*sum_halves)(const quire_rows *a, int64_t rows, int32_t *out) noexcept nogil
        void (*attention[QUIRE_KV_DTYPES][QUIRE_ROW_CLASSES])(int rows, const quire_attention_tile *t) noexcept nogil
        void (*merge)(int rows, int64_t head_dim, const float *m, const float *l, const float *o,
                      float *total_m, float *total_l, float *total_o) noexcept nogil
        void (*convert)(const float *x, int64_t stride, int64_t rows, int64_t columns, const quire_output *out,
                        int64_t row, int64_t column) noexcept nogil
        void (*rotate)(const float *x, int64_t columns, int64_t group, float *out) noexcept nogil
        void (*rotate_back)(float *x, int64_t width, int64_t group) noexcept nogil
        void (*rms_factors)(const float *squares, int64_t width, int64_t rows, int64_t columns, float eps,
                            float *factors) noexcept nogil
        float (*inverse_rms)(const float *x, float eps, int64_t n) noexcept nogil
        void (*add_norm)(const float *y, const float *weight, float eps, int64_t columns, float *x) noexcept nogil
        void (*norm_row)(int kind, const float *x, const float *weight, const float *bias, float eps, int64_t columns,
                         float *out) noexcept nogil
        void (*mean_rows)(const float *x, int64_t stride, int64_t rows, int64_t columns, float *out) noexcept nogil
        void (*activate)(int epilogue, float *x, int64_t n) noexcept nogil
        void (*add_columns)(float *y, int64_t rows, float *out, int64_t stride) noexcept nogil
        void (*soft_cap)(float *x, int64_t n, float cap) noexcept nogil
        void (*add_low_rank)(int dtype, int64_t rows, const float *x, int64_t stride, const void *w, int64_t k,
                             float *y, int64_t ldy) noexcept nogil
        void (*gate_columns)(int epilogue, const float *x, int64_t rows, float *y, int64_t stride) noexcept nogil
        void (*gate)(const float *gates, int64_t n, float *x) noexcept nogil
        void (*head)(const float *x, const quire_head *h, const float *rotary, float *out) noexcept nogil
        void (*store_key)(const float *x, int64_t slot, const quire_page *page) noexcept nogil
        void (*store_value)(const float *x, int64_t slot, const quire_page *page) noexcept nogil
        void (*values_of_keys)(const quire_page *page, int64_t columns, int64_t tokens, void *v,
                               float *scales) noexcept nogil
        void (*to_bf16)(const float *x, int64_t n, uint16_t *out) noexcept nogil
        void (*unpack_column)(const void *panel, const uint16_t *scales, int dtype, int64_t group, int64_t width,
                              int lane, float *out) noexcept nogil
        void (*quantize_q4)(const float *w, uint16_t *scales, void *block) noexcept nogil
        void (*block_maxima)(const float *x, int64_t stride, int64_t rows, int64_t columns, float *maxima,
                             int64_t maxima_stride) noexcept nogil
        int64_t (*argmax)(const float *x, int64_t n, float *max) noexcept nogil
        double (*sum_exp)(const float *x, int64_t n, float shift) noexcept nogil
        void (*exp_scaled)(const float *x, float shift, float scale, int64_t n, float *out) noexcept nogil
        void (*set_forbidden)(const int32_t *mask, int64_t words, float value, float *x) noexcept nogil
        void (*route)(const quire_router *r, const float *logits, int32_t *indices, float *weights) noexcept nogil
        void (*combine)(const float *y, int64_t stride, const int32_t *places, const float *weights, int64_t chosen,
                        int64_t columns, float *out) noexcept nogil
        void (*convolve)(const quire_convolution *c, const float *x, int64_t position, float *out) noexcept nogil
        void (*recurrent_gates)(const quire_recurrence *r, float *decay, float *rate) noexcept nogil
        void (*recur)(const quire_recurrence *r, const quire_recurrent_token *t, int64_t tokens, const void *start,
                      void *to) noexcept nogil
        void (*gated_norm)(const quire_gated_norm *n, const float *gate, float *x) noexcept nogil
        float (*stream)(const char *p, int64_t bytes, int64_t ahead) noexcept nogil
        int64_t (*peak)(int dtype, int64_t steps, const void *w, const void *a, float *result) noexcept nogil
        void (*ends[QUIRE_ENDS])() noexcept nogil

    int quire_row_class(int64_t rows)
    int64_t quire_itemsize(int dtype)
    int quire_query_dtype(int kv_dtype)
    int quire_kv_index(int kv_dtype)
    int64_t quire_panel_bytes(int dtype, int64_t width)
    int64_t quire_num_scales(int64_t width, int64_t group)
    int64_t quire_unpacked_bytes(int dtype, int64_t width)
    int64_t quire_packed_bytes(int dtype, int64_t width, int64_t group, int64_t rows)
    const char *quire_isa_obstacle(int level)
    const quire_tiles *quire_isa_tiles(int level)

cdef const quire_tiles *tiles_of(object level) except NULL
cdef int mix_levels(object level, object choices, quire_tiles *out) except -1
