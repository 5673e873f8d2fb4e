"""The bits of every level on every architecture and compiler: `compare_levels.c` against `golden_bits.txt`.

On x86, also the machine code of the amx level with emulated tile instructions, `emulated_amx.c`, and that a machine
whose AMX does not work falls back, `refused_tiles.c`.

AArch64 is compiled, and run under emulation, if Debian's packages for that are installed. Clang's build is compared if
clang is installed.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(900)  # a machine that others use builds and emulates slowly

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = ROOT / "build" / f"cp{sys.version_info.major}{sys.version_info.minor}"  # the editable installation
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def lacks(*tools: str) -> pytest.MarkDecorator:
    missing = [tool for tool in tools if shutil.which(tool, path=PATH) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}; see cross/compare_levels.c")


def meson_test(build: Path, tests: tuple[str, ...], *arguments: str, **environment: str) -> str:
    """Return the output of `tests` in C, of `compare_levels.c` one line per level; builds the programs first."""

    def meson(*arguments: str) -> str:
        done = subprocess.run(
            ["meson", *arguments],
            cwd=ROOT,
            env=os.environ | {"PATH": PATH} | environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    if build != INSTALLED:
        meson("setup", str(build), *arguments)
    patience = ("--timeout-multiplier", "3")  # 900 seconds, the limit above
    return meson("test", "-C", str(build), "--verbose", *patience, *tests)


@lacks("aarch64-linux-gnu-gcc", "qemu-aarch64-static", "meson", "ninja", "cython")
def test_golden_bits_of_neon(tmp_path):
    cross_files = ["--cross-file", "tests/kernels/cross/aarch64.ini"]
    if shutil.which("ccache", path=PATH):  # Meson itself puts it in front of native compilers only
        cached = tmp_path / "cached.ini"
        cached.write_text("[binaries]\nc = ['ccache', 'aarch64-linux-gnu-gcc']\n")
        cross_files += ["--cross-file", str(cached)]
    output = meson_test(tmp_path / "build", ("levels",), *cross_files, "-Doptimization=1")
    assert "scalar: ok" in output
    assert "neon-dotprod-bf16: ok" in output


@lacks("gcc", "meson")
def test_golden_bits_of_this_machine(tmp_path):
    """Link the levels of the installation, which took a minute to compile, if it has all of them."""
    is_x86 = platform.machine() == "x86_64"
    tests = ("levels", "refused-tiles", "emulated-amx") if is_x86 else ("levels",)
    if (INSTALLED / "kernels" / "libsimd_amx_twin.a").exists():
        output = meson_test(INSTALLED, tests)
    else:
        output = meson_test(tmp_path, tests, "-Damx_twin=true", CC="gcc")
    assert "scalar: ok" in output
    if is_x86:
        assert "refuses tile instructions (SIGILL)" in output
        assert "the self-test found wrong sums" not in output
        assert "a peak counts other operations than it does" not in output
        has_amx = "the processor runs tile instructions itself" in output  # the kernel may refuse them
        assert ("avx512-vnni-bf16: ok" in output) == ("amx: ok" in output or has_amx)
        assert_x86_levels(output)


@lacks("clang", "meson")
def test_golden_bits_of_clang(tmp_path):
    output = meson_test(tmp_path, ("levels",), "-Damx_twin=true", CC="clang")
    assert "scalar: ok" in output
    if platform.machine() == "x86_64":
        assert_x86_levels(output)


def assert_x86_levels(output: str) -> None:
    assert "avx2: " in output
    assert ("avx512-vnni-bf16: ok" in output) == ("amx-twin: ok" in output)
