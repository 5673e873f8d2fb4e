"""The linters and the type checker as tests: what they would say is what the failure shows.

They check the files in the tree, except for the public face, which is imported as a user would. The pre-commit hooks
run these same tools.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import quire

ROOT = Path(__file__).resolve().parent.parent
TOOLS = Path(sys.executable).parent
PACKAGES = ("kernels", "pager", "runtime", "scheduler")
VIEW = ROOT / ".mypy_cache" / "view"  # at a fixed place, so that mypy's cache holds from run to run

FACE = {
    "LLM",
    "Accepted",
    "AsyncClient",
    "Cancelled",
    "Client",
    "CompletionOutput",
    "ConfigError",
    "ContextLengthExceeded",
    "CorruptCheckpoint",
    "DeadlineExceeded",
    "GenerateRequest",
    "GenerationFailed",
    "InvalidRequest",
    "MissingDependency",
    "MissingTensor",
    "ModelError",
    "ModelNotFound",
    "OutputChunk",
    "Overloaded",
    "Progress",
    "ProtocolError",
    "Quarantined",
    "QuireError",
    "QuotaExceeded",
    "RequestNotFound",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "ServedModel",
    "TokenLogprobs",
    "Unauthenticated",
    "Unavailable",
    "UnsupportedModel",
    "Usage",
    "WrongTensor",
}


def test_ruff_has_nothing_to_say():
    run("ruff", "check", "--quiet", "--output-format=concise", ".")


def test_every_file_is_formatted():
    run("ruff", "format", "--check", "--quiet", "--diff", ".")


def test_types_hold():
    lay_out_as_installed()
    config, cache = ROOT / "pyproject.toml", ROOT / ".mypy_cache"
    run("mypy", f"--config-file={config}", f"--cache-dir={cache}", "--no-error-summary", "-p", "quire", cwd=VIEW)


def test_cython_lint_has_nothing_to_say():
    run("cython-lint", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "kernels").glob("*.p[yx][xd]")))


def test_the_public_face_is_what_it_says():
    assert set(quire.__all__) == FACE
    for name in FACE:
        assert getattr(quire, name).__doc__, f"{name} has no docstring"


def lay_out_as_installed():
    """`quire` as a package of links into the tree, the public face as its `__init__.py`."""
    package = VIEW / "quire"
    package.mkdir(parents=True, exist_ok=True)
    link(package / "__init__.py", ROOT / "runtime" / "public.py")
    for name in PACKAGES:
        link(package / name, ROOT / name)


def link(path, target):
    if not path.is_symlink():
        path.symlink_to(target)
    assert path.resolve() == target, f"{path} points elsewhere; remove {VIEW}"


def run(tool, *arguments, cwd=ROOT):
    """Any output or failure is the test's failure message. cython-lint looks for pycodestyle on PATH."""
    done = subprocess.run(
        [TOOLS / tool, *arguments], cwd=cwd, env={"PATH": f"{TOOLS}:/usr/bin:/bin"}, capture_output=True, text=True
    )
    said = (done.stdout + done.stderr).strip()
    if done.returncode or said:
        pytest.fail(f"{tool} {' '.join(arguments)}\n{said}", pytrace=False)
