# cython: language_level=3
"""The peak rates of this machine at an ISA level, for a benchmark to compare the kernels with.

The arithmetic is simd/peak.c. All workers of the pool take part with equal shares, as they do in a step.
"""
from libc.stdint cimport int64_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

import numpy as np

from .isa import DTYPE_CODES
from .isa cimport quire_tiles, tiles_of
from .pool cimport Pool, quire_next_index, quire_pool_run

cdef enum:
    LINE_FLOATS = 16                # each worker's result has its own cache line
    PASSES = 5
    STRIDE = 256                    # bytes that one round of `stream` reads

_AHEAD_BYTES = (0, 512, 1024, 2048, 4096)
_PASS_S = 0.005


cdef struct Pass:                   # one run of the pool
    const quire_tiles *tiles
    const char *memory              # memory to read; NULL: `steps` rounds of arithmetic instead
    int64_t share                   # bytes per worker
    int64_t ahead
    int dtype
    int64_t steps
    float *results                  # [workers][LINE_FLOATS]
    int64_t ops                     # operations of one share
    long long next


cdef void _work(void *argument, int worker, int workers) noexcept nogil:
    """Compute shares in order: one per worker, unless another worker has already taken a late worker's share."""
    cdef Pass *job = <Pass *>argument
    cdef long long share = quire_next_index(&job.next)
    while share < workers:
        _compute_share(job, share)
        share = quire_next_index(&job.next)


cdef void _compute_share(Pass *job, long long share) noexcept nogil:
    cdef char[128] zeros
    cdef int64_t i, ops
    if job.memory != NULL:
        job.results[share * LINE_FLOATS] = job.tiles.stream(job.memory + share * job.share, job.share, job.ahead)
        return
    for i in range(128):
        zeros[i] = 0
    ops = job.tiles.peak(job.dtype, job.steps, zeros, zeros + 64, &job.results[share * LINE_FLOATS])
    if share == 0:
        job.ops = ops


cdef double _seconds(Pass *job, Pool pool):
    cdef timespec start, end
    job.next = 0
    with nogil:
        clock_gettime(CLOCK_MONOTONIC, &start)
        quire_pool_run(pool.pool, _work, job)
        clock_gettime(CLOCK_MONOTONIC, &end)
    return end.tv_sec - start.tv_sec + (end.tv_nsec - start.tv_nsec) * 1e-9


def read_bytes_per_s(const unsigned char[::1] memory, Pool pool, isa=None):
    cdef float[::1] results = np.zeros(pool.workers * LINE_FLOATS, np.float32)
    cdef Pass job
    job.tiles = tiles_of(isa)
    job.results = &results[0]
    job.share = memory.shape[0] // pool.workers // STRIDE * STRIDE
    if job.share == 0:
        raise ValueError(f"{memory.shape[0]} bytes are too few for {pool.workers} workers to read {STRIDE} each")
    job.memory = <const char *>&memory[0]
    fastest = np.inf
    for job.ahead in _AHEAD_BYTES:
        fastest = min(fastest, np.median([_seconds(&job, pool) for _ in range(PASSES)]))
    return job.share * pool.workers / fastest


def peak_ops_per_s(dtype, Pool pool, isa=None):
    cdef float[::1] results = np.zeros(pool.workers * LINE_FLOATS, np.float32)
    cdef Pass job
    if dtype not in DTYPE_CODES:
        raise ValueError(f"unknown dtype {dtype!r}; a peak is measured for {', '.join(DTYPE_CODES)}")
    job.tiles = tiles_of(isa)
    job.results = &results[0]
    job.memory = NULL
    job.dtype = DTYPE_CODES[dtype]
    job.steps = 1000
    while _seconds(&job, pool) < _PASS_S:
        job.steps *= 2
    return job.ops * pool.workers / np.median([_seconds(&job, pool) for _ in range(PASSES)])
