"""One name, one meaning: class names are unique, constants have one value, and shared definitions exist once."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [
    path for package in ("kernels", "pager", "scheduler", "runtime") for path in sorted((ROOT / package).rglob("*.py"))
]
FAMILY_FOLDERS = ("runtime/model/families/", "runtime/model/encoder/")  # each module describes one family


def constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield name and value of each public module constant, without type variables."""
    for node in tree.body:
        match node:
            case ast.Assign(targets=targets, value=value):
                pairs = [(target, value) for target in targets]
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                pairs = [(target, value)]
            case _:
                continue
        for target, value in pairs:
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs += zip(target.elts, value.elts, strict=False)
            elif isinstance(target, ast.Name) and is_constant(target.id, value):
                yield target.id, value_text(value)


def is_constant(name: str, value: ast.expr) -> bool:
    return re.fullmatch("[A-Z][A-Z0-9_]*", name) is not None and not ast.unparse(value).startswith("TypeVar(")


def value_text(value: ast.expr) -> str:
    """Return a constant expression's value, so that `1 << 16` and `64 << 10` are equal; else its source."""
    is_literal = not any(isinstance(node, ast.Name | ast.Call) for node in ast.walk(value))
    return repr(eval(ast.unparse(value))) if is_literal else ast.unparse(value)


def test_public_class_names_are_unique():
    places = defaultdict(list)
    for path in SOURCES:
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert len(places) > 200
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_a_constant_has_one_value_in_all_modules():
    values = defaultdict(dict)
    for path in SOURCES:
        module = path.relative_to(ROOT).as_posix()
        is_family = module.startswith(FAMILY_FOLDERS)
        for name, value in constants(ast.parse(path.read_text("utf-8"))):
            values[name].setdefault("a family's own" if is_family else value, []).append(module)
    assert len(values) > 800
    assert {name: found for name, found in values.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("the finish reasons", r"^FinishReason\b.*=.*Literal"),
        ("the length prefix of frames", r"struct\.Struct\(\">I\"\)"),
        ("the detection of stalls", r"^class \w*(Stall|Progress)\w*Detector\b"),
        ("the chain of prefix keys", r"\bsha256\(parent\b"),
        ("reading a file of the system", r"except OSError:\n\s+return \"\"$"),
        ("percentiles", r"^def percentile\("),
    ],
)
def test_a_shared_definition_exists_once(what: str, pattern: str):
    found = [
        str(path.relative_to(ROOT)) for path in SOURCES for _ in re.finditer(pattern, path.read_text("utf-8"), re.M)
    ]
    assert len(found) == 1, f"{what}: {found}"
