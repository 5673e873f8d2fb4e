"""Sampling against a numpy version of the same filters, and the random numbers against published answers."""

import numpy as np
import pytest
from quire.kernels import Pool, Sampler, supported_levels
from quire.kernels.sample import ADJUSTMENT, ROW, philox

VOCAB = 1000
STRIDE = 1024
LEVELS = supported_levels()


def row(**changes):
    fields = {
        "seed": 1,
        "position": 0,
        "temperature": 0.0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "top_k": 0,
        "logprobs": -1,
        "first_adjustment": 0,
        "num_adjustments": 0,
        "mask": 0,
    } | changes
    return tuple(fields[name] for name in ROW.names)


def draw(logits, rows, adjustments=(), isa=None, threads=2):
    padded = np.zeros((len(logits), STRIDE), np.float32)
    padded[:, :VOCAB] = logits
    maxima = np.maximum.reduceat(padded[:, :VOCAB], np.arange(0, VOCAB, 32), axis=1)
    sampler = Sampler(VOCAB, STRIDE, 64, Pool(threads), isa)
    results = sampler.sample(padded, maxima, np.array(rows, ROW), np.array(list(adjustments), ADJUSTMENT))
    assert np.array_equal(padded[:, :VOCAB], logits, equal_nan=True), "logits are restored"
    return [array.copy() for array in results]


def random_logits(rows=1, seed=0):
    return np.random.default_rng(seed).normal(0, 3, (rows, VOCAB)).astype(np.float32)


def kept_by_numpy(logits, temperature, min_p, top_k, top_p):
    """Return the token ids that may be drawn, by sorting the whole vocabulary."""
    x = logits.astype(np.float64)
    weights = np.exp((x - x.max()) / temperature)
    weights[weights < min_p] = 0
    order = np.lexsort((np.arange(len(x)), -weights))
    if top_k:
        weights[order[top_k:]] = 0
    before = np.cumsum(weights[order]) - weights[order]
    dropped = before >= top_p * weights.sum()
    dropped[0] = False
    weights[order[dropped]] = 0
    return set(np.flatnonzero(weights))


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, answer):
    assert philox(counter, key) == answer


@pytest.mark.parametrize("isa", LEVELS)
def test_greedy_takes_the_largest_and_the_lowest_id_of_equals(isa):
    logits = np.zeros((3, VOCAB), np.float32)
    logits[0, [999, 77]] = 5
    logits[1] = -3
    logits[2, 998] = np.float32(1e-3)
    tokens, *_ = draw(logits, [row()] * 3, isa=isa)
    assert tokens.tolist() == [77, 0, 998]


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("kinds", [1, 2, 40])
def test_greedy_is_the_plain_argmax_however_many_tie(kinds, isa):
    logits = np.random.default_rng(kinds).integers(-kinds, 0, (60, VOCAB)).astype(np.float32)
    logits[1::4] = -np.float32(0)
    logits[1::4, 700:] = 0
    logits[2::4, :-1] = -np.inf
    logits[3::4, 3] = np.nan
    tokens, *_ = draw(logits, [row()] * 60, isa=isa)
    expected = np.where(np.isnan(logits).any(axis=1), -1, np.nan_to_num(logits, nan=-99).argmax(axis=1))
    assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 500, 999])
def test_logits_that_are_not_finite_end_that_row_only(bad, at):
    logits = random_logits(2)
    logits[0, at] = bad
    tokens, *_ = draw(logits, [row(), row()])
    assert tokens.tolist() == [-1, int(logits[1].argmax())]


@pytest.mark.parametrize("isa", LEVELS)
def test_logprobs_are_those_of_the_raw_distribution(isa):
    logits = random_logits()
    bias = (int(logits[0].argsort()[-3]), 0, 0, 50.0)
    tokens, logprobs, ids, tops = draw(logits, [row(logprobs=5, temperature=0.7, num_adjustments=1)], [bias], isa=isa)
    exact = logits[0].astype(np.float64)
    exact = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    order = np.lexsort((np.arange(VOCAB), -logits[0]))[:5]
    assert tokens[0] == bias[0]
    assert logprobs[0] == pytest.approx(exact[tokens[0]], abs=1e-5)
    assert ids[0, :5].tolist() == order.tolist()
    assert tops[0, :5] == pytest.approx(exact[order], abs=1e-5)


