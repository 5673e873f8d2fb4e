"""A script for `test_memory.py`: runs every kind of step and draw in memory between inaccessible pages.

`python watched_steps.py first|last`: weights, KV pages, logits and a step's arrays start right after such a page, or
end right before one, so an access outside ends this process. Prints each case with its number of allocations, which
`count_allocations.c` counts.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
from collections.abc import Callable, Iterator

import numpy as np
from conftest import BLOCK_DTYPES, NUM_PAGES, Toy
from quire.kernels import Pool, Sampler, supported_levels
from quire.kernels.sample import ADJUSTMENT, ROW

from tests.kernels.encoder import VOCAB as ENCODER_VOCAB
from tests.kernels.encoder import Encoder

THREADS = 3
ROWS = 8
VOCAB = 20_000
STRIDE = 20_032

libc = ctypes.CDLL(None)


def guarded(nbytes: int, fill: int = 0) -> np.ndarray:
    """Return `nbytes` of memory; the byte before the first or after the last is inaccessible."""
    inside = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    area = np.frombuffer(mmap.mmap(-1, inside + 2 * mmap.PAGESIZE), np.uint8)
    for border in (0, mmap.PAGESIZE + inside):
        address = ctypes.c_void_p(area.ctypes.data + border)
        assert libc.mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    begin = mmap.PAGESIZE + (inside - nbytes if sys.argv[1] == "last" else 0)
    area[begin : begin + nbytes] = fill
    return area[begin : begin + nbytes]


def copied(array: np.ndarray) -> np.ndarray:
    memory = guarded(array.nbytes).view(array.dtype).reshape(array.shape)
    memory[:] = array
    return memory


def steps(model: Toy) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield prefill in chunks, decode together with prefill, and decode of 1 and of 35 sequences; short and long
    contexts.

    Pages that neither this step nor a later one sees are released first: their id is -1.
    """
    ids = np.arange(330, dtype=np.int32) % 333
    long = np.arange(20, 31)
    short = np.array([NUM_PAGES - 1, 0])
    crowd = [(ids[:1], 0, np.array([i % 6])) for i in range(1, 34)]
    for name, sequences in {
        "prefill": [(ids[:90], 0, long), (ids[:40], 0, short)],
        "mixed": [(ids[90:240], 90, long), (ids[40:41], 40, short)],
        "prefill over splits": [(ids[240:329], 240, long)],
        "decode 1": [(ids[329:], 329, long)],
        "decode 35": [(ids[329:], 329, long), (ids[41:42], 41, short), *crowd],
    }.items():
        for _, first_position, table in sequences:
            model.release_pages([table], first_position)
        step = {name: copied(array) for name, array in model.step(*sequences).items()}
        yield name, lambda step=step: model.program.run(**step)
    given = copied(np.ones((3, model.hidden), np.float32))
    given_of = copied(np.array([2, *[-1] * 33, 0], np.int32))
    yield "given rows", lambda: model.program.run(**step, given_of=given_of, given=given)


def draws(isa: str, logits: np.ndarray) -> Iterator[tuple[str, Callable[[], object]]]:
    sampler = Sampler(VOCAB, STRIDE, ROWS, Pool(THREADS), isa)
    maxima = copied(np.maximum.reduceat(logits[:, :VOCAB], np.arange(0, VOCAB, 32), axis=1))
    adjustments = copied(np.array([(0, 2, 1, 0), (8, 0, 1, 0), (VOCAB - 1, 0, 0, 1)], ADJUSTMENT))
    for name, settings in {
        "greedy": {},
        "temperature": {"temperature": 1},
        "top-k": {"temperature": 1, "top_k": 500},
        "top-p": {"temperature": 1, "top_p": 0.9},
        "min-p": {"temperature": 1, "min_p": 0.01},
        "logprobs": {"logprobs": 32},
        "penalties": {
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "num_adjustments": 3,
        },
        "all": {
            "temperature": 2,
            "top_k": 5000,
            "top_p": 0.9,
            "logprobs": 32,
            "repetition_penalty": 2,
            "num_adjustments": 3,
        },
    }.items():
        rows = copied(np.zeros(ROWS, ROW))
        rows["top_p"] = rows["repetition_penalty"] = 1
        rows["logprobs"] = -1
        for field, value in settings.items():
            rows[field] = value
        yield name, lambda rows=rows: sampler.sample(logits, maxima, rows, adjustments)


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield every case. A call through CDLL releases the GIL and is counted; one through PyDLL does not and is not."""
    with_gil = ctypes.PyDLL(None)
    yield "malloc without the GIL", lambda: libc.malloc(10)
    yield "malloc with the GIL", lambda: with_gil.malloc(10)
    kv_dtypes = ("f32", "f16", "bf16", "int8")
    for isa in supported_levels():
        # Layers multiply weights and read pages in ops of their own: each dtype of either has both windows.
        for (number, weights), window in itertools.product(enumerate(("f32", "bf16", "q8", "rotated", "q4")), (0, 37)):
            kv = kv_dtypes[(number + (window > 0)) % len(kv_dtypes)]
            windows = (window,)
            unusual = kv == "int8"
            model = Toy(
                weights=weights, kv=kv, windows=windows, unusual=unusual, isa=isa, threads=THREADS, memory=guarded
            )
            for name, run in steps(model):
                yield f"step at {isa}: {weights} weights, {kv} KV, windows {windows}, {name}", run
        for weights in BLOCK_DTYPES:
            wide = {"heads": 8, "head_dim": 32, "hidden": 256, "intermediate": 512}
            model = Toy(weights=weights, kv="int8", **wide, isa=isa, threads=THREADS, memory=guarded)
            for name, run in steps(model):
                yield f"step at {isa}: {weights} weights, {name}", run
        for weights, kv in (("f32", "f32"), ("bf16", "bf16"), ("q8", "int8")):
            group = 4 if weights == "q8" else 0
            encoder = Encoder(weights, kv, windows=(0, 20), group=group, isa=isa, threads=THREADS, memory=guarded)
            texts = [np.arange(n) % ENCODER_VOCAB for n in (70, 1, 33)]
            step = [copied(array) for array in (*encoder.step(*texts), np.ones(104, np.int32))]
            yield f"step at {isa}: {weights} texts", lambda e=encoder, step=step: e.program.run_texts(*step)
            name = f"step at {isa}: {weights} texts, first ops"
            yield name, lambda e=encoder, step=step: e.program.run_texts(*step, 0, 3)
        random = copied(np.random.default_rng(0).normal(0, 3, (ROWS, STRIDE)).astype(np.float32))
        for kind, logits in ("random", random), ("equal", copied(np.zeros_like(random))):
            for name, run in draws(isa, logits):
                yield f"draw at {isa}: {name} of {kind} logits", run


def main() -> None:
    counter = ctypes.c_long.in_dll(libc, "allocations")
    for name, run in cases():
        print(name, end="\t", flush=True)
        before = counter.value
        run()
        print(counter.value - before)


if __name__ == "__main__":
    main()
