// The table of functions that each ISA level fills: the innermost arithmetic of every op, over 16-lane tiles.
// The loops in ../*.pyx choose panel, page, head and row; these functions are independent of requests and threads.
// Invariant (promise 1): an output element is one sequential chain over K, for every row count of the call.
#pragma once
#include <stdint.h>

enum { QUIRE_LANES = 16, QUIRE_BLOCK = 32, QUIRE_TILE = 64, QUIRE_MAX_HEAD = 1024, QUIRE_MAX_EXPERTS = 1024 };
enum { QUIRE_LINE = 64 };  // bytes of a line: 4 for each lane
enum { QUIRE_MOST_GROUP = 4 };  // blocks of 32 that may share a scale in q8
// Dtypes of weights; the first three are also dtypes of activations. The code of a k-quant is its number of bits.
enum { QUIRE_F32 = 0, QUIRE_BF16 = 1, QUIRE_Q8 = 2, QUIRE_Q4 = 3 };
enum { QUIRE_Q4_K = 4, QUIRE_Q5_K = 5, QUIRE_Q6_K = 6, QUIRE_MXFP4 = 7, QUIRE_Q4_Z = 8, QUIRE_DTYPES = 9 };
// Dtypes of the KV cache are f32, bf16, q8 (int8), and f16, whose keys and values are widened to f32 when they are read.
enum { QUIRE_F16 = 9, QUIRE_KV_DTYPES = 4 };
// Epilogues: from GELU on, functions of each result; from SWIGLU on, functions of pairs of results.
enum { QUIRE_STORE = 0, QUIRE_ADD = 1, QUIRE_GELU = 2, QUIRE_GELU_TANH = 3, QUIRE_RELU = 4, QUIRE_TANH = 5 };
enum { QUIRE_RELU_SQUARED = 6, QUIRE_SWIGLU = 7, QUIRE_GEGLU = 8, QUIRE_CLAMPED = 9, QUIRE_GEGLU_EXACT = 10 };
enum { QUIRE_LAYER_NORM = 0, QUIRE_RMS_NORM = 1, QUIRE_L2_NORM = 2 };

static inline __attribute__((always_inline)) int64_t quire_itemsize(const int dtype) {
  return dtype == QUIRE_F32 ? 4 : dtype == QUIRE_BF16 || dtype == QUIRE_F16 ? 2 : 1;
}
// The dtype of queries and softmax weights that are multiplied by pages of a KV dtype.
static inline __attribute__((always_inline)) int quire_query_dtype(const int kv_dtype) {
  return kv_dtype == QUIRE_F16 ? QUIRE_F32 : kv_dtype;
}
// The place of a KV dtype in the table's functions of attention.
static inline int quire_kv_index(const int kv_dtype) { return kv_dtype == QUIRE_F16 ? 3 : kv_dtype; }
// A super-block is 256 of K in a panel of a k-quant, in lines of 64 bytes, 4 of each column except for scales:
//   fp16 d [16], then fp16 scales of minimums [16] (q6_k: not used);
//   12 bytes of 6-bit scales and minimums, packed as GGML packs them (q6_k: 16 signed bytes, a scale for each 16 of K),
//   each byte of 16 columns side by side;
//   for each 32 of K the low 4 bits as in q4, then the higher bits of K = 4i + j in byte j, and of K = 16 + 4i + j:
//   q5_k bit i, and bit 4 + i, of one line; q6_k bits 2i and 2i + 1 of one line, and of another.
enum { QUIRE_SUPER_BLOCK = 256 };
static inline __attribute__((always_inline)) int64_t quire_scale_lines(const int dtype) {
  return dtype == QUIRE_Q6_K ? 5 : 4;
}
static inline __attribute__((always_inline)) int64_t quire_super_block_bytes(const int dtype) {
  return (quire_scale_lines(dtype) + 8 * dtype) * 64;
}

// A panel of mxfp4 begins with its exponents, a byte for each 32 of K and column, padded to whole lines; then codes as in q4.
static inline __attribute__((always_inline)) int64_t quire_mxfp4_scale_bytes(const int64_t width) {
  return (width / 2 + 63) / 64 * 64;
}

