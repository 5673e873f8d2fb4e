# cython: language_level=3
"""The thread pool as a Python object, shared by the programs of an engine and used by one caller at a time."""


cdef class Pool:
    def __cinit__(self, int workers):
        if not 1 <= workers <= 1024:
            raise ValueError(f"threads must be between 1 and 1024, not {workers}")
        self.pool = quire_pool_new(workers)
        if self.pool == NULL:
            raise MemoryError(f"cannot start {workers} threads")
        self.workers = workers

    def __dealloc__(self):
        quire_pool_free(self.pool)
