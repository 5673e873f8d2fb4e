"""Work is partitioned dynamically: a worker that loses its core delays no other, and the bits stay the same."""

import ctypes
import mmap
import os
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from quire.kernels import PackedMatrix, Pool, Program, packed_nbytes
from quire.kernels.ops import Embed, Linear, Normed, Region, region_nbytes
from quire.pager.layout import KVLayout

HERE = Path(__file__).parent
WIDTH, OUT, ROWS = 1024, 384, 5  # 12 blocks of 32 columns, 32 KiB each
RNG = np.random.default_rng(3)
ROW_VALUES = RNG.normal(0, 1, (ROWS, WIDTH)).astype(np.float32)
WEIGHT = RNG.normal(0, 1, (OUT, WIDTH)).astype(np.float32)


def build(folder: Path, *arguments: str) -> None:
    done = subprocess.run(["cc", "-O1", "-g", *arguments], cwd=folder, capture_output=True, text=True)
    if "fsanitize" in arguments[0] and done.returncode:
        pytest.skip(f"no thread sanitizer: {done.stderr}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("flag", ["-O2", "-fsanitize=thread"])
def test_no_op_waits_for_a_worker_that_keeps_its_item(tmp_path, flag):
    build(tmp_path, flag, "-o", "take", str(HERE / "take_items.c"), str(HERE.parents[1] / "kernels/pool.c"), "-pthread")
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # another sanitizer
    done = subprocess.run(["./take"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this version of the thread sanitizer cannot run with addresses of this many random bits")
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def packed(values: np.ndarray) -> tuple[PackedMatrix, np.ndarray]:
    """Return a q8 matrix and its memory, which begins with a page."""
    memory = np.frombuffer(mmap.mmap(-1, packed_nbytes(*values.shape, "q8")), np.uint8)
    matrix = PackedMatrix(*values.shape, "q8", memory)
    matrix.fill(values)
    return matrix, memory


class OneLayer:
    """An embedding, a norm and one linear layer of q8; an item of it needs the page that `weights` begins with."""

    def __init__(self, threads: int, epilogue: str) -> None:
        weight, self.weights = packed(WEIGHT)
        regions = []
        end = 0
        out = OUT // 2 if epilogue == "swiglu" else OUT
        for columns, dtype in [(WIDTH, "f32"), (WIDTH, "q8"), (WIDTH // 32, "f32"), (out, "f32")]:
            regions.append(Region(end, ROWS, columns, dtype))
            end += region_nbytes(ROWS, columns, dtype)
        x, data, squares, self.y = regions
        normed = Normed(data, squares, np.ones(WIDTH, np.float32), 1e-6)
        ops = [Embed(packed(ROW_VALUES)[0], x, normed), Linear(normed, weight, None, self.y, epilogue)]
        layout = KVLayout(1, 1, 16, "f32", 64)
        limits = {"max_rows": ROWS, "max_samples": 1, "max_sequences": 1, "vocab_size": ROWS}
        memory = np.zeros(layout.page_bytes, np.uint8)
        self.program = Program(ops, end, memory, layout, 1, Pool(threads), **limits)

    def run(self) -> None:
        one = np.zeros(1, np.int32)
        start = np.array([0, ROWS], np.int32)
        self.program.run(np.arange(ROWS, dtype=np.int32), start, one, one, np.array([0, 1], np.int32), one[:0])

    def result(self) -> bytes:
        return self.program.view(self.y).tobytes()


@pytest.mark.parametrize("epilogue", ["store", "add", "swiglu"])
@pytest.mark.parametrize("threads", [2, 3])
def test_other_workers_compute_the_block_of_one_that_is_held_up(tmp_path, threads, epilogue):
    """The first worker that reads the first block is held up in the middle of it, whichever worker that is."""
    expected = OneLayer(1, epilogue)
    expected.run()
    layer = OneLayer(threads, epilogue)
    build(tmp_path, "-shared", "-fPIC", "-o", "hold.so", str(HERE / "hold_reader.c"))
    library = ctypes.CDLL(str(tmp_path / "hold.so"))
    assert library.hold_first_reader(ctypes.c_void_p(layer.weights.ctypes.data)) == 0
    step = threading.Thread(target=layer.run)
    step.start()
    try:
        deadline = time.monotonic() + 60
        while layer.result() != expected.result() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert library.is_held()
        assert layer.result() == expected.result()
        assert step.is_alive()  # the step ends when no worker is inside
    finally:
        library.let_reader_go()
        step.join()
        library.stop_holding()
    assert layer.result() == expected.result()


@pytest.mark.parametrize("threads", [3, 12, 13, 64])
def test_many_short_steps_on_more_threads_than_cpus_keep_the_bits(threads):
    """12 blocks: more than threads, as many, fewer."""
    expected = OneLayer(1, "store")
    layer = OneLayer(threads, "store")
    expected.run()
    for _ in range(100):
        layer.program.view(layer.y)[:] = np.nan
        layer.run()
        assert layer.result() == expected.result()
        assert min(layer.program.op_seconds()) > 0  # ops that were finished before the caller took part count, too
