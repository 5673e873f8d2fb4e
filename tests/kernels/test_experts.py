"""Mixtures of experts: the choice of experts, the rows of each, and promise 1 for the layers that compute them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from quire.kernels import PackedMatrix, Pool, Program, packed_nbytes, supported_levels
from quire.kernels.ops import (
    INPUT_DTYPES,
    Combine,
    Dispatch,
    Embed,
    ExpertLinear,
    Linear,
    Normed,
    Region,
    RouteRows,
    Routing,
    RoutingRule,
    max_groups,
    region_nbytes,
)
from quire.pager.layout import KVLayout

from tests.kernels.conftest import aligned_bytes
from tests.kernels.test_linear import packed
from tests.kernels.test_program import pages, tokens, tolerance
from tests.support.grids import grid

LEVELS = supported_levels()
RNG = np.random.default_rng(9)


class Arena:
    """Consecutive regions, and a program over them with the rows of an embedding."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.nbytes = 0

    def region(self, rows: int, columns: int, dtype: str = "f32") -> Region:
        region = Region(self.nbytes, rows, columns, dtype)
        self.nbytes += region_nbytes(rows, columns, dtype)
        return region

    def normed(self, rows: int, columns: int, dtype: str) -> Normed:
        norm = np.linspace(0.5, 2, columns, dtype=np.float32)
        return Normed(self.region(rows, columns, dtype), self.region(rows, -(-columns // 32)), norm, 1e-6)

    def routing(self, experts: int, top_k: int) -> Routing:
        groups = self.region(1 + max_groups(self.rows, experts, top_k), 3, "i32")
        return Routing(experts, top_k, self.region(self.rows, top_k), self.region(self.rows, top_k, "i32"), groups)

    def program(self, ops: list, threads: int = 2, isa: str | None = None) -> Program:
        layout = KVLayout(1, 1, 16, "f32", 64)
        limits = {"max_rows": self.rows, "max_samples": 1, "max_sequences": 1, "vocab_size": self.rows}
        memory = np.zeros(16 * layout.page_bytes, np.uint8)
        return Program(ops, self.nbytes, memory, layout, 16, Pool(threads), isa=isa, **limits)


def run(program: Program, token_ids: np.ndarray) -> None:
    starts = np.array([0, len(token_ids)], np.int32), np.zeros(1, np.int32)
    program.run(token_ids.astype(np.int32), *starts, np.arange(16, dtype=np.int32), pages(0, 16), np.zeros(0, np.int32))


def routed(
    logits: np.ndarray,
    top_k: int,
    *,
    normalized: bool = True,
    bias: np.ndarray | None = None,
    threads: int = 2,
    isa: str | None = None,
    **rule: float,
):
    """RouteRows rows with these logits: return weights and places [rows, top_k], and groups [groups, 3]."""
    arena = Arena(len(logits))
    x = arena.region(*logits.shape)
    routing = arena.routing(logits.shape[1], top_k)
    program = arena.program(
        [Embed(packed(logits, "f32"), x), RouteRows(x, routing, RoutingRule(normalized=normalized, **rule), bias)],
        threads,
        isa,
    )
    run(program, np.arange(len(logits)))
    groups = program.view(routing.groups)
    tables = program.view(routing.weights)[:, :top_k], program.view(routing.places)[:, :top_k]
    return *(table.copy() for table in tables), groups[1 : 1 + groups[0, 0], :3].tolist()


@pytest.mark.parametrize("isa", LEVELS)
def test_the_lower_index_wins_a_tie(isa):
    logits = np.zeros((4, 37), np.float32)
    logits[1, [5, 20, 36]] = 2
    logits[2, 36] = 3
    logits[2, 7] = 1
    logits[3] = -np.arange(37)
    weights, places, groups = routed(logits, 2, isa=isa)
    assert groups == [[0, 0, 2], [1, 2, 4], [5, 4, 5], [7, 5, 6], [20, 6, 7], [36, 7, 8]]
    assert places.tolist() == [[0, 2], [4, 6], [7, 5], [1, 3]]
    np.testing.assert_allclose(weights[:, 0], [0.5, 0.5, 1 / (1 + np.exp(-2)), 1 / (1 + np.exp(-1))], rtol=1e-6)
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (8, 2), (8, 8), (33, 5), (128, 8)])
@pytest.mark.parametrize("normalized", [True, False])
def test_routing_matches_numpy(experts, top_k, normalized, isa):
    logits = (RNG.standard_normal((70, experts)) * 5).astype(np.float32)
    weights, places, groups = routed(logits, top_k, normalized=normalized, isa=isa)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    exponentials = np.exp(logits.astype(np.float64))
    chosen = np.take_along_axis(exponentials, order, axis=1)
    total = (chosen if normalized else exponentials).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(weights, chosen / total, rtol=2e-6)
    assert sorted(places.reshape(-1)) == list(range(70 * top_k))
    expert_of = {place: expert for expert, first, end in groups for place in range(first, end)}
    assert [[expert_of[place] for place in row] for row in places] == order.tolist()
    for expert in range(experts):  # rows of one expert are in order
        of_expert = places[order == expert]
        assert (np.diff(of_expert) == 1).all()


@pytest.mark.parametrize("normalized", [True, False])
def test_routing_has_the_same_bits_at_every_level_and_number_of_threads(normalized):
    logits = (RNG.standard_normal((90, 40)) * 5).astype(np.float32)
    results = [
        routed(logits, 6, normalized=normalized, threads=threads, isa=isa) for isa in LEVELS for threads in (1, 3)
    ]
    assert len({(weights.tobytes(), places.tobytes(), str(groups)) for weights, places, groups in results}) == 1


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_whose_logits_are_not_finite_has_nan_weights_and_valid_places(bad, normalized, isa):
    logits = RNG.standard_normal((5, 20)).astype(np.float32)
    clean, *_ = routed(logits, 3, normalized=normalized, isa=isa)
    logits[1] = np.nan
    logits[3, 19] = bad
    weights, places, _ = routed(logits, 3, normalized=normalized, isa=isa)
    assert np.isnan(weights[1]).all()
    assert np.isnan(weights[3]).any()
    assert weights[[0, 2, 4]].tobytes() == clean[[0, 2, 4]].tobytes()
    assert sorted(places.reshape(-1)) == list(range(15))


def chosen_experts(places: np.ndarray, groups: list) -> list[list[int]]:
    expert_of = {place: expert for expert, first, end in groups for place in range(first, end)}
    return [[expert_of[place] for place in row] for row in places]


@pytest.mark.parametrize("isa", LEVELS)
def test_a_bias_changes_the_choice_but_not_the_weights(isa):
    logits = np.array([[0, 2, 1, -1, 0]], np.float32)
    bias = np.array([0, -1, 0, 0.7, 0], np.float32)
    weights, places, groups = routed(logits, 2, sigmoid=True, bias=bias, eps=0.5, scale=3, isa=isa)
    assert chosen_experts(places, groups) == [[3, 2]]  # scores 0.2689 + 0.7 and 0.7311
    np.testing.assert_allclose(weights, [[3 * 0.26894142 / 1.5, 3 * 0.73105858 / 1.5]], rtol=1e-6)
    weights, places, groups = routed(logits, 2, normalized=False, bias=bias, scale=2, isa=isa)
    total = np.exp(2) + np.exp(1) + 2 + np.exp(-1)
    assert chosen_experts(places, groups) == [[3, 2]]
    np.testing.assert_allclose(weights, [[2 * np.exp(-1) / total, 2 * np.exp(1) / total]], rtol=1e-6)


@pytest.mark.parametrize("isa", LEVELS)
def test_experts_are_chosen_from_the_groups_with_the_best_pairs(isa):
    logits = np.array([[9, -9, -9, 2, 2, -9, 1, 0, 3]], np.float32)  # pairs: 1.0, 1.76, 1.68
    weights, places, groups = routed(logits, 3, sigmoid=True, groups=3, kept_groups=1, normalized=False, isa=isa)
    assert chosen_experts(places, groups) == [[3, 4, 5]]
    weights, places, groups = routed(logits, 3, sigmoid=True, groups=3, kept_groups=2, normalized=False, isa=isa)
    assert chosen_experts(places, groups) == [[8, 3, 4]]
    np.testing.assert_allclose(weights, 1 / (1 + np.exp([[-3.0, -2.0, -2.0]])), rtol=1e-6)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("experts", "top_k", "groups", "kept"), [(37, 5, 1, 1), (128, 6, 8, 3), (512, 22, 1, 1)])
