"""One name, one meaning: public class names are unique, and shared definitions exist once."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [
    path for package in ("kernels", "pager", "scheduler", "runtime") for path in sorted((ROOT / package).rglob("*.py"))
]


def test_public_class_names_are_unique():
    places = defaultdict(list)
    for path in SOURCES:
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert len(places) > 200
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


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
