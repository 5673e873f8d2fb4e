class Pool:
    """`workers` threads, the caller included. ValueError outside 1..1024; MemoryError if one cannot start."""

    workers: int
    def __init__(self, workers: int) -> None: ...