def test_routing_with_a_bias_and_groups_matches_numpy(experts, top_k, groups, kept, normalized, sigmoid, isa):
    logits = (RNG.standard_normal((30, experts)) * 2).astype(np.float32)
    bias = (RNG.standard_normal(experts) / 9).astype(np.float32)
    rule = {"sigmoid": sigmoid, "groups": groups, "kept_groups": kept, "eps": 1e-6, "scale": 1.5}
    weights, places, table = routed(logits, top_k, normalized=normalized, bias=bias, isa=isa, **rule)
    wide = logits.astype(np.float64)
    scores = 1 / (1 + np.exp(-wide)) if sigmoid else np.exp(wide) / np.exp(wide).sum(axis=1, keepdims=True)
    ranks = (scores + bias).reshape(30, groups, -1)
    pairs = np.sort(ranks, axis=2)[:, :, -2:].sum(axis=2)
    weakest = np.sort(pairs, axis=1)[:, [-kept]]
    ranks = np.where((pairs >= weakest)[:, :, None], ranks, -np.inf).reshape(30, experts)
    order = np.argsort(-ranks, axis=1, kind="stable")[:, :top_k]
    chosen = np.take_along_axis(scores, order, axis=1)
    expected = 1.5 * chosen / (chosen.sum(axis=1, keepdims=True) + 1e-6 if normalized else 1)
    assert chosen_experts(places, table) == order.tolist()
    np.testing.assert_allclose(weights, expected, rtol=3e-6)


