# cython: language_level=3
"""Sampling: a token from each row of logits, as a pure function of (logits, parameters, seed, position).

Order: mask, logit bias, penalties, temperature, min_p, top_k, top_p; ties go to the lower token id. Random numbers are
Philox4x32-10 with the seed as key and the position as counter (Salmon et al., SC 2011), so the same position always
draws the same number. Filters do not sort: a histogram over the weights' bits finds the bin with the cut, and a heap
selects the weights to keep from that bin.
"""
from libc.math cimport INFINITY, frexp
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

import numpy as np

from .isa cimport quire_tiles, tiles_of
from .pool cimport Pool, quire_next_index, quire_pool_run

MAX_TOP_LOGPROBS = 32

cdef enum:
    TOP = 32
    BINS = 1024                     # bins for a weight's upper bits in [0, 1]: eight per octave


cdef struct Row:                    # the only list of the sampler's arguments
    uint64_t seed
    int64_t position                # position of the token to draw
    float temperature               # the fields of SamplingParams up to `logprobs`, by name
    float top_p
    float min_p
    float repetition_penalty
    float presence_penalty
    float frequency_penalty
    int32_t top_k
    int32_t logprobs                # -1: none; else the number of top alternatives
    int32_t first_adjustment
    int32_t num_adjustments
    int32_t mask                    # number of the mask with its allowed tokens, from 1 on; 0: all are allowed


cdef struct Adjustment:             # a change of one token id's logit
    int32_t token_id
    int32_t count                   # occurrences in the output
    int32_t seen                    # 1 if it occurs in prompt or output
    float bias


# The dtypes have the fields of the structs.
cdef Row _a_row
cdef Adjustment _an_adjustment
ROW = np.asarray(<Row[:1]>&_a_row).dtype
ADJUSTMENT = np.asarray(<Adjustment[:1]>&_an_adjustment).dtype


cdef struct Draw:                   # the arguments of one call, shared by the workers
    const quire_tiles *tiles
    float *logits                   # [rows][stride]; adjusted in place and restored
    const float *maxima             # [rows][maxima_stride]: the maximum of each 32 logits, NaN if one is NaN
    int64_t maxima_stride
    int64_t stride
    int64_t vocab_size
    int64_t num_rows
    Row *rows
    Adjustment *adjustments
    const int32_t *masks            # [masks][mask_stride]: one bit per token, the lowest first; 0: not allowed
    int64_t mask_stride
    float *originals                # [adjustments]
    float *weights                  # [workers][stride]
    uint64_t *order                 # [workers][stride]
    int32_t *tokens
    float *logprobs
    int32_t *top_ids                # [rows][TOP]
    float *top_logprobs
    long long next


def sampler_nbytes(stride, max_rows, workers):
    return workers * stride * (4 + 8) + max_rows * (4 + 4 + TOP * (4 + 4))


