"""Every op against the numpy reference, and promise 1: a row's bits never depend on the rest of the batch."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from quire.kernels import supported_levels
from quire.kernels.ops import AddGiven, Attention, Linear

from tests.support.grids import grid

LEVELS = supported_levels()
PORTABLE = ("scalar", "amx-twin")  # Levels in portable C: ten times as slow, with the loops of the others.
# The reference rounds to bf16 and int8 from float64, the kernels from float32: a tie can fall the other way.
TOLERANCE = {"f32": 2e-6, "bf16": 2e-3, "q8": 1e-2, "rotated": 1e-2, "q4": 1e-2}


def tolerance(weights: str, kv: str) -> float:
    return max(TOLERANCE[weights], {"f32": 0.0, "f16": 1e-3, "bf16": 5e-3, "int8": 1e-2}[kv])


def tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 333, n).astype(np.int32)


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


@pytest.mark.parametrize(
    ("weights", "kv", "window", "isa"),
    grid(["f32", "bf16", "q8", "rotated", "q4"], ["f32", "bf16", "int8"], [0, 37], LEVELS),
)
def test_a_program_matches_the_reference(toy, weights, kv, window, isa):
    model = toy(weights=weights, kv=kv, windows=(window,), isa=isa)
    a, b = tokens(330, 1), tokens(90, 2)
    table_a, table_b = pages(*range(20, 9, -1)), pages(30, 3, 31)
    steps = [
        [(a[:97], 0, table_a), (b[:40], 0, table_b)],
        [(b[40:41], 40, table_b), (a[97:230], 97, table_a)],
        [(b[41:90], 41, table_b), (a[230:330], 230, table_a)],
    ]
    for step in steps:
        want = model.run_reference(*step)
        assert np.abs(model.run(*step) - want).max() <= tolerance(weights, kv) * np.ptp(want)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(
    ("weights", "kv", "rotates"),
    [("f32", "f32", True), ("f32", "f32", False), ("bf16", "bf16", True), ("rotated", "int8", True)],
)
def test_every_option_of_the_ops_matches_the_reference(toy, weights, kv, rotates, isa):
    """Two layers with scales, soft caps, GELU, a norm before an addition, and norms over all heads of a row."""
    model = toy(weights=weights, kv=kv, windows=(0, 37), unusual=True, bias=True, isa=isa)
    if not rotates:
        model.ops = [replace(op, rotary=None) if isinstance(op, Attention) else op for op in model.ops]
        model.program, model.reference.ops = model.bind(), model.ops
    a, b = tokens(100, 1), tokens(9, 2)
    tables_a, tables_b = [pages(*range(10)), pages(*range(10, 20))], [pages(20, 21), pages(22, 23)]
    for step in ([(a[:70], 0, tables_a)], [(b, 0, tables_b), (a[70:99], 70, tables_a)], [(a[99:], 99, tables_a)]):
        got, want = model.run(*step), model.run_reference(*step)
        assert np.abs(got - want).max() <= 3 * tolerance(weights, kv) * np.ptp(want)


@pytest.mark.parametrize(
    ("shape", "dtypes", "isa"),
    grid(
        [(6, 2, 24, "layer"), (5, 1, 18, "rotated"), (8, 2, 256, "rms")],
        [("f32", "f32"), ("bf16", "bf16"), ("rotated", "int8")],
        LEVELS,
    ),
)
def test_gates_and_norms_of_heads_match_the_reference(toy, shape, dtypes, isa):
    heads, kv_heads, head_dim, head_norm = shape
    weights, kv = dtypes
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "head_norm": head_norm}
    model = toy(weights=weights, kv=kv, windows=(0, 37), gated=True, bias=True, isa=isa, **sizes)
    a, b = tokens(100, 1), tokens(9, 2)
    tables_a, tables_b = [pages(*range(10)), pages(*range(10, 20))], [pages(20, 21), pages(22, 23)]
    for step in ([(a[:70], 0, tables_a)], [(b, 0, tables_b), (a[70:99], 70, tables_a)], [(a[99:], 99, tables_a)]):
        got, want = model.run(*step), model.run_reference(*step)
        assert np.abs(got - want).max() <= 2 * tolerance(weights, kv) * np.ptp(want)


@pytest.mark.parametrize("head_norm", ["layer", "rotated"])
def test_norms_over_all_heads_are_rms_norms_before_the_rotation(toy, head_norm):
    model = toy(unusual=True)
    model.ops = [replace(op, head_norm=head_norm) if isinstance(op, Attention) else op for op in model.ops]
    with pytest.raises(ValueError, match=f"is an RMS norm before the rotation, not {head_norm}"):
        model.bind()


def test_positions_end_with_the_scales_of_queries(toy):
    model = toy()
    model.ops = [
        replace(op, query_scales=np.ones(60, np.float32)) if isinstance(op, Attention) else op for op in model.ops
    ]
    model.program = model.bind()
    model.run((tokens(60), 0, pages(0, 1)))
    with pytest.raises(ValueError, match=r"at positions 0\.\.59"):
        model.run((tokens(1), 60, pages(0, 1)))


def test_gates_of_heads_that_are_normed_together_are_refused(toy):
    model = toy(unusual=True)
    model.ops = [replace(op, gated=True) if isinstance(op, Attention) else op for op in model.ops]
    with pytest.raises(ValueError, match="query heads with gates are normed one by one"):
        model.bind()


@pytest.mark.parametrize(
    ("shape", "kv", "isa"),
    grid(
        [(1, 1, 2), (7, 1, 128), (4, 4, 72), (64, 1, 16), (3, 1, 272)],  # query heads, KV heads, their size
        ["f32", "f16", "bf16", "int8"],
        LEVELS,
    ),
)
def test_any_head_shape_matches_the_reference(toy, shape, kv, isa):
    sequence = (tokens(100), 0, pages(5, 4, 3, 2))
    heads, kv_heads, head_dim = shape
    model = toy(kv=kv, heads=heads, kv_heads=kv_heads, head_dim=head_dim, qk_norm=False, isa=isa)
    want = model.run_reference(sequence)
    assert np.abs(model.run(sequence) - want).max() <= tolerance("f32", kv) * np.ptp(want)


@pytest.mark.parametrize(
    ("weights", "widths", "isa"),
    grid(["f32", "bf16", "q8", "rotated", "q4"], [(50, 100), (32, 48), (33, 1), (272, 33)], LEVELS),
)
def test_any_width_with_biases_matches_the_reference(toy, weights, widths, isa):
    hidden, intermediate = widths
    model = toy(weights=weights, hidden=hidden, intermediate=intermediate, bias=True, isa=isa)
    stale = model.program.view(model.activated)
    stale.fill(1)
    sequences = (tokens(70), 0, pages(2, 1, 0)), (tokens(3, 1), 0, pages(7))
    got, want = model.run(*sequences), model.run_reference(*sequences)
    assert np.abs(got - want).max() <= tolerance(weights, "f32") * np.ptp(want)
    if weights != "rotated":  # a rotation mixes columns with padding
        assert not stale[:73, intermediate:].any(), "padding is zero, whatever the memory held before"


@pytest.mark.parametrize(
    ("window", "options", "isa"),
    grid(
        [0, 100],
        [
            ("f32", "f32", False),
            ("bf16", "bf16", False),
            ("q8", "bf16", False),
            ("rotated", "int8", False),
            ("rotated", "int8", True),
            ("q4", "int8", False),
            ("f32", "int8", False),
            ("f32", "f16", True),
        ],
        LEVELS,
    ),
)
def test_same_bits_at_every_chunking_of_a_prompt(toy, window, options, isa):
    weights, kv, unusual = options
    prompt = tokens(300)
    table = pages(*range(7, 17))

    def last_logits(chunk: int) -> bytes:
        gated = not unusual and window > 0
        model = toy(weights=weights, kv=kv, windows=(window,), unusual=unusual, gated=gated, isa=isa)
        for first in range(0, 300, chunk):
            logits = model.run((prompt[first : first + chunk], first, table))
        return logits.tobytes()

    whole = last_logits(150)
    chunks = (7, 64) if isa in PORTABLE else (1, 7, 32, 33, 64, 149)
    assert [chunk for chunk in chunks if last_logits(chunk) != whole] == []


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(
    ("weights", "kv", "unusual"),
    [
        ("f32", "f32", False),
        ("bf16", "bf16", False),
        ("q8", "bf16", False),
        ("rotated", "int8", False),
        ("rotated", "int8", True),
        ("q4", "int8", False),
        ("f32", "f16", True),
    ],
)
def test_same_bits_in_any_batch_composition(toy, weights, kv, unusual, isa):
    """A sequence alone, and in the middle of 1 to 32 others."""
    alone = toy(weights=weights, kv=kv, unusual=unusual, isa=isa)
    prompt = tokens(40)
    table = pages(9, 2)
    alone.run((prompt[:39], 0, table))
    want = alone.run((prompt[39:], 39, table))[0].tobytes()
    for others in (1, 2, 5, 6, 7, 32):
        crowd = toy(weights=weights, kv=kv, unusual=unusual, isa=isa)
        crowd.run((prompt[:39], 0, table))
        neighbors = [(tokens(1 + i % 3, i + 1), 0, pages(10 + i)) for i in range(others)]
        place = others // 2
        logits = crowd.run(*neighbors[:place], (prompt[39:], 39, table), *neighbors[place:])
        assert logits[place].tobytes() == want, f"among {others} others"


@pytest.mark.parametrize(("weights", "unusual", "isa"), grid(["f32", "bf16", "rotated", "q4"], [False, True], LEVELS))
def test_same_bits_on_any_number_of_threads(toy, weights, unusual, isa):
    prompt = tokens(150)
    table = pages(*range(5))
    options = {"weights": weights, "kv": "bf16", "unusual": unusual}
    results = {toy(isa=isa, threads=n, **options).run((prompt, 0, table)).tobytes() for n in (1, 2, 3)}
    assert len(results) == 1


@pytest.mark.parametrize(
    ("weights", "kv"), [("f32", "f32"), ("f32", "f16"), ("q8", "int8"), ("rotated", "int8"), ("q4", "int8")]
)
def test_same_bits_at_every_level_with_every_option_of_the_ops(toy, weights, kv):
    prompt = tokens(150)
    table = pages(*range(5))
    options = {"weights": weights, "kv": kv, "unusual": True, "bias": True}
    assert len({toy(isa=isa, **options).run((prompt, 0, table)).tobytes() for isa in LEVELS}) == 1


@pytest.mark.parametrize(("window", "kv", "isa"), grid([0, 300], ["f32", "f16", "bf16", "int8"], LEVELS))
def test_same_bits_when_the_splits_of_a_long_sequence_are_partitioned(toy, window, kv, isa):
    """Alone on several threads, a split is a unit of work; in a wide batch or on one thread, a whole head is."""
    prompt = tokens(602)
    table = pages(*range(20))

    def decoded(threads: int, others: int) -> list[bytes]:
        model = toy(weights="f32", kv=kv, windows=(window,), isa=isa, threads=threads)
        for first in range(0, 600, 150):
            model.run((prompt[first : first + 150], first, table))
        neighbors = [(tokens(1, i), 0, pages(20 + i)) for i in range(others)]
        steps = [model.run((prompt[at : at + 1], at, table), *neighbors)[0].tobytes() for at in (600, 601)]
        return [*steps, model.run((prompt[600:], 600, table))[0].tobytes()]

    want = decoded(1, 0)
    assert want[1] == want[2]
    cases = [(3, 0), (2, 20)] if isa == "scalar" else [(2, 0), (3, 0), (5, 1), (2, 20)]  # scalar is slow
    assert [case for case in cases if decoded(*case) != want] == []


@pytest.mark.parametrize("kv", ["f32", "f16", "bf16", "int8"])
def test_layer_groups_match_the_reference_while_pages_leave_their_windows(toy, kv):
    """Two sequences, in both orders, that have released pages which only other layer groups still see."""
    a, b = tokens(330, 1), tokens(90, 2)

    def logits_of_steps(model, run) -> list[np.ndarray]:
        assert model.layout.group_windows == (0, 37, 100)
        tables_a = [pages(*range(g, 33, 3)) for g in range(3)]
        tables_b = [pages(*range(33 + g, 42, 3)) for g in range(3)]
        steps = [
            [(a[:97], 0, tables_a), (b[:40], 0, tables_b)],
            [(b[40:41], 40, tables_b), (a[97:230], 97, tables_a)],
            [(a[230:231], 230, tables_a), (b[41:89], 41, tables_b)],
            [(a[231:330], 231, tables_a), (b[89:90], 89, tables_b)],
        ]
        logits = []
        for step in steps:
            for _, first, tables in step:
                model.release_pages(tables, first)
            logits.append(run(*step).copy())
        assert [(table < 0).sum() for table in tables_a] == [0, 6, 4]
        return logits

    exact, *models = (toy(kv=kv, windows=(37, 0, 100), isa=isa) for isa in (None, *LEVELS))
    wanted = logits_of_steps(exact, exact.run_reference)
    for isa, model in zip(LEVELS, models, strict=True):
        for got, want in zip(logits_of_steps(model, model.run), wanted, strict=True):
            assert np.abs(got - want).max() <= 2 * tolerance("f32", kv) * np.ptp(want), isa


@pytest.mark.parametrize(
    ("windows", "kv", "isa"), grid([(300,), (37, 0), (300, 37)], ["f32", "f16", "bf16", "int8"], LEVELS)
)
def test_same_bits_whether_pages_that_left_the_window_are_kept_or_overwritten(toy, windows, kv, isa):
    """At every chunking and number of threads, with and without partitioning of splits."""
    prompt = tokens(600)

    def decoded(chunk: int, threads: int = 1, others: int = 0, *, keeps: bool = False) -> list[bytes]:
        model = toy(weights="f32", kv=kv, windows=windows, isa=isa, threads=threads)
        groups = len(windows)
        tables = [pages(*range(g, 19 * groups, groups)) for g in range(groups)]
        page = iter(range(19 * groups, 48))
        neighbors = [(tokens(1, i), 0, [pages(next(page)) for _ in windows]) for i in range(others)]
        logits = []
        for first in [*range(0, 596, chunk), 596, 597, 598, 599]:
            if not keeps:
                model.release_pages(tables, first)
            rows = prompt[first : min(first + chunk, 596) if first < 596 else first + 1]
            logits.append(model.run((rows, first, tables), *neighbors)[0].tobytes())
        return logits[-5:]

    want = decoded(149, keeps=True)
    cases = [(149,), (149, 3), (7, 2), (64, 2, 5), (149, 2, 5)]
    wrong = [case for case in (cases[2:4] if isa == "scalar" else cases) if decoded(*case) != want]  # scalar is slow
    assert wrong == []


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_a_page_may_be_released_before_the_first_tile_that_a_row_sees(toy, page_size):
    """A row at position 200 sees positions from 101 on, so its tiles start at 64."""
    model = toy(windows=(100,), page_size=page_size)
    table = np.arange(20, 20 + 208 // 16, dtype=np.int32)
    model.run((tokens(100), 0, table))
    model.run((tokens(100), 100, table))
    table[: 64 // page_size] = -1
    model.run((tokens(2), 200, table))
    table[64 // page_size] = -1
    with pytest.raises(ValueError, match="page -1 is outside the pool"):
        model.run((tokens(2), 200, table))


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("kv", ["f32", "f16", "bf16", "int8"])
def test_every_page_size_has_the_same_bits_in_any_pages_and_matches_the_reference(toy, kv, isa):
    """The last tile has three pages of 16 tokens, the last one a row and then two. The reference has such pages."""
    prompt = tokens(99)
    results = set()
    for size, table in ((16, range(40, 33, -1)), (32, range(4)), (64, (9, 0))):
        model = toy(weights="f32", kv=kv, page_size=size, isa=isa)
        logits = []
        for first, end in ((0, 64), (64, 97), (97, 98), (98, 99)):
            sequence = (prompt[first:end], first, pages(*table))
            logits.append(model.run(sequence))
            if size == 16:
                want = model.run_reference(sequence)
                assert np.abs(logits[-1] - want).max() <= 2 * tolerance("f32", kv) * np.ptp(want)
        results.add(tuple(each.tobytes() for each in logits))
    assert len(results) == 1


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(
    ("place", "value", "kv"),
    [
        *product(["key"], [np.nan], ["f16", "bf16", "int8"]),
        *product(["value"], [np.inf], ["f16", "bf16", "int8"]),
        ("key", 1e9, "f16"),
        ("key", -1e9, "f16"),
        ("value", 1e9, "f16"),
    ],
)
def test_a_key_or_value_that_is_not_finite_gives_no_number(toy, monkeypatch, place, value, kv, isa):
    """The one element of the last head is read back from its page, by a chunk and by a decode row."""
    make = type(toy())._random

    def planted(model, *shape):
        found = make(model, *shape)
        if shape == ((model.heads + 2 * model.kv_heads) * model.head_dim, model.hidden):
            found[-1 if place == "value" else -1 - model.kv_heads * model.head_dim] = value
        return found

    monkeypatch.setattr(type(toy()), "_random", planted)
    model = toy(weights="f32", kv=kv, isa=isa, qk_norm=False)
    with np.errstate(all="ignore"):
        logits = model.run((tokens(20), 0, pages(3)))
        decoded = model.run((tokens(1, 3), 20, pages(3)))
    assert not np.isfinite(logits).any()
    assert not np.isfinite(decoded).any()


def test_a_page_full_of_stale_numbers_changes_nothing(toy):
    """Pages are not cleared when they change owners; the kernel that writes slot 0 clears the page."""
    used = toy(kv="bf16")
    fresh = toy(kv="bf16")
    used.run((tokens(64, 5) * 0 + 3, 0, pages(1, 2)))
    prompt = tokens(37)
    assert used.run((prompt, 0, pages(2, 1))).tobytes() == fresh.run((prompt, 0, pages(2, 1))).tobytes()


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("weights", ["f32", "bf16", "q8", "q4"])
def test_a_row_that_is_not_finite_changes_no_other(toy, weights, isa):
    poisoned = toy(weights=weights, kv="bf16", isa=isa)
    clean = toy(weights=weights, kv="bf16", isa=isa)
    other = (tokens(20), 0, pages(4))
    want = clean.run(other)[0].tobytes()
    poisoned.run((tokens(20, 3), 0, pages(5)))
    page_bytes = poisoned.layout.page_bytes
    poisoned.kv_memory[5 * page_bytes : 6 * page_bytes] = 0xFF  # every K and V of page 5 is NaN
    logits = poisoned.run((tokens(1), 20, pages(5)), other)
    assert np.isnan(logits[0]).all()
    assert logits[1].tobytes() == want


@pytest.mark.parametrize(
    ("isa", "threads", "weights", "kv"),
    [
        (isa, threads, weights, kv)
        for threads, (weights, kv) in product((1, 2), [("f32", "f32"), ("bf16", "bf16"), ("q8", "int8")])
        for isa in LEVELS
        if isa != "scalar" or (threads, weights) == (2, "q8")
        if isa != "amx-twin" or threads == 2
    ],
)
def test_nan_left_in_a_workspace_by_one_step_does_not_reach_the_next_step(toy, threads, weights, kv, isa):
    """Before each step of one request another request fills every buffer of the workers and of the arena with NaN."""
    prompt = tokens(602)
    table = pages(*range(19))
    chunks = [(0, 150), (150, 300), (300, 301), (301, 450), (450, 600), (600, 601), (601, 602)]

    def logits(poison: bool) -> list[bytes]:
        model = toy(weights=weights, kv=kv, windows=(0, 0), isa=isa, threads=threads)
        results = []
        for first, end in chunks:
            if poison:
                run_steps_full_of_nan(model)
            results.append(model.run((prompt[first:end], first, table))[0].tobytes())
        return results

    assert logits(poison=True) == logits(poison=False)


def run_steps_full_of_nan(model) -> None:
    """Run a prefill chunk and decode steps over several splits of NaN pages; in layer 2 every key is NaN."""
    table = pages(*range(20, 41))
    by_page = model.kv_memory[: 48 * model.layout.page_bytes].reshape(2, 48, -1)
    for first, rows in ((500, 160), (660, 1), (660, 1)):
        by_page[:, table] = 0xFF
        assert np.isnan(model.run((tokens(rows), first, table))).all()


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("weights", ["f32", "bf16", "q8"])
def test_the_padding_of_heads_is_zero_whatever_the_memory_held(toy, weights, isa):
    """Six heads of 24 are 144 of 160 columns, all of which the next layer reads, in f32 as attention wrote them."""
    model = toy(weights=weights, isa=isa)
    want = model.run((tokens(20), 0, pages(4))).copy()
    for op in model.ops:
        if isinstance(op, Attention):
            model.program.view(op.out).view(np.uint8).fill(0xFF)  # NaN, if these are floats
    assert model.run((tokens(20), 0, pages(5))).tobytes() == want.tobytes()


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("weights", ["f32", "bf16", "q8", "q4"])
def test_the_lm_head_stores_the_maximum_of_each_32_logits(toy, weights, isa):
    model = toy(weights=weights, isa=isa)
    logits = model.run(*[(tokens(3, i), 0, pages(i)) for i in range(39)], (tokens(1), 20, pages(40)))
    maxima = model.program.view(model.maxima)[:40, :11]
    expected = np.maximum.reduceat(logits, np.arange(0, 333, 32), axis=1)
    assert np.array_equal(maxima, expected, equal_nan=True)
    assert np.isnan(maxima[39]).all(), "page 40 was never written"


def step_with(**changes):
    step = {
        "token_ids": tokens(4),
        "row_start": pages(0, 4),
        "first_position": pages(0),
        "page_ids": pages(0),
        "page_start": pages(0, 1),
        "sample_rows": pages(3),
    }
    return step | changes


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"token_ids": np.array([1, 2, 333, 4], np.int32)}, "token id 333"),
        ({"token_ids": np.array([1, 2, -1, 4], np.int32)}, "token id -1"),
        ({"token_ids": tokens(0), "row_start": pages(0, 0)}, "0 rows"),
        ({"token_ids": tokens(161), "row_start": pages(0, 161)}, "161 rows"),
        ({"row_start": pages(0, 5)}, "row_start"),
        ({"row_start": pages(1, 4)}, "row_start"),
        ({"page_start": pages(0, 2)}, "row_start and page_start"),
        ({"first_position": pages(-1)}, "positions"),
        ({"first_position": pages(29)}, "1 pages for 33 tokens"),
        ({"first_position": pages(698), "page_ids": np.zeros(22, np.int32), "page_start": pages(0, 22)}, "positions"),
        ({"page_ids": pages(48)}, "page 48"),
        ({"page_ids": pages(-1)}, "page -1"),
        ({"sample_rows": pages(4)}, "sampling row 4"),
        ({"sample_rows": pages(-1)}, "sampling row -1"),
        ({"sample_rows": np.zeros(41, np.int32)}, "41 sampling rows"),
    ],
)
def test_a_step_that_leads_outside_is_refused(toy, changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        toy().program.run(**step_with(**changes))


@pytest.mark.parametrize(
    ("page_ids", "page_start", "complaint"),
    [
        (pages(0), pages(0, 1), "row_start and page_start"),
        (pages(0), pages(0, 1, 1), "0 pages for 4 tokens"),
        (pages(0), pages(0, 0, 1), "0 pages for 4 tokens"),
        (pages(0, 1), pages(0, 3, 2), "3 pages for 4 tokens"),
        (pages(0, 48), pages(0, 1, 2), "page 48"),
        (pages(0, -1), pages(0, 1, 2), "page -1"),
        (pages(0, -2), pages(0, 1, 2), "page -2"),
    ],
)
def test_every_layer_group_needs_its_own_pages(toy, page_ids, page_start, complaint):
    with pytest.raises(ValueError, match=complaint):
        toy(windows=(0, 37)).program.run(**step_with(page_ids=page_ids, page_start=page_start))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"group": 2}, "layer group 2; the groups' windows are"),
        ({"group": -1}, "layer group -1"),
        ({"group": 1, "window": 36}, "a window of 36 does not fit layer group 1"),
        ({"layer": 1}, "layer 1 with .* does not fit a group of 1 layers"),
    ],
)
def test_attention_must_fit_the_layer_groups(toy, changes, complaint):
    model = toy(windows=(0, 37))
    (at, *_) = [i for i, op in enumerate(model.ops) if isinstance(op, Attention)]
    model.ops[at] = replace(model.ops[at], **changes)
    with pytest.raises(ValueError, match=complaint):
        model.bind()


def test_a_program_that_cannot_be_shared_out_is_refused(toy):
    """A worker counts up to 16 million items of a linear layer, and 65,535 ops of a step."""
    model = toy()
    model.ops = [op for op in model.ops if isinstance(op, Linear)][:1]
    model.max_rows = 192 << 24
    with pytest.raises(ValueError, match="3221225472 rows of 8 blocks are more than 16777215 items"):
        model.bind()
    model.ops *= 1 << 16
    with pytest.raises(ValueError, match="at most 65535 ops, not 65536"):
        model.bind()


def test_a_program_checks_every_region_when_it_is_built(toy):
    model = toy()
    model.offset -= 64  # the arena ends inside the last region
    with pytest.raises(ValueError, match="not inside an arena"):
        model.bind()


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("weights", ["f32", "bf16", "q8"])
def test_given_rows_take_the_place_of_embeddings(toy, weights, isa):
    """They are not scaled, unlike embeddings, and their padding is zero, whatever the memory held before."""
    model = toy(weights=weights, hidden=50, unusual=True, isa=isa)
    given = np.random.default_rng(3).standard_normal((4, 50)).astype(np.float32)
    given_of = np.array([-1, 2, 0, -1, 3, -1, 3], np.int32)
    model.program.view(model.ops[0].out).fill(7)
    step = model.step((tokens(4), 0, pages(2)), (tokens(3, 1), 0, pages(5)))
    model.program.run(**step, given_of=given_of, given=given)
    model.reference.run(**step, given_of=given_of, given=given)
    want = model.reference.regions[model.logits]
    got = model.program.view(model.logits)[:2, :333]
    assert np.abs(got - want).max() <= tolerance(weights, "f32") * np.ptp(want)
    model.program.run(**step)
    model.reference.run(**step)
    assert np.abs(model.program.view(model.logits)[:2, :333] - want).max() > tolerance(weights, "f32") * np.ptp(want)


@pytest.mark.parametrize("isa", LEVELS)
def test_same_bits_at_every_chunking_of_given_rows(toy, isa):
    given = np.random.default_rng(3).standard_normal((40, 64)).astype(np.float32)
    ids = tokens(60)
    given_of = np.concatenate([np.full(10, -1), np.arange(40), np.full(10, -1)]).astype(np.int32)

    def last_logits(chunk: int) -> bytes:
        model = toy(weights="q8", kv="int8", hidden=64, isa=isa)
        for first in range(0, 60, chunk):
            step = model.step((ids[first : first + chunk], first, pages(*range(7, 11))))
            model.program.run(**step, given_of=given_of[first : first + chunk], given=given)
        return model.program.view(model.logits)[0].tobytes()

    assert len({last_logits(chunk) for chunk in (1, 7, 32, 60)}) == 1


@pytest.mark.parametrize(
    ("given_of", "given", "fault"),
    [
        ([0, 1, 2], (2, 64), "given row 2 is outside the 2"),
        ([0, -2, 0], (2, 64), "given row -2 is outside the 2"),
        ([0, 0], (2, 64), "3 rows need as many indices"),
        ([0, 0, 0], (2, 63), "with 64 columns"),
        ([0, 0, 0], None, "3 rows need as many indices"),
        (None, (2, 64), "3 rows need as many indices"),
        ([-1, -1, 0], (0, 64), "given row 0 is outside the 0"),
    ],
)
def test_given_rows_that_do_not_fit_are_refused(toy, given_of, given, fault):
    model = toy(hidden=64)
    given_of = None if given_of is None else np.array(given_of, np.int32)
    given = None if given is None else np.zeros(given, np.float32)
    with pytest.raises(ValueError, match=fault):
        model.program.run(**model.step((tokens(3), 0, pages(1))), given_of=given_of, given=given)


def with_level(model, level: int = 1):
    """Return the model with an op after the embedding that adds the given rows of a level."""
    embed = model.ops[0]
    model.ops = [embed, AddGiven(level, embed.out, embed.normed), *model.ops[1:]]
    model.program, model.reference.ops = model.bind(), model.ops
    return model


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("weights", ["f32", "bf16", "q8"])
def test_given_rows_of_a_level_are_added(toy, weights, isa):
    """Rows without one keep the bits that they have without the op."""
    model = with_level(toy(weights=weights, hidden=50, isa=isa))
    plain = toy(weights=weights, hidden=50, isa=isa)
    given = np.random.default_rng(3).standard_normal((4, 100)).astype(np.float32)
    step = model.step((tokens(4), 0, pages(2)), (tokens(3, 1), 0, pages(5)))
    arguments = {"given_of": np.array([-1, 2, 0, 1, -1, -1, -1], np.int32), "given": given}
    model.program.run(**step, **arguments)
    model.reference.run(**step, **arguments)
    want = model.reference.regions[model.logits]
    got = model.program.view(model.logits)[:2, :333].copy()
    assert np.abs(got - want).max() <= tolerance(weights, "f32") * np.ptp(want)
    plain.program.run(**step)
    assert plain.program.view(plain.logits)[1, :333].tobytes() == got[1].tobytes()
    arguments["given"][:, 50:] = 0
    model.program.run(**step, **arguments)
    assert np.abs(model.program.view(model.logits)[0, :333] - want[0]).max() > tolerance(weights, "f32") * np.ptp(want)
    model.program.run(**step)
    assert model.program.view(model.logits)[:2].tobytes() == plain.program.view(plain.logits)[:2].tobytes()


def test_levels_that_do_not_fit_are_refused(toy):
    model = with_level(toy(hidden=64), 2)
    with pytest.raises(ValueError, match="given rows with 192 columns"):
        model.program.run(
            **model.step((tokens(1), 0, pages(1))),
            given_of=np.array([0], np.int32),
            given=np.zeros((1, 128), np.float32),
        )
    for level in (0, 1025):
        with pytest.raises(ValueError, match=f"levels 1 to 1024, not {level}"):
            with_level(toy(), level)


# Rotary rows of a step


def rotary_rows(model, rows: int, seed: int = 4) -> np.ndarray:
    attention = next(op for op in model.ops if isinstance(op, Attention))
    return np.random.default_rng(seed).uniform(-1, 1, (rows, attention.rotary.shape[1])).astype(np.float32)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(("weights", "kv"), [("f32", "f32"), ("bf16", "bf16"), ("q8", "int8")])
def test_rotary_rows_take_the_place_of_those_of_positions(toy, weights, kv, isa):
    """A prompt in two chunks, then a decode row in one step with another sequence's chunk."""
    model = toy(weights=weights, kv=kv, isa=isa)
    plain = toy(weights=weights, kv=kv, isa=isa)
    table_a, table_b = pages(9, 8, 7), pages(3, 4)
    ids = tokens(70)
    steps = [
        [(ids[:50], 0, table_a)],
        [(ids[50:69], 50, table_a)],
        [(ids[69:], 69, table_a), (tokens(40, 1), 0, table_b)],
    ]
    for step in steps:
        arguments = model.step(*step)
        rows = rotary_rows(model, sum(len(each[0]) for each in step))
        model.program.run(**arguments, rotary=rows)
        model.reference.run(**arguments, rotary=rows)
        want = model.reference.regions[model.logits]
        got = model.program.view(model.logits)[: len(step), : want.shape[1]].copy()
        assert np.abs(got - want).max() <= tolerance(weights, kv) * np.ptp(want)
        plain.program.run(**arguments)
    assert plain.program.view(model.logits)[:2].tobytes() != model.program.view(model.logits)[:2].tobytes()


