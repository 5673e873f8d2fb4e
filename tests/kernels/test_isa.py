"""The choice of a level: the best by default, any lower level on request, never a level that the machine lacks."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from quire.kernels import PackedMatrix, Pool, Program, packed_nbytes, pick_level, supported_levels, unsupported_levels
from quire.kernels.isa import NAMES, best_level
from quire.kernels.ops import Linear, Region
from quire.pager import KVLayout, map_memory


def test_every_machine_has_scalar_and_levels_are_of_this_build():
    assert supported_levels()[0] == "scalar"
    assert set(supported_levels()) <= set(NAMES)


def test_the_best_level_is_the_default(monkeypatch):
    monkeypatch.delenv("QUIRE_ISA", raising=False)
    assert pick_level() == supported_levels()[-1]


def test_plain_c_is_not_the_default_where_a_better_level_was_built():
    assert best_level({"scalar": None, "avx2": None, "amx": "no"}) == "avx2"
    assert best_level({"scalar": None}) == "scalar"
    with pytest.raises(ValueError, match=r"avx2: the processor lacks AVX2; amx: no\); QUIRE_ISA=scalar runs"):
        best_level({"scalar": None, "avx2": "the processor lacks AVX2", "amx": "no"})


def test_a_level_is_supported_or_its_obstacle_is_named():
    missing = unsupported_levels()
    assert [*supported_levels(), *missing] == sorted(NAMES, key=lambda name: (name in missing, NAMES.index(name)))
    for level, reason in missing.items():
        with pytest.raises(ValueError, match="not supported by this machine: " + re.escape(reason)):
            pick_level(level)


@pytest.mark.skipif("amx" not in NAMES, reason="a level of x86")
def test_a_processor_that_does_not_report_amx_is_the_obstacle():
    flags = set(Path("/proc/cpuinfo").read_text().split())
    if {"amx_tile", "amx_int8", "amx_bf16"} <= flags:
        assert (pick_level() == "amx") == ("amx" not in unsupported_levels())
    else:
        assert "amx" in unsupported_levels()


@pytest.mark.skipif("amx" not in NAMES, reason="a level of x86")
def test_each_obstacle_to_amx_has_its_reason_and_permission_is_asked_for(tmp_path):
    here = Path(__file__).parent
    command = ["cc", "-O1", "-w", "-o", "obstacles", "-I", str(here.parents[1] / "kernels"), "-pthread"]
    subprocess.run([*command, str(here / "obstacles_to_amx.c")], cwd=tmp_path, check=True)
    done = subprocess.run(["./obstacles"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "ok\n"


@pytest.mark.skipif("amx-twin" not in NAMES, reason="needs the build option amx_twin")
def test_the_twin_for_tests_is_preferred_to_scalar_alone():
    assert NAMES[:2] == ("scalar", "amx-twin")


@pytest.mark.skipif("amx-twin" not in supported_levels(), reason="needs the build option amx_twin, and AVX-512")
@pytest.mark.parametrize(
    ("dtype", "isa", "choices"), [("bf16", "amx-twin", {}), ("q8", "scalar", {"linear q8 16-36": "amx-twin"})]
)
def test_a_thread_releases_its_tiles_when_a_step_ends(dtype, isa, choices):
    """The twin has the tiles of 256 threads, and ends the process for one more."""
    weight = PackedMatrix(32, 32, dtype, map_memory(packed_nbytes(32, 32, dtype)))
    x = Region(0, 16, 32, dtype)
    out = Region(2048, 16, 32, "f32")
    layout = KVLayout(1, 1, 32)
    ids = np.zeros(16, np.int32)
    limits = {"max_rows": 16, "max_samples": 1, "max_sequences": 1, "vocab_size": 1}
    pages = np.zeros(layout.page_bytes, np.uint8)
    program = Program([Linear(x, weight, None, out, "store")], 4096, pages, layout, 1, Pool(1), isa=isa, **limits)
    program.choose(choices)
    start = np.array([0, 16], np.int32)
    tables = np.array([0, 1], np.int32)
    ended = []

    def run_a_step():
        program.run(ids, start, ids[:1], ids[:1], tables, ids[:0])
        ended.append(program)

    for _ in range(257):
        thread = threading.Thread(target=run_a_step)
        thread.start()
        thread.join()
    assert len(ended) == 257


@pytest.mark.parametrize("level", supported_levels())
def test_the_environment_forces_a_level(level):
    code = "import quire.kernels as k; print(k.pick_level())"
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"QUIRE_ISA": level}, capture_output=True, text=True
    )
    assert run.stdout.strip() == level, run.stderr


def test_an_unknown_level_names_the_allowed_ones():
    with pytest.raises(ValueError, match=r"unknown ISA level 'mmx'.*scalar"):
        pick_level("mmx")


@pytest.mark.parametrize("workers", [0, -1, 1025])
def test_a_pool_names_the_allowed_number_of_threads(workers):
    with pytest.raises(ValueError, match="between 1 and 1024"):
        Pool(workers)


def test_a_released_pool_ends_its_threads():
    before = len(os.listdir("/proc/self/task"))
    for _ in range(50):
        Pool(4)
    assert len(os.listdir("/proc/self/task")) < before + 40