def test_a_biased_choice_has_the_same_bits_at_every_level_and_number_of_threads():
    logits = (RNG.standard_normal((90, 40)) * 5).astype(np.float32)
    bias = RNG.standard_normal(40).astype(np.float32)
    rule = {"groups": 4, "kept_groups": 2, "eps": 1e-20, "scale": 2.5, "bias": bias}
    for sigmoid in (True, False):
        results = [
            routed(logits, 6, sigmoid=sigmoid, threads=threads, isa=isa, **rule) for isa in LEVELS for threads in (1, 3)
        ]
        assert len({(weights.tobytes(), places.tobytes(), str(groups)) for weights, places, groups in results}) == 1


@pytest.mark.parametrize("isa", LEVELS)
def test_a_row_with_nan_changes_no_other_choice_of_sigmoids(isa):
    logits = RNG.standard_normal((5, 20)).astype(np.float32)
    rule = {"sigmoid": True, "groups": 4, "kept_groups": 2, "bias": np.ones(20, np.float32), "isa": isa}
    clean, *_ = routed(logits, 3, **rule)
    logits[1] = np.nan
    logits[3, 19] = np.nan
    weights, places, _ = routed(logits, 3, **rule)
    assert np.isnan(weights[[1, 3]]).all()
    assert weights[[0, 2, 4]].tobytes() == clean[[0, 2, 4]].tobytes()
    assert sorted(places.reshape(-1)) == list(range(15))


@pytest.mark.parametrize(
    ("experts", "rule"),
    [
        (9, {"groups": 2}),
        (9, {"groups": 9, "kept_groups": 3}),
        (8, {"groups": 4, "kept_groups": 1}),
        (8, {"groups": 4, "kept_groups": 5}),
    ],
)
def test_groups_that_do_not_fit_the_experts_are_refused(experts, rule):
    with pytest.raises(ValueError, match=f"3 of {experts} experts cannot follow RoutingRule"):
        routed(np.zeros((1, experts), np.float32), 3, **rule)