@pytest.mark.parametrize(
    ("temperature", "min_p", "top_k", "top_p"),
    [
        (1, 0, 5, 1),
        (1, 0, 0, 0.5),
        (0.5, 0, 40, 0.9),
        (2, 0.1, 0, 1),
        (1.5, 0.01, 30, 0.3),
        (1, 0, 1, 1),
        (1, 0, 0, 1e-6),
        (1, 1, 0, 1),
    ],
)
def test_every_token_that_the_filters_keep_and_no_other_is_drawn(temperature, min_p, top_k, top_p):
    logits = np.round(random_logits()[0] * 2) / 2  # many ties
    allowed = kept_by_numpy(logits, temperature, min_p, top_k, top_p)
    rows = [
        row(seed=seed, position=7, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p) for seed in range(60)
    ]
    seen = set()
    for base in range(40):
        batch = [(r[0], base, *r[2:]) for r in rows]
        seen |= set(draw(np.tile(logits, (60, 1)), batch)[0].tolist())
    assert seen <= allowed
    if len(allowed) <= 10:
        assert seen == allowed


def test_a_flat_distribution_is_cut_by_id_where_weights_tie():
    tokens = [draw(np.zeros((1, VOCAB), np.float32), [row(seed=s, temperature=1, top_k=3)])[0][0] for s in range(40)]
    assert set(tokens) == {0, 1, 2}


def test_frequencies_follow_the_softmax():
    logits = np.full((1, VOCAB), -50, np.float32)
    logits[0, [3, 500, 999]] = np.log([0.5, 0.3, 0.2]).astype(np.float32)
    drawn = np.concatenate(
        [
            draw(np.tile(logits, (64, 1)), [row(seed=9, position=64 * i + j, temperature=1) for j in range(64)])[0]
            for i in range(60)
        ]
    )
    shares = [(drawn == token).mean() for token in (3, 500, 999)]
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.03)


def test_a_draw_depends_on_seed_and_position_only():
    logits = random_logits(33)
    rows = [row(seed=5, position=i, temperature=1, top_p=0.95) for i in range(33)]
    together = draw(logits, rows)[0].tolist()
    alone = [int(draw(logits[i : i + 1], rows[i : i + 1], threads=1)[0][0]) for i in range(33)]
    assert together == alone
    other_seed = draw(logits, [(6, *r[1:]) for r in rows])[0].tolist()
    assert other_seed != together
    for seed, first in ((5 + 2**32, 0), (5, 2**32)):  # the upper halves count too
        upper = [row(seed=seed, position=first + i, temperature=1, top_p=0.95) for i in range(33)]
        assert draw(logits, upper)[0].tolist() != together


@pytest.mark.parametrize(
    ("adjustment", "settings", "expected"),
    [
        ((10, 2, 1, 0.0), {"repetition_penalty": 2.0}, 4.0 / 2),
        ((11, 0, 1, 0.0), {"repetition_penalty": 2.0}, -4.0 * 2),
        ((10, 2, 1, 0.0), {"presence_penalty": 0.5}, 4.0 - 0.5),
        ((10, 2, 1, 0.0), {"frequency_penalty": 0.5}, 4.0 - 1.0),
        ((10, 0, 1, 0.0), {"presence_penalty": 0.5, "frequency_penalty": 0.5}, 4.0),
        ((10, 0, 0, 2.5), {}, 6.5),
    ],
)
def test_penalties_change_a_logit_by_the_published_formulas(adjustment, settings, expected):
    """The adjusted token wins against a rival just below its expected logit and loses to one just above."""
    token = adjustment[0]
    for rival, winner in ((expected - 0.01, token), (expected + 0.01, 700)):
        logits = np.full((1, VOCAB), -100, np.float32)
        logits[0, 10] = 4
        logits[0, 11] = -4
        logits[0, 700] = rival
        if token == 11:
            logits[0, 10] = -100
        assert draw(logits, [row(num_adjustments=1, **settings)], [adjustment])[0][0] == winner