cdef class Sampler:
    """Samples up to `max_rows` rows at a time, with scratch memory of its own."""

    cdef Draw draw
    cdef Pool pool
    cdef int64_t max_rows
    cdef object weights, order, tokens, logprobs, top_ids, top_logprobs

    def __init__(self, vocab_size, stride, max_rows, Pool pool, isa=None):
        if not 1 <= vocab_size <= stride or stride % 32 or max_rows < 1:
            raise ValueError(f"bad sampler sizes: vocab {vocab_size}, stride {stride}, rows {max_rows}")
        self.pool, self.max_rows = pool, max_rows
        self.weights = np.zeros((pool.workers, stride), np.float32)
        self.order = np.zeros((pool.workers, stride), np.uint64)
        self.tokens = np.zeros(max_rows, np.int32)
        self.logprobs = np.zeros(max_rows, np.float32)
        self.top_ids = np.zeros((max_rows, TOP), np.int32)
        self.top_logprobs = np.zeros((max_rows, TOP), np.float32)
        self.draw.tiles = tiles_of(isa)
        self.draw.stride, self.draw.vocab_size = stride, vocab_size
        cdef float[:, ::1] weights = self.weights, top_logprobs = self.top_logprobs
        cdef uint64_t[:, ::1] order = self.order
        cdef int32_t[::1] tokens = self.tokens
        cdef float[::1] logprobs = self.logprobs
        cdef int32_t[:, ::1] top_ids = self.top_ids
        self.draw.weights, self.draw.order = &weights[0, 0], &order[0, 0]
        self.draw.tokens, self.draw.logprobs = &tokens[0], &logprobs[0]
        self.draw.top_ids, self.draw.top_logprobs = &top_ids[0, 0], &top_logprobs[0, 0]

    def sample(self, float[:, ::1] logits, const float[:, ::1] maxima, rows, adjustments,
               const int32_t[:, ::1] masks=None):
        cdef int64_t n = len(rows)
        if n > self.max_rows or n > logits.shape[0] or logits.shape[1] != self.draw.stride:
            raise ValueError(f"{n} rows do not fit logits of {logits.shape[0]} or a sampler of {self.max_rows}")
        if n > maxima.shape[0] or maxima.shape[1] < (self.draw.vocab_size + 31) // 32:
            raise ValueError(f"maxima of {maxima.shape[0]} rows and {maxima.shape[1]} blocks do not fit the logits")
        if rows.dtype != ROW or adjustments.dtype != ADJUSTMENT:
            raise ValueError("rows and adjustments must be arrays of sample.ROW and sample.ADJUSTMENT")
        if n == 0:
            return self.tokens[:0], self.logprobs[:0], self.top_ids[:0], self.top_logprobs[:0]
        _check_rows(rows, adjustments, self.draw.vocab_size)
        self._use_masks(rows, masks)
        originals = np.empty(max(1, len(adjustments)), np.float32)
        cdef char[::1] row_bytes = np.ascontiguousarray(rows).view(np.int8)
        cdef char[::1] adjustment_bytes
        cdef float[::1] saved = originals
        self.draw.adjustments = NULL
        if len(adjustments):
            adjustment_bytes = np.ascontiguousarray(adjustments).view(np.int8)
            self.draw.adjustments = <Adjustment *>&adjustment_bytes[0]
        self.draw.originals = &saved[0]
        self.draw.rows = <Row *>&row_bytes[0]
        self.draw.logits, self.draw.num_rows, self.draw.next = &logits[0, 0], n, 0
        self.draw.maxima, self.draw.maxima_stride = &maxima[0, 0], maxima.shape[1]
        with nogil:
            quire_pool_run(self.pool.pool, _work, &self.draw)
        return self.tokens[:n], self.logprobs[:n], self.top_ids[:n], self.top_logprobs[:n]

    def _use_masks(self, rows, const int32_t[:, ::1] masks):
        cdef int64_t num_masks = 0 if masks is None else masks.shape[0]
        self.draw.masks, self.draw.mask_stride = NULL, 0
        if np.any(rows["mask"] < 0) or np.any(rows["mask"] > num_masks):
            raise ValueError(f"a row has a mask beyond the {num_masks} masks")
        if num_masks:
            if masks.shape[1] != (self.draw.vocab_size + 31) // 32:
                raise ValueError(f"masks of {masks.shape[1]} words do not fit {self.draw.vocab_size} tokens")
            self.draw.masks, self.draw.mask_stride = &masks[0, 0], masks.shape[1]


def _check_rows(rows, adjustments, vocab_size):
    if np.any(rows["first_adjustment"] < 0) or np.any(rows["num_adjustments"] < 0) or np.any(
            rows["first_adjustment"].astype(np.int64) + rows["num_adjustments"] > len(adjustments)):
        raise ValueError("a row points beyond the adjustments")
    if len(adjustments) and not (0 <= adjustments["token_id"].min() and adjustments["token_id"].max() < vocab_size):
        raise ValueError(f"adjusted token ids must lie in 0..{vocab_size - 1}")
    if np.any(rows["logprobs"] > TOP):
        raise ValueError(f"at most {TOP} top logprobs")


