from libc.stdint cimport uint64_t

cdef extern from "pool.h" nogil:
    ctypedef struct quire_pool:
        pass
    ctypedef void (*quire_work)(void *argument, int worker, int workers) noexcept nogil
    quire_pool *quire_pool_new(int workers)
    void quire_pool_free(quire_pool *pool)
    void quire_pool_run(quire_pool *pool, quire_work work, void *argument)
    ctypedef struct quire_progress:
        long long taken
        long long finished_ns
    long long quire_progress_add(quire_progress *progress, long long items)
    void quire_pool_report(quire_pool *pool, quire_progress *progress, long long items, long long total)
    bint quire_pool_await(quire_pool *pool, quire_progress *progress, int worker)
    bint quire_is_finished(const quire_progress *progress)
    ctypedef struct quire_signal:
        pass
    void quire_signal_await(quire_signal *signal, unsigned int value)
    void quire_signal_set(quire_signal *signal, unsigned int value)
    long long quire_next_index(long long *counter)
    ctypedef struct quire_run:
        long long first
        long long end
    bint quire_next_run(long long *counter, long long items, int workers, long long most, quire_run *run)
    ctypedef struct quire_share:
        pass
    enum:
        QUIRE_SHARE_ITEMS
        QUIRE_SHARE_OPS
    long long quire_share_left(const quire_share *share, uint64_t op, long long size)
    long long quire_share_take(quire_share *share, uint64_t op, long long size, bint from_back)
    void quire_share_hold(quire_share *share, uint64_t op, uint64_t item)
    uint64_t quire_share_held(const quire_share *share, uint64_t op)
    bint quire_share_release(quire_share *share, uint64_t op, uint64_t item)
    void quire_share_count(quire_share *share, uint64_t op)
    void quire_pool_report_written(quire_pool *pool, quire_progress *progress, const quire_share *shares, uint64_t op,
                                   long long total)

cdef class Pool:
    cdef quire_pool *pool
    cdef readonly int workers
