"""The release: its workflow runs targets of the Makefile alone, and a wheel is checked before it is published."""

from __future__ import annotations

import importlib.util
import re
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.deploy.queries import DEPLOY, ROOT

WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
NAME = "quire-0.1.0-cp311-abi3-manylinux_2_28_x86_64.whl"
LEVELS = b"scalar avx2 avx512-vnni-bf16 amx"


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", DEPLOY / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel(folder: Path, kernels: bytes, weights: bytes = b"", other: bytes = b"", name: str = NAME) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("quire/kernels/isa.abi3.so", kernels)
        archive.writestr("quire/runtime/demo_model/model.safetensors", weights)
        archive.writestr("quire/other", other)
    return path


def test_every_step_of_the_workflow_is_a_target_of_the_makefile():
    commands = [step["run"] for step in WORKFLOW["jobs"]["release"]["steps"] if "run" in step]
    targets = [command.split()[:2] for command in commands]
    known = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
    assert {name for name, _ in targets} == {"make"}
    assert (
        {"test", "wheels", "check-wheels", "checksums", "docs", "image"} <= {target for _, target in targets} <= known
    )


def test_a_tag_starts_the_workflow_and_nothing_else_does():
    assert WORKFLOW[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true


def test_a_wheel_with_all_levels_is_right_whatever_its_demo_weights_take(release, tmp_path, monkeypatch):
    monkeypatch.setattr(release, "MAX_WHEEL_BYTES", 1000)
    assert list(release.mistakes_in(wheel(tmp_path, LEVELS, weights=bytes(5000)))) == []


def test_a_wheel_of_another_platform_or_size_or_without_a_level_is_refused(release, tmp_path, monkeypatch):
    monkeypatch.setattr(release, "MAX_WHEEL_BYTES", 1000)
    wrong = wheel(tmp_path, b"scalar avx2 amx", other=bytes(5000), name="quire-0.1.0-cp311-abi3-linux_x86_64.whl")
    assert list(release.mistakes_in(wrong)) == [
        "the platform is not manylinux_2_28_x86_64",
        f"{wrong.stat().st_size:,} bytes without demo weights are more than 1,000",
        "there are no kernels of the level avx512-vnni-bf16",
    ]


def test_checksums_have_the_format_of_sha256sum(release, tmp_path, monkeypatch):
    monkeypatch.setattr(release, "DIST", tmp_path)
    (tmp_path / "a.whl").write_bytes(b"abc")
    release.write_checksums()
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert (tmp_path / "SHA256SUMS").read_text() == f"{digest}  a.whl\n"


def test_the_image_is_built_from_the_wheel_alone():
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert [line for line in ignored if not line.startswith("#")] == ["*", "!dist/*.whl"]
