"""Run under `allocations.c`: replays steps of every kind and prints, as JSON, the allocations that each one made."""

from __future__ import annotations

import ctypes
import itertools
import json
from collections.abc import Callable, Iterator

import numpy as np
from conftest import Toy
from quire.kernels import Pool, Sampler, supported_levels
from quire.kernels.sample import ADJUSTMENT, ROW

THREADS = 3
ROWS, VOCAB, STRIDE = 8, 20_000, 20_032

counter = ctypes.c_long.in_dll(ctypes.CDLL(None), "allocations")


def counted(work: Callable[[], object]) -> int:
    before = counter.value
    work()
    return counter.value - before


def self_test() -> Iterator[tuple[str, int]]:
    """A call through CDLL gives the lock away and is seen, one through PyDLL keeps it and is not."""
    without, within = ctypes.CDLL(None), ctypes.PyDLL(None)
    yield "malloc without the lock", counted(lambda: without.malloc(10))
    yield "malloc with the lock", counted(lambda: within.malloc(10))


def steps(model: Toy) -> Iterator[tuple[str, int]]:
    """Prefill in chunks, decode beside prefill, decode of one and of many; contexts short and over several splits."""
    ids, long, short = np.arange(330, dtype=np.int32) % 333, np.arange(20, 31), np.arange(3)
    crowd = [(ids[:1], 0, np.array([40])) for _ in range(33)]
    for name, step in {
        "prefill": [(ids[:90], 0, long), (ids[:40], 0, short)],
        "mixed": [(ids[90:240], 90, long), (ids[40:41], 40, short)],
        "prefill over splits": [(ids[240:329], 240, long)],
        "decode 1": [(ids[329:], 329, long)],
        "decode 35": [(ids[329:], 329, long), (ids[41:42], 41, short), *crowd],
    }.items():
        yield name, counted(lambda step=step: model.run(*step))


def draws(isa: str, logits: np.ndarray) -> Iterator[tuple[str, int]]:
    sampler = Sampler(VOCAB, STRIDE, ROWS, Pool(THREADS), isa)
    adjustments = np.array([(7, 2, 1, 0), (8, 0, 1, 0), (9, 0, 0, 1)], ADJUSTMENT)
    for name, settings in {
        "greedy": {},
        "temperature": {"temperature": 1},
        "top-k": {"temperature": 1, "top_k": 500},
        "top-p": {"temperature": 1, "top_p": 0.9},
        "min-p": {"temperature": 1, "min_p": 0.01},
        "logprobs": {"logprobs": 32},
        "penalties": {"repetition": 1.2, "presence": 0.5, "frequency": 0.5, "num_adjustments": 3},
        "all": {"temperature": 2, "top_k": 5000, "top_p": 0.9, "logprobs": 32, "repetition": 2, "num_adjustments": 3},
    }.items():
        rows = np.zeros(ROWS, ROW)
        rows["top_p"], rows["repetition"], rows["logprobs"] = 1, 1, -1
        for field, value in settings.items():
            rows[field] = value
        yield name, counted(lambda rows=rows: sampler.sample(logits, rows, adjustments))


def cases() -> Iterator[tuple[str, int]]:
    yield from self_test()
    forms = ("f32", "bf16", "q8"), ("f32", "bf16", "int8"), (0, 37)
    for isa in supported_levels():
        for weights, kv, window in itertools.product(*forms):
            model = Toy(weights=weights, kv=kv, window=window, isa=isa, threads=THREADS)
            for name, count in steps(model):
                yield f"step at {isa}: {weights} weights, {kv} KV, window {window}, {name}", count
        random = np.random.default_rng(0).normal(0, 3, (ROWS, STRIDE)).astype(np.float32)
        for kind, logits in ("random", random), ("equal", np.zeros_like(random)):
            for name, count in draws(isa, logits):
                yield f"draw at {isa}: {name} of {kind} logits", count


if __name__ == "__main__":
    print(json.dumps(dict(cases())))
