"""The package `quire` itself: its exports, and that importing it is cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest
import quire
from quire.runtime.common import errors


def test_every_error_class_is_exported() -> None:
    declared = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert len(declared) == 24
    assert declared <= set(quire.__all__)


def test_every_name_has_a_docstring_of_its_own() -> None:
    for name in quire.__all__:
        assert vars(getattr(quire, name)).get("__doc__"), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'quire' has no attribute 'Llm'"):
        quire.Llm  # noqa: B018


def test_dir_lists_names_that_are_not_imported_yet() -> None:
    script = "import quire; assert set(quire.__all__) <= set(dir(quire))"
    subprocess.run([sys.executable, "-P", "-c", script], check=True)


def test_importing_quire_loads_no_model_code() -> None:
    script = """
import sys, quire
quire.Unavailable
heavy = ("numpy", "jinja2", "tokenizers", "asyncio", "structlog", "quire.kernels", "quire.scheduler")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-P", "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