// A panel of q4_z begins with fp16 scales [width / 32][16] and bytes with zero points [width / 32][16], padded to whole lines.
static inline __attribute__((always_inline)) int64_t quire_q4_z_scale_bytes(const int64_t width) {
  return (width * 3 / 2 + 63) / 64 * 64;
}

// Bytes of a panel: 16 columns and `width` of K, without the scales of q8 and q4.
static inline __attribute__((always_inline)) int64_t quire_panel_bytes(const int dtype, const int64_t width) {
  if (dtype == QUIRE_MXFP4) return quire_mxfp4_scale_bytes(width) + width * 8;
  if (dtype == QUIRE_Q4_Z) return quire_q4_z_scale_bytes(width) + width * 8;
  if (dtype >= QUIRE_Q4_K) return width / QUIRE_SUPER_BLOCK * quire_super_block_bytes(dtype);
  return dtype == QUIRE_Q4 ? width * 8 : width * 16 * quire_itemsize(dtype);
}

// A super-block of one panel of q4_k or q6_k, unpacked for many rows; `least` has the factors of its minimums.
typedef struct {
  uint8_t weights[8][512];  // weights of each block of 32: q8 without its offset of 128
  float scales[16][16];     // scales of blocks, 8; in q6_k, of half blocks
  float least[16];
  uint32_t minimums[4][16];  // pairs of 16 bits: of blocks 0 and 2, 1 and 3, 4 and 6, 5 and 7
} quire_unpacked;

// Bytes of a panel that is unpacked for many rows: q4 becomes q8.
static inline int64_t quire_unpacked_bytes(const int dtype, const int64_t width) {
  if (dtype == QUIRE_Q4) return quire_panel_bytes(QUIRE_Q8, width);
  const int is_unpacked = dtype == QUIRE_Q4_K || dtype == QUIRE_Q6_K;
  return is_unpacked ? width / QUIRE_SUPER_BLOCK * (int64_t)sizeof(quire_unpacked) : 0;
}

// Activations of one dtype: [rows][width], width a multiple of 32, padding zero.
typedef struct {
  void *data;       // f32 | bf16 | int8
  float *scales;    // q8: [rows][width/32], numbers with two bits of mantissa, 0 or NaN
  int32_t *sums;    // q8: [rows][width/32], -128 * sum of the block
  int64_t width;
  int64_t group;    // q8: from 1 on, columns are rotated, and `group` blocks share a scale, any number, and a sum, which
                    // stand at the first of them; the last group has the blocks that are left
} quire_rows;

// Bytes of `rows` rows as a function `pack` of any level orders them.
static inline int64_t quire_packed_bytes(const int dtype, const int64_t width, const int64_t group, const int64_t rows) {
  const int64_t all = (rows + 15) / 16 * 16, blocks = width / 32;
  if (dtype == QUIRE_BF16) return all * width * 2;
  if (group <= 1) return all * (width + 8 * blocks);  // scales and sums, too
  const int64_t rest = blocks % group, of_group = 64 * ((group + 1) / 2) + 8;
  return all * (blocks / group * of_group + (rest ? 64 * ((rest + 1) / 2) + 8 : 0));
}

// Scales of one column of a q8 panel: of blocks, or of groups of them.
static inline __attribute__((always_inline)) int64_t quire_num_scales(const int64_t width, const int64_t group) {
  return group > 1 ? (width / 32 + group - 1) / group : width / 32;
}

// The destination of f32 results: converted to `dtype`; with `norm`, prepared for the linear layer after an RMS norm.
typedef struct {
  int dtype;
  quire_rows rows;
  const float *norm;      // [width]: each column's factor; or NULL
  float *squares;         // [rows][squares_width], for norms: sum(x^2) of each block of 32 columns
  int64_t squares_width;
} quire_output;