cdef void _work(void *argument, int worker, int workers) noexcept nogil:
    cdef Draw *draw = <Draw *>argument
    cdef int64_t row = quire_next_index(&draw.next)
    while row < draw.num_rows:
        _sample_row(draw, row, draw.weights + worker * draw.stride, draw.order + worker * draw.stride)
        row = quire_next_index(&draw.next)


cdef void _sample_row(Draw *draw, int64_t index, float *weights, uint64_t *order) noexcept nogil:
    cdef Row *row = &draw.rows[index]
    cdef float *x = draw.logits + index * draw.stride
    cdef const float *maxima = draw.maxima + index * draw.maxima_stride
    cdef float top = 0
    cdef double log_total = 0
    cdef const int32_t *mask = draw.masks + (row.mask - 1) * draw.mask_stride if row.mask > 0 else NULL
    cdef bint wants_logprobs = row.logprobs >= 0
    cdef int64_t token = _largest(draw, x, maxima, &top)
    if token < 0 or top == INFINITY or top == -INFINITY:
        draw.tokens[index] = -1             # not finite: no token can be drawn
        return
    if wants_logprobs:
        log_total = top + _log(draw.tiles.sum_exp(x, draw.vocab_size, top))
    if mask != NULL:
        draw.tiles.set_forbidden(mask, draw.mask_stride, -INFINITY, x)
    if row.logprobs > 0:
        _top_logprobs(x, maxima, draw.vocab_size, row.logprobs, log_total, draw.top_ids + index * TOP,
                      draw.top_logprobs + index * TOP)
    if row.num_adjustments:
        _adjust(draw, row, x)
    if row.num_adjustments or mask != NULL:
        token = draw.tiles.argmax(x, draw.vocab_size, &top)
        if top == -INFINITY:
            draw.tokens[index] = -1
            return
    if row.temperature > 1e-5:               # below, (x - max) / temperature overflows
        draw.tiles.exp_scaled(x, top, 1 / row.temperature, draw.stride, weights)
        _forbid(draw, row, x, weights)
        if mask != NULL:
            draw.tiles.set_forbidden(mask, draw.mask_stride, 0, weights)
        token = _draw_weighted(weights, order, draw.vocab_size, row, mask)
    if row.num_adjustments:
        _restore(draw, row, x)
    draw.tokens[index] = <int32_t>token
    draw.logprobs[index] = <float>(x[token] - log_total) if wants_logprobs else 0


cdef double _log(double x) noexcept nogil:
    """Return ln(x) of a positive normal number, with the polynomial of fdlibm: libm's log differs between machines."""
    cdef int exponent = 0
    cdef double f = frexp(x, &exponent), s, z, series, half
    if f < 0.7071067811865476:
        f *= 2
        exponent -= 1
    f -= 1
    s = f / (2 + f)
    z = s * s
    series = 1.531383769920937332e-01 + z * 1.479819860511658591e-01
    series = 2.222219843214978396e-01 + z * (1.818357216161805012e-01 + z * series)
    series = 3.999999999940941908e-01 + z * (2.857142874366239149e-01 + z * series)
    series = z * (6.666666666666735130e-01 + z * series)
    half = 0.5 * f * f
    return exponent * 6.93147180369123816490e-01 - (
        (half - (s * (half + series) + exponent * 1.90821492927058770002e-10)) - f)


