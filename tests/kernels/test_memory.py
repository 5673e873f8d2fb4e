"""No kernel allocates in a step, and none reads or writes outside of what it was given.

`watched_steps.py` runs in a process of its own, with `count_allocations.c` before its allocator and inaccessible pages
around its memory. What lies inside the arena is for `make check-kernels`.
"""

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def counter(tmp_path_factory):
    if platform.libc_ver()[0] != "glibc" or "LD_PRELOAD" in os.environ:
        pytest.skip("counting needs glibc's allocator, and to be the only one before it")
    library = tmp_path_factory.mktemp("counter") / "count_allocations.so"
    compiler = os.environ.get("CC", "cc").split()
    subprocess.run([*compiler, "-O1", "-shared", "-fPIC", "-o", library, HERE / "count_allocations.c"], check=True)
    return library


@pytest.fixture(scope="module", params=["first", "last"])
def counts(counter, request):
    """Allocations by case, with a border before the first or behind the last byte."""
    done = run(counter, HERE / "watched_steps.py", request.param)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"ended by {signal.Signals(-done.returncode).name} in {lines[-1]}"
    return {name: int(count) for name, count in (line.split("\t") for line in lines)}


def run(counter, *arguments):
    environment = os.environ | {"LD_PRELOAD": str(counter)}
    return subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, text=True)


def test_the_counter_sees_a_thread_without_pythons_lock_and_no_other(counts):
    assert (counts["malloc without the lock"], counts["malloc with the lock"]) == (1, 0)


def test_no_op_allocates_or_reaches_outside(counts):
    steps = {name: count for name, count in counts.items() if name.startswith("step")}
    assert len(steps) >= 3 * 3 * 2 * 5
    assert {name: count for name, count in steps.items() if count} == {}


def test_no_draw_allocates_or_reaches_outside(counts):
    draws = {name: count for name, count in counts.items() if name.startswith("draw")}
    assert len(draws) >= 2 * 8
    assert {name: count for name, count in draws.items() if count} == {}


@pytest.mark.parametrize(("side", "offset"), [("first", -1), ("last", 64)])
def test_a_byte_outside_is_the_end_of_a_process(counter, side, offset):
    reach = (
        f"import ctypes; from watched_steps import bordered; ctypes.string_at(bordered(64).ctypes.data + {offset}, 1)"
    )
    assert (
        run(counter, "-c", f"import sys; sys.path[:0] = [{str(HERE)!r}]; {reach}", side).returncode == -signal.SIGSEGV
    )