// Factors of a super-block's minimums: -sum(a) * scale of each block of activations, as integers of one unit.
typedef struct {
  int16_t pairs[4][2];  // pairs of blocks: 0 and 2, 1 and 3, 4 and 6, 5 and 7
  float unit;           // a power of two
} quire_block_sums;

// `rows` rows times one pair of 16-column panels. `a` points at the first row.
typedef struct {
  const void *w;           // first panel; the second follows `panel_bytes` later
  const uint16_t *scales;  // q8, q4: fp16 [quire_num_scales][16] of the first panel; those of the second follow
  int64_t panel_bytes;
  void *scratch;           // q4, q4_k, q6_k: for the unpacked pair of panels
  quire_rows a;
  const void *packed;      // all rows of the call, packed; NULL if the function has no `pack`
  const quire_block_sums *block_sums;  // q4_k, q5_k: [rows][width / 256]
  const int32_t *half_sums;  // q6_k: [rows][width / 32], -32 * sum of the first half of each block
  const float *factors;    // [rows], multiply each row's sums; or NULL
  const float *bias;       // [32] or NULL
  const char *next;        // prefetched into L2 in the meantime, `next_lines` cache lines per 32 of K; or NULL
  int next_lines;
  const char *next_scales;  // q8, q4: scales of the next pair, prefetched too; or NULL
  float *c;                // first output column of the pair; from SWIGLU on the pair yields 16 columns
  int64_t ldc;             // floats
  int epilogue;
} quire_linear_tile;

// One tile of 64 tokens for `rows` query rows that share a KV head, inside one split of 256 tokens.
typedef struct {
  quire_rows q;              // [rows][head_dim] in the query dtype; for int8 with scales and sums per 32 of head_dim
  const int64_t *oldest;     // [rows], ascending: the first token that the row sees
  const int64_t *newest;     // [rows], ascending: the last token that the row sees
  float softcap;             // softcap of the scores; 0: none
  const float **bias;        // [rows]: the 64 numbers that are added to the scores of a row; or NULL
  int64_t first_token;       // absolute position of the tile, a multiple of 64
  int64_t head_dim;          // padded to 16; for int8 to 32
  int64_t value_dim;         // the same for values
  const void *k[4];          // K of 16 tokens each: bf16 [d/2][16][2], f32 and f16 [d][16], int8 [d/4][16][4] unsigned
  const uint16_t *k_scales[4];  // int8: fp16 [d/32][16]
  const void *v[4];          // V of each page in the tile: bf16 [d/16][page/2][16][2], f32 and f16 [d/16][page][16],
                             // int8 [d/16][page/4][16][4] unsigned
  const float *v_scales[4];  // int8: of 16 tokens each
  int num_pages, page_size;  // v[0 .. num_pages); the sequence may end inside the last page
  const char *next[4];       // prefetched in the meantime: the pages of the next tile, one KV head of each
  int num_next_pages;
  int64_t next_bytes;        // bytes of each next page
  float *m, *l;              // [rows] running maximum and sum of the split
  float *s;                  // scratch [64][64] f32
  void *p;                   // scratch [64][64] in the query dtype; for int8 two of them: high and low digits
  float *o;                  // [rows][value_dim] running output of the split
} quire_attention_tile;

// One KV head of one page.
typedef struct {
  int dtype;
  int64_t size;        // tokens
  int64_t d;           // head_dim, padded
  int64_t shared;      // int8: the first elements of a key, whole blocks of 32, that have one scale; 0: none
  void *k, *v;
  uint16_t *k_scales;  // int8: fp16 [t/16][d/32][16]
  float *v_scales;     // int8: [t]
} quire_page;

typedef struct {
  int64_t head_dim;
  int64_t rotary_dim;       // elements that are rotated; even, 0: none
  int64_t rotary_distance;  // distance of the second half of them from the first, which starts the head
  const float *norm;   // [head_dim padded to 16], or NULL
  float eps;
  float factor;        // the norm's 1 / rms if the norm is over the whole row; 0: the head is normed alone
  float scale;
  int centered;        // the norm subtracts the mean of the head first: a LayerNorm
  int norm_last;       // the norm is after the rotation
  int64_t ahead;       // floats to the head of a later row, which is prefetched
  int64_t next;        // floats to another head of the same row, which is prefetched too
} quire_head;

