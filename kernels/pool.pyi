class Pool:
    """`workers` threads including the caller. ValueError outside 1..1024; MemoryError if they cannot be started."""

    workers: int
    def __init__(self, workers: int) -> None: ...