def test_a_token_biased_by_minus_infinity_is_never_drawn():
    logits = np.full((1, VOCAB), -1000, np.float32)
    logits[0, 4] = 1000
    for temperature in (0.0, 1.0):
        never = (4, 0, 0, -np.inf)
        assert draw(logits, [row(temperature=temperature, num_adjustments=1)], [never])[0][0] != 4


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_adjusted_twice_gets_both_changes_and_its_first_logit_back(temperature, isa):
    """`draw` checks that the caller's logits are restored; the log probability is read after that."""
    logits = np.full((1, VOCAB), -100, np.float32)
    logits[0, [4, 700]] = [1, 5]
    adjustments = [(4, 0, 0, 3.0), (9, 0, 0, 1.0), (4, 0, 0, 98.0)]
    settings = row(temperature=temperature, logprobs=1, num_adjustments=3)
    tokens, logprobs, ids, tops = draw(logits, [settings], adjustments, isa=isa)
    assert (tokens[0], ids[0, 0]) == (4, 700)
    assert logprobs[0] == pytest.approx(-4 - np.log(1 + np.exp(-4)), abs=1e-6)
    assert tops[0, 0] == pytest.approx(-np.log(1 + np.exp(-4)), abs=1e-6)


@pytest.mark.parametrize("isa", LEVELS)
def test_nan_logits_of_one_call_do_not_reach_the_next_call(isa):
    """The scratch of a worker and the results of a row are used again; only the row of NaN reports -1."""
    sampler = Sampler(VOCAB, STRIDE, 8, Pool(1), isa)
    rows = [row(seed=s, temperature=1, top_p=0.9, top_k=50, min_p=0.01, logprobs=3) for s in range(8)]

    def call(of, logits):
        padded = np.zeros((8, STRIDE), np.float32)
        padded[:, :VOCAB] = logits
        maxima = np.maximum.reduceat(padded[:, :VOCAB], np.arange(0, VOCAB, 32), axis=1)
        tokens, logprobs, ids, tops = of.sample(padded, maxima, np.array(rows, ROW), np.zeros(0, ADJUSTMENT))
        return tokens.tolist(), logprobs.tobytes(), ids[:, :3].tobytes(), tops[:, :3].tobytes()

    want = call(Sampler(VOCAB, STRIDE, 8, Pool(1), isa), random_logits(8))
    assert call(sampler, np.nan)[0] == [-1] * 8
    assert call(sampler, random_logits(8)) == want