enum { QUIRE_END_OF_AMX = 0, QUIRE_END_OF_TWIN = 1, QUIRE_ENDS = 2 };

// Classes of row counts, for each of which a program may have other functions: 1, 2 to 7, 8 to 15, 16 to 36, and more.
enum { QUIRE_ROW_CLASSES = 5 };
static inline int quire_row_class(const int64_t rows) { return (rows > 1) + (rows > 7) + (rows > 15) + (rows > 36); }

typedef struct {
  void (*multiply)(int rows, const quire_linear_tile *t);
  int rows;  // the most rows of a call
  void (*pack)(const quire_rows *a, int rows, void *out);  // The function reads packed rows; NULL: it reads `a`.
} quire_linear;

enum { QUIRE_MAX_TAPS = 16, QUIRE_MAX_KEY = 256, QUIRE_SEGMENT = 64, QUIRE_TOKENS = 16 };

// Some columns of a convolution: `ring` has the last inputs of a sequence, that of position p in row p % rows.
typedef struct {
  int64_t columns;
  int64_t part;         // floats between the gate of the input, the gate of the output and the value in a row; 0: no gates
  int64_t taps;         // no more than `rows`
  const float *weight;  // [taps][stride], that of the oldest token first
  const float *bias;    // [columns], or NULL
  float *ring;          // [rows][stride]
  int64_t rows, stride;
  int is_normed;        // whether the columns, without gates, are a head that is divided by its length
  float eps;            // added to the sum of squares
} quire_convolution;

// A recurrence of one head, see `LinearRecurrence` in ../ops.py: some value columns, which are independent.
typedef struct {
  int64_t key_dim;         // rows of the matrix, at most QUIRE_MAX_KEY
  int64_t columns, width;  // columns of values, and of the matrix: a multiple of 16, at most QUIRE_SEGMENT
  int is_delta, is_bf16;   // the gated delta rule, not Mamba-2; the dtype of the matrix, bf16 or f32
  float a, bias, low, high, rate_scale;
  float scale, skip;
  const char *ahead;       // memory that the next call reads, prefetched meanwhile
  int64_t ahead_bytes;     // a multiple of 128
} quire_recurrence;

typedef struct {
  const float *key, *query, *value;  // a token without `out` has no query
  float decay, rate;
  float *out;                        // [columns], or NULL
} quire_recurrent_token;

// A router: see `RouteRows` in ../ops.py.
typedef struct {
  int64_t experts, chosen;      // QUIRE_MAX_EXPERTS is the limit
  int64_t groups, kept_groups;  // 1 group: all experts compete
  const float *bias;            // [experts, padded to whole vectors] added to scores for the choice, or NULL
  int sigmoid, normalized;
  float eps, scale;
} quire_router;

// An RMS norm of each `group` of a row's `columns`, and a gate: see `GatedNorm` in ../ops.py.
typedef struct {
  int64_t columns, group;
  const float *weight;  // [columns], or NULL: no norm
  float eps;
  int gate_first;
} quire_gated_norm;

