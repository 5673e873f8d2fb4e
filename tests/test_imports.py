"""Imports only go down: between the packages, between runtime's floors, and out to as few other packages as possible.

Every source file is read, none is imported; Cython files are read for both `import` and `cimport`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FACE = ROOT / "runtime" / "public.py"  # installed as quire/__init__.py
PACKAGES = ("pager", "kernels", "scheduler", "runtime")

BELOW = {  # package -> the packages it may import besides itself
    "pager": set(),
    "kernels": set(),
    "scheduler": {"pager"},
    "runtime": {"scheduler", "kernels", "pager"},
}

FLOORS = (  # of runtime, top to bottom; each imports only what lies below it, or itself
    ("public",),
    ("cli",),
    ("commands",),
    ("simulation",),
    ("bench",),
    ("server", "llm", "loadtest", "supervision"),
    ("monitoring",),
    ("engine", "client"),
    ("execution",),
    ("models",),
    ("program", "weights"),
    ("wire", "text"),
    ("generation", "loop_thread", "plotting"),
    ("settings", "traffic"),
    ("config",),
    ("errors", "logs"),
)

THIRD_PARTY = {  # what the lower packages may use besides the standard library
    "pager": {"numpy"},
    "kernels": {"numpy", "cython", "cpython", "libc"},
    "scheduler": set(),
}

Module = tuple[str, ...]  # ("runtime", "engine", "facade")


def sources(package: str) -> Iterator[Path]:
    for pattern in ("*.py", "*.pyi", "*.pyx", "*.pxd", "*.pxi"):
        yield from (path for path in (ROOT / package).rglob(pattern) if "build" not in path.parts)


def module_of(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path: Path, text: str) -> set[Module]:
    """Absolute names of everything the file imports; `quire` itself is left out of them."""
    package = () if path == FACE else path.relative_to(ROOT).parent.parts
    if path.suffix in (".py", ".pyi"):
        found = python_imports(ast.parse(text), package)
    else:
        found = cython_imports(text, package)
    return {name[1:] if name[0] == "quire" else name for name in found if name and name != ("quire",)}


def python_imports(tree: ast.Module, package: Module) -> set[Module]:
    found: set[Module] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {tuple(alias.name.split(".")) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            dots = "." * node.level + (node.module or "")
            found |= {resolve(dots, alias.name, package) for alias in node.names}
    return found


def cython_imports(text: str, package: Module) -> set[Module]:
    found: set[Module] = set()
    statements = re.sub(r"\\\n", " ", re.sub(r"#.*", "", text))
    for dots, names in re.findall(r"^\s*from\s+([\w.]+)\s+c?import\s+(\([^)]*\)|[^\n]+)", statements, re.M):
        found |= {resolve(dots, name.split()[0], package) for name in names.strip("() \n").split(",") if name.strip()}
    for names in re.findall(r"^\s*c?import\s+([^\n]+)", statements, re.M):
        found |= {tuple(name.split()[0].split(".")) for name in names.split(",")}
    return found


def resolve(dots: str, name: str, package: Module) -> Module:
    """The module or member that `from <dots> import <name>` in `package` means."""
    level = len(dots) - len(dots.lstrip("."))
    base = package[: len(package) - level + 1] if level else ()
    path = tuple(part for part in dots.lstrip(".").split(".") if part)
    return (*base, *path, name)


def floor_of(module: Module) -> int:
    room = module[1]
    for floor, rooms in enumerate(FLOORS):
        if room in rooms:
            return floor
    raise AssertionError(f"runtime/{room} is on no floor: add it to FLOORS, as low as its imports allow")


def violation(importer: Module, imported: Module) -> str | None:
    """What is wrong with this arrow, if anything."""
    source, target = importer[0], imported[0]
    arrow = f"{'.'.join(importer)} -> {'.'.join(imported)}"
    if target not in PACKAGES:
        return foreign_violation(source, target, arrow)
    if target != source:
        return None if target in BELOW[source] else f"{arrow}: {source} may not import {target}"
    if source == "runtime" and len(importer) > 1 and len(imported) > 1:
        return floor_violation(importer, imported, arrow)
    return None


def foreign_violation(source: str, target: str, arrow: str) -> str | None:
    allowed = THIRD_PARTY.get(source)
    if allowed is None or target in sys.stdlib_module_names or target in allowed:
        return None
    return f"{arrow}: {source} may use only the standard library and {sorted(allowed)}"


def floor_violation(importer: Module, imported: Module, arrow: str) -> str | None:
    if importer[1] == imported[1] or floor_of(importer) < floor_of(imported):
        return None
    return f"{arrow}: not downwards"


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_only_go_down(package: str) -> None:
    found = [
        wrong
        for path in sources(package)
        for imported in sorted(imports(path, path.read_text()))
        if (wrong := violation(module_of(path), imported))
    ]
    assert not found, "\n".join(found)


def test_there_is_something_to_walk() -> None:
    for package in PACKAGES:
        assert any(imports(path, path.read_text()) for path in sources(package)), package


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("pager/pool.py", "from ..scheduler.plan import StepPlan", "pager may not import scheduler"),
        ("pager/pool.py", "import quire.kernels", "pager may not import kernels"),
        ("pager/pool.py", "def f():\n    from quire import runtime", "pager may not import runtime"),
        ("pager/arena.py", "import torch", "only the standard library"),
        ("scheduler/plan.py", "import numpy as np", "only the standard library"),
        ("scheduler/plan.py", "from .. import kernels", "scheduler may not import kernels"),
        ("kernels/linear.pyx", "from ..pager.layout cimport thing", "kernels may not import pager"),
        ("kernels/linear.pyx", "cimport quire.pager.layout as layout", "kernels may not import pager"),
        (
            "kernels/linear.pyx",
            "from quire.scheduler cimport (\n    a,\n    b as c,\n)",
            "kernels may not import scheduler",
        ),
        ("runtime/errors.py", "from .wire import codec", "not downwards"),
        ("runtime/engine/engine.py", "from ..client.aio import AsyncClient", "not downwards"),
        ("runtime/models/decoder.py", "from ..execution.executor import Executor", "not downwards"),
        ("runtime/program/builder.py", "from ..models import spec", "not downwards"),
        ("runtime/generation.py", "from .engine import facade", "not downwards"),
        ("runtime/llm.py", "from . import public", "not downwards"),
    ],
)
def test_an_arrow_upwards_is_found(file: str, text: str, wrong: str) -> None:
    path = ROOT / file
    found = [violation(module_of(path), imported) for imported in imports(path, text)]
    assert all(each is not None and wrong in each for each in found)
    assert found


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("scheduler/scheduler.py", "from ..pager import Pager"),
        ("scheduler/scheduler.py", "import os, time"),
        ("pager/arena.py", "import numpy.typing as npt"),
        ("kernels/attention.pyx", "from libc.stdint cimport int32_t\nfrom .pool cimport run  # shared\ncimport cython"),
        ("runtime/engine/engine.py", "from ...scheduler import Scheduler\nfrom ..errors import QuireError"),
        ("runtime/models/llama.py", "from .spec import Spec\nfrom ..program.builder import Builder"),
        ("runtime/cli.py", "from .server.server import serve\nimport cyclopts"),
        ("runtime/__init__.py", "from .errors import QuireError"),
        ("runtime/public.py", "from .runtime.llm import LLM"),
    ],
)
def test_an_arrow_downwards_is_fine(file: str, text: str) -> None:
    path = ROOT / file
    found = imports(path, text)
    assert found
    assert [violation(module_of(path), imported) for imported in found] == [None] * len(found)


def test_a_room_without_a_floor_is_refused() -> None:
    with pytest.raises(AssertionError, match="runtime/attic is on no floor"):
        violation(("runtime", "engine", "engine"), ("runtime", "attic", "box"))
