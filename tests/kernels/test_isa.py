"""The choice of a level: the best by default, any lower one on request, never one that the machine lacks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from quire.kernels import Pool, pick_level, supported_levels, unsupported_levels
from quire.kernels.isa import NAMES


def test_every_machine_has_scalar_and_levels_are_of_this_build():
    assert supported_levels()[0] == "scalar"
    assert set(supported_levels()) <= set(NAMES)


def test_the_best_level_is_the_default(monkeypatch):
    monkeypatch.delenv("QUIRE_ISA", raising=False)
    assert pick_level() == supported_levels()[-1]


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


@pytest.mark.skipif("amx-twin" not in NAMES, reason="needs the build option amx_twin")
def test_the_twin_for_tests_is_preferred_to_scalar_alone():
    assert NAMES[:2] == ("scalar", "amx-twin")


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