typedef struct {
  const char *name;
  quire_linear linear[QUIRE_DTYPES][QUIRE_ROW_CLASSES];  // functions for each dtype of weights
  void (*sum_blocks)(const quire_rows *a, int64_t rows, quire_block_sums *out);  // sums of all super-blocks of the rows
  void (*sum_halves)(const quire_rows *a, int64_t rows, int32_t *out);  // out [rows][width / 32], see `half_sums`
  void (*attention[QUIRE_KV_DTYPES][QUIRE_ROW_CLASSES])(int rows, const quire_attention_tile *t);  // see `quire_kv_index`

  // total = merge(total, split); the split's state may be reused afterwards. Where total_l is 0, total_m and total_o may
  // hold anything.
  void (*merge)(int rows, int64_t head_dim, const float *m, const float *l, const float *o,
                float *total_m, float *total_l, float *total_o);
  // Convert x[rows][columns], rows `stride` floats apart, into `out` from (row, column) on; column is a multiple of 32.
  // Columns up to the next multiple of 32 become zero. With groups of blocks, `column` is a multiple of a group's columns.
  void (*convert)(const float *x, int64_t stride, int64_t rows, int64_t columns, const quire_output *out, int64_t row,
                  int64_t column);
  // Rotate a column of weights, x[columns], as `convert` rotates rows for q8 in groups; `out` is padded to 32.
  void (*rotate)(const float *x, int64_t columns, int64_t group, float *out);
  void (*rotate_back)(float *x, int64_t width, int64_t group);    // the inverse, in place; width a multiple of 32
  // factors[rows] = 1 / sqrt(sum(squares) / columns + eps); squares [rows][width] has one sum per block of 32 columns.
  // NaN where the sum is not finite.
  void (*rms_factors)(const float *squares, int64_t width, int64_t rows, int64_t columns, float eps, float *factors);
  // 1 / rms of n elements, in one fixed order; NaN where the sum of squares is not finite.
  float (*inverse_rms)(const float *x, float eps, int64_t n);
  // x += RMS norm of y; both and `weight` have `columns`, and memory up to a multiple of 16.
  void (*add_norm)(const float *y, const float *weight, float eps, int64_t columns, float *x);
  // Norm one row into `out`, which may be x: (x - mean) / sqrt(variance + eps) * weight + bias, x / rms * weight, or
  // x / max(|x|, eps). Both vectors have zeros up to a multiple of 16; NaN where a sum of squares is not finite.
  void (*norm_row)(int kind, const float *x, const float *weight, const float *bias, float eps, int64_t columns,
                   float *out);
  // out[columns] = the mean of the rows, added in order; columns a multiple of 16
  void (*mean_rows)(const float *x, int64_t stride, int64_t rows, int64_t columns, float *out);
  void (*activate)(int epilogue, float *x, int64_t n);            // GELU .. RELU_SQUARED in place; n a multiple of 16
  // out += y, and y = out: 32 columns of some rows, `stride` floats apart in out
  void (*add_columns)(float *y, int64_t rows, float *out, int64_t stride);
  void (*soft_cap)(float *x, int64_t n, float cap);               // x = cap * tanh(x / cap); n a multiple of 16
  // y += x @ w: rows of x are `stride` and rows of y `ldy` floats apart; w is f32 or bf16 [k][16].
  void (*add_low_rank)(int dtype, int64_t rows, const float *x, int64_t stride, const void *w, int64_t k, float *y,
                       int64_t ldy);
  // y = the gated epilogue of 32 columns of x, 16 of gate and 16 of up; rows of y are `stride` floats apart.
  void (*gate_columns)(int epilogue, const float *x, int64_t rows, float *y, int64_t stride);
  // x = x * sigmoid(gate); both have memory up to a multiple of 16.
  void (*gate)(const float *gates, int64_t n, float *x);
  // One head to `out` (head_dim padded to 32): norm if `norm` is given; rotation by halves of the first rotary_dim
  // elements by `rotary` (cos | sin), which may come before the norm; scale. Elements from head_dim on become zero.
  void (*head)(const float *x, const quire_head *h, const float *rotary, float *out);
  // Store one token's head in its slot of a page: K as a column of its panel, V as a row of all panels. The scales of
  // int8 depend on this token alone. `x` is the output of `head`.
  void (*store_key)(const float *x, int64_t slot, const quire_page *page);
  void (*store_value)(const float *x, int64_t slot, const quire_page *page);
  // v = the first `columns` elements of the keys of 16 tokens, as values of a page of `tokens` tokens; columns a multiple of
  // 16. For int8 with the scales of the 16 tokens, which all these columns share.
  void (*values_of_keys)(const quire_page *page, int64_t columns, int64_t tokens, void *v, float *scales);
  void (*to_bf16)(const float *x, int64_t n, uint16_t *out);      // n a multiple of 16
  // One column of a panel as f32 [width]; q8 in groups is still rotated.
  void (*unpack_column)(const void *panel, const uint16_t *scales, int dtype, int64_t group, int64_t width, int lane,
                        float *out);
  // Quantize one block of a q4 panel, w [32][16]: fp16 scales [16] of least squared error, and 256 bytes of the panel.
  void (*quantize_q4)(const float *w, uint16_t *scales, void *block);

  // maxima[i * maxima_stride] = max(x[i * stride ...]) over `columns` <= 32 columns; NaN if one of them is NaN
  void (*block_maxima)(const float *x, int64_t stride, int64_t rows, int64_t columns, float *maxima,
                       int64_t maxima_stride);
  // The lowest index of the largest element; -1 if one is NaN.
  int64_t (*argmax)(const float *x, int64_t n, float *max);
  double (*sum_exp)(const float *x, int64_t n, float shift);      // sum(exp(x - shift))
  // out[i] = exp((x[i] - shift) * scale); n a multiple of 16
  void (*exp_scaled)(const float *x, float shift, float scale, int64_t n, float *out);
  // x[i] = value where bit i of the mask is 0, of 32 * words elements; the lowest bit of a word comes first.
  void (*set_forbidden)(const int32_t *mask, int64_t words, float value, float *x);

  // The `chosen` experts with the largest scores, largest first, of equal ones the lower index first; and their weights.
  // If a logit is NaN, the weights are NaN, and any experts are chosen.
  void (*route)(const quire_router *r, const float *logits, int32_t *indices, float *weights);
  // out[columns] += the sum of weights[i] * y[places[i] * stride ...], in that order; columns a multiple of 16
  void (*combine)(const float *y, int64_t stride, const int32_t *places, const float *weights, int64_t chosen,
                  int64_t columns, float *out);

  // out[columns] = the output gate * (bias + the weighted inputs of the last tokens), after the input of the row x at
  // `position`, the input gate * the value, is in the ring. Without gates, SiLU takes the place of the output gate.
  void (*convolve)(const quire_convolution *c, const float *x, int64_t position, float *out);
  // The inputs of the decay and of the rate of QUIRE_TOKENS tokens become decays and rates.
  void (*recurrent_gates)(const quire_recurrence *r, float *decay, float *rate);
  // Apply `tokens` tokens, at least one, to the matrix `from`; the result is in `to`, which may be `from`.
  void (*recur)(const quire_recurrence *r, const quire_recurrent_token *t, int64_t tokens, const void *from, void *to);
  void (*gated_norm)(const quire_gated_norm *n, const float *gate, float *x);

  // For benchmarks: the sum of the floats at p, prefetched `ahead` bytes early (0: not); `bytes` is a multiple of 256.
  float (*stream)(const char *p, int64_t bytes, int64_t ahead);
  // For benchmarks: `steps` rounds of the dtype's dot product of w [64 bytes] and a [4 bytes]; *result depends on every
  // round. Returns the number of additions and multiplications.
  int64_t (*peak)(int dtype, int64_t steps, const void *w, const void *a, float *result);

  // Each worker calls them at the end of a step, to release the tile registers of amx or the state of its twin; NULL
  // where the table has no such functions.
  void (*ends[QUIRE_ENDS])(void);
} quire_tiles;

// The levels built for this architecture, lowest first. The amx level in plain C, for tests, is slower than any other.
#if defined __x86_64__
enum {
  QUIRE_SCALAR,
#if defined QUIRE_WITH_AMX_TWIN
  QUIRE_AMX_TWIN,
#endif
  QUIRE_AVX2, QUIRE_AVX512, QUIRE_AMX, QUIRE_LEVELS
};
#elif defined __aarch64__
enum { QUIRE_SCALAR = 0, QUIRE_NEON = 1, QUIRE_LEVELS = 2 };
#else
enum { QUIRE_SCALAR = 0, QUIRE_LEVELS = 1 };
#endif

const char *quire_isa_obstacle(int level);      // why this machine cannot run the level; NULL if it can
const quire_tiles *quire_isa_tiles(int level);  // level < QUIRE_LEVELS
