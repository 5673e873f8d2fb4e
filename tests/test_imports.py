"""Imports only go down: between packages, between the layers of runtime/, and to an allowed set of distributions.

The source files are parsed, not imported. In Cython files both `import` and `cimport` count.
"""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = ROOT / "runtime" / "public.py"  # installed as quire/__init__.py
PACKAGES = ("pager", "kernels", "scheduler", "runtime")

ALLOWED_PACKAGES = {  # package -> the packages that it may import besides itself
    "pager": set(),
    "kernels": set(),
    "scheduler": {"pager"},
    "runtime": {"scheduler", "kernels", "pager"},
}

LAYERS = """
6  cli/       one file per command                    ray/       on Ray Serve
5  cluster/   engine processes of other machines      tools/     bench, loadtest, planning, simulation, traffic
4  server/    msgpack, openai, anthropic, ollama       workers/   engine processes    llm.py   without a server
3  engine/    input, core, output, text, structured    client/    AsyncClient, Client    hub/    models by name
2  model/     config, families, weights, runner    protocol/   frames, codec    net/   sockets, TLS
1  common/    errors, types, config, settings, logs
"""  # packages of runtime/; layers import only layers below. ARCHITECTURE.md and README.md must show the same lines.

LAYER_OF = {
    name: int(line[0]) for line in LAYERS.strip().splitlines() for name in re.findall(r"\b(\w+)(?:/|\.py)(?=\s)", line)
} | {"public": 7, "__main__": 7}

THIRD_PARTY = {  # package -> what it may import besides the standard library; runtime may import anything
    "pager": {"numpy"},
    "kernels": {"numpy", "cython", "cpython", "libc"},
    "scheduler": set(),
}

ONLY_IN = {"ray": ("runtime", "ray")}  # optional distribution -> the only place that may import it

Module = tuple[str, ...]  # ("runtime", "engine", "facade")


def sources(package: str) -> Iterator[Path]:
    for pattern in ("*.py", "*.pyi", "*.pyx", "*.pxd", "*.pxi"):
        yield from (path for path in (ROOT / package).rglob(pattern) if "build" not in path.parts)


def module_of(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path: Path, text: str) -> set[Module]:
    """Return the absolute names that the file imports, without the leading `quire`."""
    package = () if path == PUBLIC else path.relative_to(ROOT).parent.parts
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
    """Return the module or member that `from <dots> import <name>` in `package` refers to."""
    level = len(dots) - len(dots.lstrip("."))
    base = package[: len(package) - level + 1] if level else ()
    path = tuple(part for part in dots.lstrip(".").split(".") if part)
    return (*base, *path, name)


def layer_of(module: Module) -> int:
    assert module[1] in LAYER_OF, f"runtime/{module[1]} is in no layer: add it to LAYERS, as low as its imports allow"
    return LAYER_OF[module[1]]


def violation(importer: Module, imported: Module) -> str | None:
    """Return an error message if `importer` may not import `imported`, else None."""
    source = importer[0]
    target = imported[0]
    edge = f"{'.'.join(importer)} -> {'.'.join(imported)}"
    if target not in PACKAGES:
        if importer[:2] != ONLY_IN.get(target, importer[:2]):
            return f"{edge}: only {'/'.join(ONLY_IN[target])} may import {target}"
        return third_party_violation(source, target, edge)
    if target != source:
        return None if target in ALLOWED_PACKAGES[source] else f"{edge}: {source} may not import {target}"
    if source == "runtime" and len(importer) > 1 and len(imported) > 1:
        return layer_violation(importer, imported, edge)
    return None


def third_party_violation(source: str, target: str, edge: str) -> str | None:
    allowed = THIRD_PARTY.get(source)
    if allowed is None or target in sys.stdlib_module_names or target in allowed:
        return None
    return f"{edge}: {source} may use only the standard library and {sorted(allowed)}"


def layer_violation(importer: Module, imported: Module, edge: str) -> str | None:
    if importer[1] == imported[1] or layer_of(importer) > layer_of(imported):
        return None
    return f"{edge}: not a lower layer"


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_only_go_down(package: str) -> None:
    found = [
        wrong
        for path in sources(package)
        for imported in sorted(imports(path, path.read_text()))
        if (wrong := violation(module_of(path), imported))
    ]
    assert not found, "\n".join(found)


def test_there_are_no_import_cycles() -> None:
    """Check that no module imports itself through other modules. An `__init__.py` counts as a module."""
    modules = {module_of(path): path for package in PACKAGES for path in sources(package)}
    imports_of = {
        name: {
            target
            for each in imports(path, path.read_text())
            if (target := module_named(each, modules)) not in (None, name)
        }
        for name, path in modules.items()
    }
    sorter = graphlib.TopologicalSorter(imports_of)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(".".join(name) for name in reversed(error.args[1])))


def module_named(imported: Module, modules: Container[Module]) -> Module | None:
    """Return the module that an imported name is, or is defined in."""
    return next((name for name in (imported, imported[:-1]) if name in modules), None)


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md"])
def test_documents_show_the_same_layers(document: str) -> None:
    assert LAYERS in (ROOT / document).read_text("utf-8")


def test_every_package_has_imports() -> None:
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
        ("runtime/common/errors.py", "from ..protocol import codec", "not a lower layer"),
        ("runtime/engine/engine.py", "from ..client.async_client import AsyncClient", "not a lower layer"),
        ("runtime/server/server.py", "from ..workers.engine_pool import EnginePool", "not a lower layer"),
        ("runtime/model/decoder.py", "from ..engine.engine import Engine", "not a lower layer"),
        ("runtime/engine/facade.py", "from ..tools import bench", "not a lower layer"),
        ("runtime/common/types.py", "from ..engine import facade", "not a lower layer"),
        ("runtime/llm.py", "from . import public", "not a lower layer"),
        ("runtime/cli/serve.py", "def f():\n    from ray import serve", "only runtime/ray may import ray"),
        ("runtime/cluster/cluster.py", "import ray.serve", "only runtime/ray may import ray"),
        ("runtime/ray/members.py", "from ..cli import serve", "not a lower layer"),
    ],
)
def test_an_import_upwards_is_found(file: str, text: str, wrong: str) -> None:
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
        ("runtime/engine/engine.py", "from ...scheduler import Scheduler\nfrom ..common.errors import QuireError"),
        ("runtime/model/families/llama.py", "from ..spec import Spec\nfrom ..program.builder import Builder"),
        ("runtime/cli/main.py", "from ..server.server import serve\nimport cyclopts"),
        ("runtime/ray/router.py", "from ray.serve.request_router import RequestRouter\nfrom . import members"),
        ("runtime/__init__.py", "from .common.errors import QuireError"),
        ("runtime/public.py", "from .runtime.llm import LLM"),
    ],
)
def test_an_import_downwards_is_accepted(file: str, text: str) -> None:
    path = ROOT / file
    found = imports(path, text)
    assert found
    assert [violation(module_of(path), imported) for imported in found] == [None] * len(found)


def test_a_package_without_a_layer_is_refused() -> None:
    with pytest.raises(AssertionError, match="runtime/attic is in no layer"):
        violation(("runtime", "engine", "engine"), ("runtime", "attic", "box"))