def test_too_many_experts_are_refused():
    with pytest.raises(ValueError, match="at most 1024 experts, not 1025"):
        routed(np.zeros((1, 1025), np.float32), 3)


def test_many_rows_of_one_expert_are_groups_that_stay_in_cache():
    logits = np.zeros((500, 3), np.float32)
    logits[:, 1] = 1
    logits[::100, 2] = 2
    _, places, groups = routed(logits, 1)
    assert groups == [[1, 0, 165], [1, 165, 330], [1, 330, 495], [2, 495, 500]]
    assert places[:102, 0].tolist() == [495, *range(99), 496, 99]


HIDDEN = 80
INNER = 41
EXPERTS = 5
TOP_K = 2


def mixture(rows: np.ndarray, dtype: str, token_ids: np.ndarray, threads: int = 2, isa: str | None = None):
    """Run rows through a mixture of experts; return it and the residual stream after it, [tokens, HIDDEN]."""
    rng = np.random.default_rng(4)
    arena = Arena(len(rows))
    places = len(rows) * TOP_K
    router, gate_up, down = (
        [packed(rng.standard_normal(shape).astype(np.float32) / 9, kind) for _ in range(count)]
        for shape, kind, count in [
            ((EXPERTS, HIDDEN), "f32", 1),
            ((128, HIDDEN), dtype, EXPERTS),
            ((HIDDEN, INNER), dtype, EXPERTS),
        ]
    )
    x = arena.region(len(rows), HIDDEN)
    normed = arena.normed(len(rows), HIDDEN, INPUT_DTYPES[dtype])
    logits = arena.region(len(rows), EXPERTS)
    routing = arena.routing(EXPERTS, TOP_K)
    dispatched = arena.normed(places, HIDDEN, INPUT_DTYPES[dtype])
    activated = arena.region(places, INNER, INPUT_DTYPES[dtype])
    out = arena.region(places, HIDDEN)
    ops = [
        Embed(packed(rows, "f32"), x, normed),
        Linear(replace(normed, data=x), router[0], None, logits, "store"),
        RouteRows(logits, routing, RoutingRule(normalized=True)),
        Dispatch(normed, routing, dispatched),
        ExpertLinear(dispatched, tuple(gate_up), routing, activated, "swiglu"),
        ExpertLinear(activated, tuple(down), routing, out, "store"),
        Combine(out, routing, x),
    ]
    program = arena.program(ops, threads, isa)
    run(program, token_ids)
    return program.view(x)[: len(token_ids), :HIDDEN].copy()


ROWS = RNG.standard_normal((500, HIDDEN)).astype(np.float32)
ROWS[200:450] = ROWS[7]  # groups of one expert that several units of work share


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8", "q4"])
def test_a_row_has_the_same_bits_in_every_batch_and_on_every_number_of_threads(dtype, isa):
    whole = mixture(ROWS, dtype, np.arange(500), isa=isa)
    for ids, threads in [
        (np.arange(1), 1),
        (np.arange(7, 20), 3),
        (np.arange(499, -1, -1), 2),
        (RNG.permutation(500)[:230], 2),
    ]:
        assert mixture(ROWS, dtype, ids, threads, isa).tobytes() == whole[ids].tobytes()


@pytest.mark.parametrize("dtype", ["f32", "q8", "q4"])
def test_every_level_computes_the_same_bits(dtype):
    assert len({mixture(ROWS, dtype, np.arange(90), isa=isa).tobytes() for isa in LEVELS}) == 1


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8", "q4"])
def test_a_row_that_is_not_finite_changes_no_other(dtype, isa):
    poisoned = ROWS[:40].copy()
    poisoned[11, 3] = np.nan
    got, clean = (mixture(rows, dtype, np.arange(40), isa=isa) for rows in (poisoned, ROWS[:40]))
    assert np.isnan(got[11]).all()
    others = np.arange(40) != 11
    assert got[others].tobytes() == clean[others].tobytes()