cdef int64_t _largest(const Draw *draw, const float *x, const float *maxima, float *top) noexcept nogil:
    """Return the lowest id of the largest logit, or -1 if one is NaN; reads only the logits of its block."""
    cdef int64_t at = 32 * draw.tiles.argmax(maxima, (draw.vocab_size + 31) // 32, top)
    if at < 0:
        return -1
    while x[at] != top[0]:
        at += 1
    return at


cdef void _adjust(Draw *draw, const Row *row, float *x) noexcept nogil:
    cdef int64_t i
    cdef Adjustment *a
    cdef float logit
    for i in range(row.first_adjustment, row.first_adjustment + row.num_adjustments):
        a = &draw.adjustments[i]
        draw.originals[i] = x[a.token_id]
        logit = x[a.token_id] + a.bias
        if a.seen:
            logit = logit / row.repetition_penalty if logit > 0 else logit * row.repetition_penalty
        if a.count > 0:
            logit -= row.presence_penalty + row.frequency_penalty * <float>a.count
        x[a.token_id] = logit


cdef void _restore(Draw *draw, const Row *row, float *x) noexcept nogil:
    """Restore the logits, last adjustment first: a token id that occurs twice gets its original value back."""
    cdef int64_t i
    for i in range(row.first_adjustment + row.num_adjustments - 1, row.first_adjustment - 1, -1):
        x[draw.adjustments[i].token_id] = draw.originals[i]


cdef void _forbid(Draw *draw, const Row *row, const float *x, float *weights) noexcept nogil:
    """Set the weight of token ids with a bias of minus infinity to 0; exp alone would leave 1e-38."""
    cdef int64_t i
    for i in range(row.first_adjustment, row.first_adjustment + row.num_adjustments):
        if x[draw.adjustments[i].token_id] == -INFINITY:
            weights[draw.adjustments[i].token_id] = 0


cdef int64_t _draw_weighted(float *weights, uint64_t *order, int64_t n, const Row *row,
                            const int32_t *mask) noexcept nogil:
    """Filter the weights and draw by inverse CDF, in token order and double precision.

    Blocks of 32 weights that the mask, if there is one, does not allow are zero: they are not read.
    """
    cdef int64_t block, i, chosen = 0
    cdef double total = 0, target, sum = 0
    if row.min_p > 0:
        for i in range(n):
            if weights[i] < row.min_p:
                weights[i] = 0
    if 0 < row.top_k < n:
        _keep(weights, order, n, row.top_k, INFINITY)
    if row.top_p < 1:
        for i in range(n):
            total += weights[i]
        _keep(weights, order, n, n, total * row.top_p)
    total = 0
    for block in range(0, n, 32):
        if mask == NULL or mask[block // 32] != 0:
            for i in range(block, min(n, block + 32)):
                total += weights[i]
    target = _uniform(row.seed, row.position) * total
    for block in range(0, n, 32):
        if mask == NULL or mask[block // 32] != 0:
            for i in range(block, min(n, block + 32)):
                if weights[i] > 0:
                    chosen = i
                    sum += weights[i]
                    if sum > target:
                        return i
    return chosen


cdef uint32_t _bits(float weight) noexcept nogil:
    """Return the bits of a weight in [0, 1], which sort as the weights do."""
    cdef uint32_t u
    memcpy(&u, &weight, 4)
    return u


cdef void _keep(float *weights, uint64_t *order, int64_t n, int64_t most, double mass) noexcept nogil:
    """Zero all but the largest weights: keep at most `most`, until their sum reaches `mass`, and at least one."""
    cdef int64_t counts[BINS]
    cdef double masses[BINS]
    cdef int64_t i, cut = BINS - 1, kept = 0, candidates = 0
    cdef double sum = 0
    memset(counts, 0, sizeof(counts))
    memset(masses, 0, sizeof(masses))
    for i in range(n):
        counts[_bits(weights[i]) >> 20] += 1
        masses[_bits(weights[i]) >> 20] += weights[i]
    while cut > 0 and kept + counts[cut] < most and sum + masses[cut] < mass:
        kept += counts[cut]
        sum += masses[cut]
        cut -= 1
    for i in range(n):
        if _bits(weights[i]) >> 20 == cut:      # largest weight first, then lowest id, as one ascending key
            order[candidates] = <uint64_t>(~_bits(weights[i])) << 32 | <uint64_t>i
            candidates += 1
        elif _bits(weights[i]) >> 20 < cut:
            weights[i] = 0
    _heapify(order, candidates)
    while candidates > 0 and (kept == 0 or (kept < most and sum < mass)):
        kept += 1
        sum += weights[<uint32_t>order[0]]
        candidates -= 1
        order[0] = order[candidates]
        _sift_down(order, 0, candidates)
    for i in range(candidates):
        weights[<uint32_t>order[i]] = 0


cdef void _heapify(uint64_t *heap, int64_t n) noexcept nogil:
    """Build a min-heap in place: only the elements that are kept have to be put in order."""
    cdef int64_t i
    for i in range(n // 2 - 1, -1, -1):
        _sift_down(heap, i, n)


cdef void _sift_down(uint64_t *heap, int64_t at, int64_t n) noexcept nogil:
    cdef uint64_t moving = heap[at]
    cdef int64_t child = 2 * at + 1
    while child < n:
        if child + 1 < n and heap[child + 1] < heap[child]:
            child += 1
        if moving <= heap[child]:
            break
        heap[at] = heap[child]
        at, child = child, 2 * child + 1
    heap[at] = moving


cdef void _top_logprobs(const float *x, const float *maxima, int64_t n, int64_t wanted, double log_total, int32_t *ids,
                        float *logprobs) noexcept nogil:
    """Find the `wanted` largest logits by insertion; most blocks of the vocabulary fail the first comparison."""
    cdef int64_t block, i, at, found = 0
    for block in range((n + 31) // 32):
        if found == wanted and not maxima[block] > logprobs[found - 1]:
            continue
        for i in range(32 * block, min(n, 32 * block + 32)):
            if x[i] == -INFINITY or (found == wanted and not x[i] > logprobs[found - 1]):
                continue
            at = found if found < wanted else wanted - 1
            while at > 0 and x[i] > logprobs[at - 1]:
                logprobs[at] = logprobs[at - 1]
                ids[at] = ids[at - 1]
                at -= 1
            logprobs[at] = x[i]
            ids[at] = <int32_t>i
            found = min(found + 1, wanted)
    for i in range(found):
        logprobs[i] = <float>(logprobs[i] - log_total)
    for i in range(found, wanted):
        ids[i] = -1


cdef double _uniform(uint64_t seed, int64_t position) noexcept nogil:
    cdef uint32_t out[4]
    cdef uint32_t counter[4]
    counter[0], counter[1] = <uint32_t>position, <uint32_t>(<uint64_t>position >> 32)
    counter[2] = counter[3] = 0
    _philox(counter, <uint32_t>seed, <uint32_t>(seed >> 32), out)
    return (<double>(out[0] >> 5) * 67108864.0 + <double>(out[1] >> 6)) / 9007199254740992.0


cdef void _philox(const uint32_t *counter, uint32_t key0, uint32_t key1, uint32_t *out) noexcept nogil:
    cdef uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3]
    cdef uint64_t a, b
    cdef int _
    for _ in range(10):
        a = <uint64_t>0xD2511F53 * c0
        b = <uint64_t>0xCD9E8D57 * c2
        c0, c1, c2, c3 = (<uint32_t>(b >> 32) ^ c1 ^ key0, <uint32_t>b, <uint32_t>(a >> 32) ^ c3 ^ key1, <uint32_t>a)
        key0 += <uint32_t>0x9E3779B9
        key1 += <uint32_t>0xBB67AE85
    out[0], out[1], out[2], out[3] = c0, c1, c2, c3


def philox(counter, key):
    """Run the raw generator, for known-answer tests: four and two uint32 in, four out."""
    cdef uint32_t c[4]
    cdef uint32_t out[4]
    cdef int i
    for i in range(4):
        c[i] = counter[i]
    _philox(c, key[0], key[1], out)
    return [out[i] for i in range(4)]