def masked(logits, rows, allowed, isa=None, adjustments=()):
    """Draw with one mask per list of allowed token ids."""
    bits = np.zeros((len(allowed), 32 * ((VOCAB + 31) // 32)), bool)
    for mask, ids in zip(bits, allowed, strict=True):
        mask[list(ids)] = True
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    padded = np.zeros((len(logits), STRIDE), np.float32)
    padded[:, :VOCAB] = logits
    maxima = np.maximum.reduceat(padded[:, :VOCAB], np.arange(0, VOCAB, 32), axis=1)
    sampler = Sampler(VOCAB, STRIDE, 64, Pool(2), isa)
    results = sampler.sample(padded, maxima, np.array(rows, ROW), np.array(list(adjustments), ADJUSTMENT), masks)
    return [array.copy() for array in results]


@pytest.mark.parametrize("isa", LEVELS)
def test_a_masked_row_takes_the_largest_allowed_logit_and_others_are_untouched(isa):
    logits = random_logits(3)
    allowed = [0, 31, 32, 500, VOCAB - 1]
    rows = [row(mask=1, logprobs=8), row(logprobs=8), row(mask=2, logprobs=8)]
    tokens, logprobs, top_ids, _ = masked(logits, rows, [allowed, range(VOCAB)], isa)
    free = draw(logits, [row(logprobs=8)] * 3, isa=isa)
    by_logit = sorted(allowed, key=lambda token: -logits[0, token])
    assert tokens[0] == by_logit[0]
    assert top_ids[0, :8].tolist() == [*by_logit, -1, -1, -1], "alternatives are among the allowed tokens"
    raw = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    assert logprobs[0] == pytest.approx(raw[tokens[0]], abs=1e-5), "the probability is the model's own"
    for index in (1, 2):
        assert (tokens[index], logprobs[index]) == (free[0][index], free[1][index])
        assert top_ids[index, :8].tolist() == free[2][index, :8].tolist()


def test_only_allowed_tokens_are_drawn_and_with_their_own_frequencies():
    logits = random_logits()
    logits[0, [3, 40, 999]] = [0.0, 1.0, -2.0]
    rows = [row(mask=1, temperature=1.0, position=position) for position in range(64)]
    seen = masked(np.repeat(logits, 64, 0), rows, [[3, 40, 999]])[0]
    assert set(seen) == {3, 40, 999}
    weights = np.exp([0.0, 1.0, -2.0]) / np.exp([0.0, 1.0, -2.0]).sum()
    assert [np.mean(seen == token) for token in (3, 40, 999)] == pytest.approx(weights, abs=0.15)


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1}])
def test_a_mask_gives_the_draw_of_the_allowed_tokens_alone(filters):
    """At every level, however many tokens of a block of 32 are allowed: like logits of minus infinity."""
    chance = np.random.default_rng(5)
    logits = random_logits(64)
    shares = np.repeat(chance.choice([0.0, 0.02, 0.5, 1.0], (64, STRIDE // 32)), 32, axis=1)[:, :VOCAB]
    bits = chance.random((64, VOCAB)) < shares
    bits[:, 700] = True
    rows = [row(temperature=1.5, position=i, mask=i + 1, **filters) for i in range(64)]
    plain = [row(temperature=1.5, position=i, **filters) for i in range(64)]
    expected = draw(np.where(bits, logits, np.float32(-1e30)), plain)[0]
    for isa in LEVELS:
        tokens = masked(logits, rows, [np.flatnonzero(each) for each in bits], isa)[0]
        assert tokens.tolist() == expected.tolist()


def test_a_mask_comes_before_bias_and_penalties():
    logits = random_logits()
    rows = [row(mask=1, num_adjustments=2)]
    tokens = masked(logits, rows, [[3, 40]], adjustments=[(7, 0, 0, 100.0), (3, 0, 0, 100.0)])[0]
    assert tokens[0] == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_mask_allows_nothing_has_no_token(temperature):
    tokens = masked(random_logits(2), [row(mask=1, temperature=temperature), row()], [[]])[0]
    assert tokens[0] == -1
    assert tokens[1] >= 0


def test_masks_that_do_not_fit_are_refused():
    logits = np.zeros((1, STRIDE), np.float32)
    maxima = np.zeros((1, 32), np.float32)
    sampler = Sampler(VOCAB, STRIDE, 4, Pool(1))
    nothing = np.array([], ADJUSTMENT)
    with pytest.raises(ValueError, match="beyond the 0 masks"):
        sampler.sample(logits, maxima, np.array([row(mask=1)], ROW), nothing)
    with pytest.raises(ValueError, match="beyond the 1 masks"):
        sampler.sample(logits, maxima, np.array([row(mask=2)], ROW), nothing, np.zeros((1, 32), np.int32))
    with pytest.raises(ValueError, match="beyond the 1 masks"):
        sampler.sample(logits, maxima, np.array([row(mask=-1)], ROW), nothing, np.zeros((1, 32), np.int32))
    with pytest.raises(ValueError, match="masks of 31 words"):
        sampler.sample(logits, maxima, np.array([row(mask=1)], ROW), nothing, np.zeros((1, 31), np.int32))


def test_rows_that_point_outside_are_refused():
    logits = random_logits()
    with pytest.raises(ValueError, match="beyond the adjustments"):
        draw(logits, [row(num_adjustments=1)])
    with pytest.raises(ValueError, match="adjusted token ids"):
        draw(logits, [row(num_adjustments=1)], [(VOCAB, 0, 0, 1.0)])
    with pytest.raises(ValueError, match="top logprobs"):
        draw(logits, [row(logprobs=33)])