@pytest.mark.parametrize("kv", ["f32", "int8"])
def test_the_rows_of_the_table_have_the_bits_of_positions(toy, kv):
    model = toy(kv=kv)
    table = next(op for op in model.ops if isinstance(op, Attention)).rotary
    steps = [[(tokens(50), 0, pages(9, 8))], [(tokens(1, 2), 50, pages(9, 8)), (tokens(30, 1), 0, pages(3))]]
    logits = []
    for given in (True, False):
        for step in steps:
            positions = np.concatenate([first + np.arange(len(ids)) for ids, first, _ in step])
            model.program.run(**model.step(*step), rotary=table[positions] if given else None)
        logits.append(model.program.view(model.logits)[:2].tobytes())
    assert logits[0] == logits[1]


@pytest.mark.parametrize("shape", [(2, 24), (4, 24), (3, 22), (3, 26), (0, 24)])
def test_rotary_rows_that_do_not_fit_are_refused(toy, shape):
    model = toy()
    with pytest.raises(ValueError, match="3 rows of heads that are rotated in"):
        model.program.run(**model.step((tokens(3), 0, pages(1))), rotary=np.zeros(shape, np.float32))


# Rows that see later ones


def seen_by(first: int, count: int, *runs: tuple[int, int]) -> np.ndarray:
    """Return the last token that each row sees, where the rows of each run see each other."""
    seen = np.arange(first, first + count, dtype=np.int32)
    for begin, end in runs:
        seen[max(0, begin - first) : max(0, end - first)] = end - 1
    return seen


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(("kv", "window"), [("f32", 0), ("bf16", 100), ("int8", 100)])
def test_rows_that_see_later_ones_match_the_reference(toy, kv, window, isa):
    """Runs over tiles and splits, a run that continues after a computed page, and a decode row."""
    model = toy(kv=kv, windows=(window,), isa=isa)
    a, b = tokens(250, 1), tokens(41, 2)
    table_a, table_b = pages(*range(20, 12, -1)), pages(30, 3)
    runs = (60, 110), (130, 249)
    steps = [
        ([(a[:110], 0, table_a), (b[:40], 0, table_b)], [seen_by(0, 110, *runs), seen_by(0, 40)]),
        ([(b[40:], 40, table_b), (a[96:], 96, table_a)], [seen_by(40, 1), seen_by(96, 154, *runs)]),
    ]
    for parts, seen in steps:
        step = model.step(*parts)
        model.program.run(**step, last_seen=np.concatenate(seen))
        model.reference.run(**step, last_seen=np.concatenate(seen))
        got = model.program.view(model.logits)[:2, :333]
        want = model.reference.regions[model.logits]
        assert np.abs(got - want).max() <= tolerance("f32", kv) * np.ptp(want)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(("weights", "kv"), [("f32", "f32"), ("q8", "int8"), ("bf16", "bf16")])
