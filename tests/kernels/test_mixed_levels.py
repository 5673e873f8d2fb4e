"""Programs with functions of several levels have the bits of one level, and other names and levels are refused."""

import random

import numpy as np
import pytest
from quire.kernels import supported_levels
from quire.kernels.isa import EQUAL_FUNCTIONS, row_class


def step_of(toy):
    """Return a step with a chunk of 70 rows and sequences with one row each."""
    tables = np.arange(48, dtype=np.int32).reshape(8, 6)
    ids = np.random.default_rng(3).integers(0, 333, 70)
    return toy.step((ids, 0, tables[0]), *[(ids[i : i + 1], 0, tables[i]) for i in range(1, 8)])


def bits_of(toy):
    toy.program.run(**step_of(toy))
    return toy.program.view(toy.logits)[:8].tobytes()


@pytest.mark.parametrize(
    ("weights", "kv"), [("f32", "f32"), ("f32", "f16"), ("q8", "int8"), ("q4", "int8"), ("q4_k", "f32")]
)
def test_a_program_of_functions_of_random_levels_has_the_bits_of_one_level(toy, weights, kv):
    sizes = {"hidden": 256, "intermediate": 256, "head_dim": 32, "heads": 8}
    model = toy(weights=weights, kv=kv, **sizes)
    expected = bits_of(model)
    for seed in range(6):
        rng = random.Random(seed)
        model.program.choose({name: rng.choice(supported_levels()) for name in EQUAL_FUNCTIONS})
        assert bits_of(model) == expected


def test_choices_replace_earlier_ones_and_are_taken_whole_or_not_at_all(toy):
    model = toy(weights="q8", kv="int8")
    model.program.choose({"linear q8 37-": "scalar"})
    with pytest.raises(ValueError, match="unknown function 'linear bf16 1'; programs have linear f32 1, "):
        model.program.choose({"linear q8 1": "scalar", "linear bf16 1": "scalar"})
    with pytest.raises(ValueError, match="unknown ISA level 'mmx'"):
        model.program.choose({"linear q8 1": "mmx"})
    assert len(bits_of(model)) > 0


def test_functions_are_named_by_dtype_and_class_of_rows_and_none_is_of_bf16():
    of_rows = [name for name in EQUAL_FUNCTIONS if " " in name]
    assert of_rows[:5] == ["linear f32 1", "linear f32 2-7", "linear f32 8-15", "linear f32 16-36", "linear f32 37-"]
    assert not [name for name in EQUAL_FUNCTIONS if "bf16" in name.split()]
    classes = {rows: row_class(rows) for rows in (1, 2, 7, 8, 15, 16, 36, 37, 192)}
    assert list(classes.values()) == ["1", "2-7", "2-7", "8-15", "8-15", "16-36", "16-36", "37-", "37-"]


def test_a_range_of_ops_runs_alone_and_other_ranges_are_refused(toy):
    model = toy()
    step = step_of(model)
    for first in range(len(model.ops)):
        model.program.run(**step, first=first, end=first + 1)
    parts = model.program.view(model.logits)[:8].tobytes()
    assert parts == bits_of(model)
    with pytest.raises(ValueError, match=f"ops 2 to {len(model.ops) + 1} are not a range of the {len(model.ops)} ops"):
        model.program.run(**step, first=2, end=len(model.ops) + 1)
