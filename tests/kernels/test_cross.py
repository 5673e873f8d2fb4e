"""The levels of AArch64, compiled and run under emulation if Debian's packages for that are installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("aarch64-linux-gnu-gcc", "qemu-aarch64-static", "meson", "ninja", "cython")
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
MISSING = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}; see tests/kernels/cross/compare_levels.c")
def test_neon_matches_scalar(tmp_path):
    def meson(*arguments: str) -> str:
        done = subprocess.run(
            ["meson", *arguments], cwd=ROOT, env=os.environ | {"PATH": PATH}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    meson("setup", str(tmp_path), "--cross-file", "tests/kernels/cross/aarch64.ini")
    assert "neon-dotprod-bf16: ok" in meson("test", "-C", str(tmp_path), "--verbose", "levels")