def test_same_bits_at_every_chunking_around_rows_that_see_later_ones(toy, weights, kv, isa):
    """A sequence with a run, in chunks that do not divide it, together with another sequence."""
    ids = tokens(250)
    other = tokens(20, 3)
    table = pages(*range(7, 15))
    other_table = pages(20)
    run = (50, 150)
    model = toy(weights=weights, kv=kv, windows=(100,), isa=isa)
    alone = model.run((other, 0, other_table)).tobytes()

    def last_logits(*borders: int) -> bytes:
        model = toy(weights=weights, kv=kv, windows=(100,), isa=isa)
        for first, end in pairwise(borders):
            step = model.step((other, 0, other_table), (ids[first:end], first, table))
            model.program.run(**step, last_seen=np.concatenate([seen_by(0, 20), seen_by(first, end - first, run)]))
            assert model.program.view(model.logits)[0, :333].tobytes() == alone
        return model.program.view(model.logits)[1, :333].tobytes()

    assert len({last_logits(0, 50, 150, 250), last_logits(0, 30, 151, 250), last_logits(0, 7, 33, 160, 165, 250)}) == 1


@pytest.mark.parametrize(
    ("last_seen", "fault"),
    [
        ([5, 6], "4 rows see as many last tokens, not 2"),
        ([5, 6, 8, 3], r"row 2 sees tokens up to 8; it may be 7..7"),
        ([5, 5, 7, 3], r"row 1 sees tokens up to 5; it may be 6..7"),
        ([7, 6, 7, 3], r"row 1 sees tokens up to 6; it may be 7..7: its own or a later one"),
        ([5, 6, 7, 4], r"row 3 sees tokens up to 4; it may be 3..3"),
        ([5, 6, 7, -1], r"row 3 sees tokens up to -1; it may be 3..3"),
    ],
)
def test_rows_that_see_tokens_outside_are_refused(toy, last_seen, fault):
    model = toy()
    step = model.step((tokens(3), 5, pages(1)), (tokens(1), 3, pages(2)))
    with pytest.raises(ValueError, match=fault):
        model.program.run(**step, last_seen=np.array(last_seen, np.int32))