@pytest.mark.parametrize(
    ("weights", "options", "isa"),
    grid(
        ["f32", "bf16", "rotated", "q4"],
        [
            {"experts": 5, "top_k": 2},
            {"experts": 40, "top_k": 3, "normalized": False, "hidden": 50, "intermediate": 33},
            {"experts": 1, "top_k": 1, "hidden": 600, "intermediate": 32},
            {"experts": 6, "top_k": 3, "bias": True, "unusual": True},
            {"experts": 7, "top_k": 2, "bias": True, "gated": True, "hidden": 600},
            {"experts": 6, "top_k": 3, "sigmoid": True},
            {"experts": 7, "top_k": 2, "normalized": False, "sigmoid": True, "gated": True},
        ],
        LEVELS,
    ),
)
def test_a_decoder_with_experts_matches_the_reference(toy, weights, options, isa):
    model = toy(weights=weights, windows=(0, 0), isa=isa, **{"normalized": True, **options})
    a, b = tokens(120, 1), tokens(60, 2)
    steps = [[(a[:97], 0, pages(5, 6, 7, 8)), (b[:40], 0, pages(9, 10))], [(b[40:41], 40, pages(9, 10))]]
    for step in steps:
        want = model.run_reference(*step)
        assert np.abs(model.run(*step) - want).max() <= 2 * tolerance(weights, "f32") * np.ptp(want)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(("weights", "kv"), [("f32", "f32"), ("bf16", "bf16"), ("rotated", "int8"), ("q4", "int8")])
def test_same_bits_at_every_chunking_of_a_prompt(toy, weights, kv, isa):
    prompt = tokens(150)
    table = pages(*range(7, 12))

    def last_logits(chunk: int, threads: int) -> bytes:
        model = toy(weights=weights, kv=kv, experts=6, gated=True, windows=(0, 0), isa=isa, threads=threads)
        for first in range(0, 150, chunk):
            logits = model.run((prompt[first : first + chunk], first, table), (tokens(chunk % 9 + 1), 0, pages(40)))
        return logits[0].tobytes()

    assert len({last_logits(chunk, threads) for chunk, threads in [(150, 1), (1, 2), (7, 3), (64, 2)]}) == 1


def test_a_shared_expert_without_a_logit_is_refused(toy):
    model = toy(experts=4, gated=True)
    (at, *_) = [i for i, op in enumerate(model.ops) if isinstance(op, Combine)]
    shared = model.ops[at].shared
    model.ops[at] = replace(model.ops[at], shared=replace(shared, logits=replace(shared.logits, columns=4)))
    with pytest.raises(ValueError, match="has no logit of a shared expert"):
        model.bind()


def test_experts_of_other_shapes_or_numbers_are_refused(toy):
    model = toy(experts=4)
    (at, *_) = [i for i, op in enumerate(model.ops) if isinstance(op, ExpertLinear)]
    expert = model.ops[at]
    other = PackedMatrix(96, 80, "f32", aligned_bytes(packed_nbytes(96, 80, "f32")))
    for weights in (expert.weights[:3], (*expert.weights[:3], other)):
        model.ops[at] = replace(expert, weights=weights)
        with pytest.raises(ValueError, match="4 experts need as many weights of one shape and dtype"):
            model.bind()
    model.ops[at] = replace(expert, biases=(np.zeros(96, np.float32),) * 3)
    with pytest.raises(ValueError, match="4 experts need as many biases, not 3"):
        model.bind()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"top_k": 5}, "top_k must be 1 to the 4 experts, not 5"),
        ({"top_k": 0}, "top_k must be 1 to the 4 experts, not 0"),
        ({"num_experts": 2}, "should hold at least"),
        ({"places": Region(0, 160, 2, "f32")}, "as i32"),
        ({"groups": Region(0, 4, 3, "i32")}, "should hold at least 6 rows of 3 columns as i32"),
    ],
)
def test_tables_that_do_not_fit_are_refused(toy, change, complaint):
    model = toy(experts=4)
    (at, *_) = [i for i, op in enumerate(model.ops) if isinstance(op, RouteRows)]
    model.ops[at] = replace(model.ops[at], routing=replace(model.routing, **change))
    with pytest.raises(ValueError, match=complaint):
        model.bind()
