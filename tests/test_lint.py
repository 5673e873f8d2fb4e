"""Run the linters and the type checker, as the pre-commit hooks do; a failure shows their output.

The test of the public API imports the installed package, as users do.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import quire

ROOT = Path(__file__).resolve().parent.parent
TOOLS = Path(sys.executable).parent
PACKAGES = ("kernels", "pager", "runtime", "scheduler")
VIEW = ROOT / ".mypy_cache" / "view"  # a fixed path, so that mypy can reuse its cache in the next run

PUBLIC_NAMES = {
    "ChatOptions",
    "Delta",
    "ToolCall",
    "ToolChoice",
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
    "NotOpen",
    "OutputChunk",
    "Overloaded",
    "Progress",
    "ProtocolError",
    "Quarantined",
    "QuireError",
    "QuotaExceeded",
    "RequestNotFound",
    "SnapshotNotSaved",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "ServedModel",
    "StructuredOutputs",
    "TLSError",
    "TokenLogprobs",
    "Unauthenticated",
    "Unavailable",
    "UnsupportedModel",
    "Usage",
    "WrongTensor",
}


def test_ruff_check_passes():
    run("ruff", "check", "--quiet", "--output-format=concise", ".")


def test_every_file_is_formatted():
    run("ruff", "format", "--check", "--quiet", "--diff", ".")


def test_mypy_passes():
    lay_out_as_installed()
    flags = [f"--config-file={ROOT / 'pyproject.toml'}", f"--cache-dir={ROOT / '.mypy_cache'}", "--no-error-summary"]
    run("mypy", *flags, "-p", "quire", "-p", "tests.support", cwd=VIEW)


def test_cython_lint_passes():
    run("cython-lint", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "kernels").glob("*.p[yx][xd]")))


def test_the_public_api_is_documented():
    assert set(quire.__all__) == PUBLIC_NAMES
    for name in PUBLIC_NAMES:
        assert getattr(quire, name).__doc__, f"{name} has no docstring"


def lay_out_as_installed():
    """Create `quire`, with runtime/public.py as its `__init__.py`, and `tests` as symbolic links into the tree."""
    package = VIEW / "quire"
    package.mkdir(parents=True, exist_ok=True)
    link(package / "__init__.py", ROOT / "runtime" / "public.py")
    for name in PACKAGES:
        link(package / name, ROOT / name)
    link(VIEW / "tests", ROOT / "tests")


def link(path, target):
    if not path.is_symlink():
        path.symlink_to(target)
    assert path.resolve() == target, f"{path} is a link to another tree; remove {VIEW}"


def run(tool, *arguments, cwd=ROOT):
    """Run a tool and fail the test on any output. cython-lint needs the tools on PATH: it runs pycodestyle."""
    done = subprocess.run(
        [TOOLS / tool, *arguments], cwd=cwd, env={"PATH": f"{TOOLS}:/usr/bin:/bin"}, capture_output=True, text=True
    )
    output = (done.stdout + done.stderr).strip()
    if done.returncode or output:
        pytest.fail(f"{tool} {' '.join(arguments)}\n{output}", pytrace=False)
