"""Layers whose KV heads differ in number and size, and layers that read the keys and values of an earlier layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from quire.kernels.ops import Attention

from tests.support.grids import grid

from .test_program import LEVELS, pages, tokens, tolerance

# Sliding layers have 2 KV heads of 24, full layers 1 of 96 whose values are its keys. The last two store nothing.
MIXED = {
    "windows": (37, 37, 0, 37, 0),
    "shapes": ((2, 24), (2, 24), (1, 96), (2, 24), (1, 96)),
    "sources": (0, 1, 2, 1, 2),
}
DTYPES = [("f32", "f32"), ("bf16", "bf16"), ("rotated", "int8")]


def tables(first: int, count: int) -> list[np.ndarray]:
    """Return a table for each of the two layer groups."""
    return [pages(*range(at, at + count)) for at in (first, first + count)]


@pytest.mark.parametrize(("dtypes", "threads", "isa"), grid(DTYPES, [1, 3], LEVELS))
def test_layers_of_several_shapes_match_the_reference(toy, dtypes, threads, isa):
    weights, kv = dtypes
    model = toy(weights=weights, kv=kv, isa=isa, threads=threads, **MIXED)
    a, b = tokens(100, 1), tokens(9, 2)
    tables_a, tables_b = tables(0, 10), tables(20, 2)
    for step in ([(a[:70], 0, tables_a)], [(b, 0, tables_b), (a[70:99], 70, tables_a)], [(a[99:], 99, tables_a)]):
        got, want = model.run(*step), model.run_reference(*step)
        assert np.abs(got - want).max() <= 2 * tolerance(weights, kv) * np.ptp(want)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("kv", ["f32", "bf16", "int8"])
def test_same_bits_at_every_chunking_and_place_of_several_shapes(toy, kv, isa):
    """A decode step of 300 tokens divides the layers with one KV head, and those with two, by split."""
    prompt = tokens(300)

    def last_logits(chunk: int, first_page: int, threads: int) -> bytes:
        model = toy(kv=kv, isa=isa, threads=threads, num_pages=60, **MIXED)
        of = tables(first_page, 10)
        for first in range(0, 299, chunk):
            model.run((prompt[first : min(first + chunk, 299)], first, of))
        return model.run((prompt[299:], 299, of)).tobytes()

    want = last_logits(64, 0, 1)
    assert last_logits(100, 7, 2) == want
    assert last_logits(37, 22, 3) == want


def test_a_layer_that_reads_another_layer_writes_nothing(toy):
    """Without its storing layers, the program leaves every byte of the pages as it is."""
    model = toy(**MIXED)
    step = (tokens(80), 0, tables(0, 3))
    model.run(step)
    readers = [op for op in model.ops if not isinstance(op, Attention) or not op.stores]
    assert sum(isinstance(op, Attention) for op in readers) == 2
    before = model.kv_memory.copy()
    model.ops = readers
    model.program = model.bind()
    model.run(step)
    for row in range(3):
        model.run((tokens(1), 80 + row, step[2]))
    assert np.array_equal(model.kv_memory, before)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_kv_heads": 1}, "layer 0 with 1 x 24 KV heads does not fit a group of 2 layers with 2 x 24"),
        ({"head_dim": 48}, "layer 0 with 2 x 48 KV heads does not fit"),
        ({"rotary_span": 20}, "rotary_span must be even and 24 to 24, not 20"),
        ({"rotary_span": 26}, "rotary_span must be even and 24 to 24, not 26"),
        ({"stores": False}, r"has 240 columns, not 144|144"),
        ({"values_are_keys": True}, "192"),
    ],
)
def test_attention_that_does_not_fit_its_group_is_refused(toy, changes, complaint):
    model = toy(**MIXED)
    (at, *_) = [i for i, op in enumerate(model.ops) if isinstance(op, Attention)]
    model.ops[at] = replace(model.ops[at], **changes)
    with pytest.raises(ValueError, match=complaint):
        model.bind()
