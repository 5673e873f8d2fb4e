"""No kernel allocates memory in a step, and none reads or writes outside its buffers.

`watched_steps.py` runs in a separate process, with `count_allocations.c` preloaded before the allocator and
inaccessible pages around its memory. `make check-kernels` checks accesses inside the arena.
"""

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    if platform.libc_ver()[0] != "glibc" or "LD_PRELOAD" in os.environ:
        pytest.skip("counting needs glibc's allocator and no other preloaded library")
    library = tmp_path_factory.mktemp("counter") / "count_allocations.so"
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run([*compiler, "-O1", "-shared", "-fPIC", "-o", library, HERE / "count_allocations.c"], check=True)
    return library


@pytest.fixture(scope="module", params=["first", "last"])
def counts(counter, request):
    """Allocations by case, with an inaccessible page before the first byte or after the last."""
    done = run(counter, HERE / "watched_steps.py", request.param)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"ended by {signal.Signals(-done.returncode).name} in {lines[-1]}"
    return {name: int(count) for name, count in (line.split("\t") for line in lines)}


def run(counter, *arguments):
    environment = os.environ | {"LD_PRELOAD": str(counter), "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, text=True)


def test_the_counter_counts_only_threads_without_the_gil(counts):
    assert (counts["malloc without the GIL"], counts["malloc with the GIL"]) == (1, 0)


def test_no_op_allocates_or_accesses_memory_outside_its_buffers(counts):
    steps = {name: count for name, count in counts.items() if name.startswith("step")}
    assert len(steps) >= 5 * 2 * 6
    assert {name: count for name, count in steps.items() if count} == {}


def test_no_draw_allocates_or_accesses_memory_outside_its_buffers(counts):
    draws = {name: count for name, count in counts.items() if name.startswith("draw")}
    assert len(draws) >= 2 * 8
    assert {name: count for name, count in draws.items() if count} == {}


@pytest.mark.parametrize(("side", "offset"), [("first", -1), ("last", 64)])
def test_an_access_outside_ends_the_process(counter, side, offset):
    read = f"import ctypes; from watched_steps import guarded; ctypes.string_at(guarded(64).ctypes.data + {offset}, 1)"
    done = run(counter, "-c", f"import sys; sys.path[:0] = [{str(HERE)!r}]; {read}", side)
    assert done.returncode == -signal.SIGSEGV
