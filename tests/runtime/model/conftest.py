"""Fixtures that run a model over a token sequence, and copy golden folders to damage them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from quire.kernels.ops import aligned
from quire.kernels.pool import Pool
from quire.kernels.program import Program
from quire.runtime.model import DecoderSpec, PackedModel, kv_layout, read_spec
from quire.runtime.model.program.arena_layout import Lifetime

from tests.support.reference import ReferenceProgram

GOLDENS = Path(__file__).parents[2] / "goldens"
PAGE_SIZE = 16

Logits = npt.NDArray[np.float32]
ConfigEdit = Callable[[dict[str, Any]], object]

MINIMAL = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
}


@pytest.fixture
def goldens() -> Path:
    return GOLDENS


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[..., Path]:
    """Copy a golden folder and edit its config.json: `model_folder("llama", edit)`."""

    def copy(name: str, edit: ConfigEdit = lambda config: None) -> Path:
        folder = tmp_path / name
        shutil.copytree(GOLDENS / name, folder)
        config = json.loads((folder / "config.json").read_text())
        edit(config)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return copy


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., DecoderSpec]:
    """Read a minimal config of one model type with the given keys: `read("mixtral", num_local_experts=4)`."""

    def read(model_type: str, **keys: Any) -> DecoderSpec:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **MINIMAL, **keys}))
        return read_spec(tmp_path)

    return read


@pytest.fixture
def compute_logits() -> Callable[..., Logits]:
    return kernel_logits


def kernel_logits(
    model: PackedModel, token_ids: Sequence[int], *, kv_dtype: Any = "f32", chunk: int | None = None
) -> Logits:
    """Compute the logits of every token of one sequence by the kernels."""
    chunk = chunk or len(token_ids)
    plan = model.compile(max_positions=len(token_ids), max_tokens=chunk, max_samples=chunk)
    layout = kv_layout(model.spec, kv_dtype, PAGE_SIZE)
    num_pages = len(layout.groups) * pages_of(token_ids)
    program = Program(
        plan.ops,
        plan.arena_bytes,
        np.zeros(num_pages * layout.page_bytes, np.uint8),
        layout,
        num_pages,
        Pool(1),
        max_rows=chunk,
        max_samples=chunk,
        max_sequences=1,
        vocab_size=model.spec.vocab_size,
    )
    view = program.view(plan.logits)
    return run_in_chunks(program, token_ids, num_pages, chunk, lambda rows: view[:rows, : model.spec.vocab_size].copy())


@pytest.fixture
def reference_logits() -> Callable[..., Logits]:
    """Compute the logits of every token of one sequence by the numpy reference, in float64."""

    def compute(model: PackedModel, token_ids: Sequence[int]) -> Logits:
        count = len(token_ids)
        plan = model.compile(max_positions=count, max_tokens=count, max_samples=count)
        num_pages = len(kv_layout(model.spec, "f32", PAGE_SIZE).groups) * pages_of(token_ids)
        program = ReferenceProgram(plan.ops, "f32", PAGE_SIZE, num_pages)
        return run_in_chunks(program, token_ids, num_pages, count, lambda rows: program.regions[plan.logits][:rows])

    return compute


def run_in_chunks(
    program: Program | ReferenceProgram,
    token_ids: Sequence[int],
    num_pages: int,
    chunk: int,
    read: Callable[[int], Any],
) -> Logits:
    """Run a sequence in chunks; each layer group keeps all of its pages."""
    pages = np.arange(num_pages, dtype=np.int32)[::-1].copy()
    page_start = np.arange(0, num_pages + 1, pages_of(token_ids), dtype=np.int32)
    out = []
    for first in range(0, len(token_ids), chunk):
        ids = np.asarray(token_ids[first : first + chunk], np.int32)
        rows = np.arange(len(ids), dtype=np.int32)
        program.run(ids, _ints(0, len(ids)), _ints(first), pages, page_start, rows)
        out.append(read(len(ids)))
    return np.concatenate(out)


def max_live_bytes(values: Sequence[Lifetime]) -> int:
    """Return the most bytes that are live at one op: no arena can be smaller."""
    ops = {value.first for value in values}
    return max((sum(aligned(v.nbytes) for v in values if v.first <= op <= v.last) for op in ops), default=0)


def pages_of(token_ids: Sequence[int]) -> int:
    """Return the number of pages of one layer group."""
    return -(-len(token_ids) // PAGE_SIZE)


def _ints(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)
