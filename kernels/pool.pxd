cdef extern from "pool.h" nogil:
    ctypedef struct quire_pool:
        pass
    ctypedef void (*quire_work)(void *argument, int worker, int workers) noexcept nogil
    quire_pool *quire_pool_new(int workers)
    void quire_pool_free(quire_pool *pool)
    void quire_pool_run(quire_pool *pool, quire_work work, void *argument)
    void quire_pool_barrier(quire_pool *pool)
    ctypedef struct quire_signal:
        pass
    void quire_signal_await(quire_signal *signal, unsigned int value)
    void quire_signal_set(quire_signal *signal, unsigned int value)
    long long quire_next_index(long long *counter)

cdef class Pool:
    cdef quire_pool *pool
    cdef readonly int workers
