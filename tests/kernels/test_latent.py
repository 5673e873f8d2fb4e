"""Latent attention: the reference, and the same bits in any chunks, batch and pages, on any threads and level."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from quire.kernels import Pool, Program, supported_levels
from quire.kernels.ops import (
    INPUT_DTYPES,
    Attention,
    Embed,
    HeadLinear,
    LatentAttention,
    Region,
    SplitHeads,
    region_nbytes,
)
from quire.pager.layout import KVLayout

from tests.kernels.test_linear import packed
from tests.kernels.test_program import tolerance
from tests.support.reference import ReferenceProgram

LEVELS = supported_levels()
ROWS = 80
PAGES = 24


class Latents:
    """A program of one latent attention with its absorbed matrices; token i has row i of a table."""

    def __init__(
        self,
        *,
        kv: str = "f32",
        weights: str = "f32",
        heads: int = 3,
        nope: int = 24,
        rotary_dim: int = 16,
        rank: int = 64,
        value: int = 32,
        page_size: int = 32,
        isa: str | None = None,
        threads: int = 2,
        seed: int = 1,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.end = 0
        self.heads, self.nope, self.rotary_dim, self.rank, self.value = heads, nope, rotary_dim, rank, value
        stride = nope + rotary_dim
        first_key = heads * stride
        self.table = rng.standard_normal((300, first_key + rank + rotary_dim)).astype(np.float32)
        rotary = rng.uniform(-1, 1, (700, rotary_dim)).astype(np.float32)
        self.norm = (1 + 0.1 * rng.standard_normal(rank)).astype(np.float32)
        self.up = [(rng.standard_normal((rank, nope)) / nope**0.5).astype(np.float32) for _ in range(heads)]
        self.down = [(rng.standard_normal((value, rank)) / rank**0.5).astype(np.float32) for _ in range(heads)]
        form = INPUT_DTYPES[weights]
        x = self._region(ROWS, self.table.shape[1], "f32")
        split = self._region(heads * ROWS, nope, form)
        absorbed = self._region(ROWS, heads * rank, "f32")
        attended = self._region(heads * ROWS, rank, form)
        self.out = self._region(ROWS, heads * value, "f32")
        self.attention = LatentAttention(
            x, stride, absorbed, x, first_key, attended, 0, 0, heads, rank, self.norm, 1e-6, rotary, stride**-0.5
        )
        self.ops = [
            Embed(packed(self.table, "f32"), x),
            SplitHeads(x, stride, split),
            HeadLinear(split, tuple(packed(matrix, weights) for matrix in self.up), absorbed),
            self.attention,
            HeadLinear(attended, tuple(packed(matrix, weights) for matrix in self.down), self.out),
        ]
        self.layout = KVLayout(1, 1, rank + rotary_dim, kv, page_size, values_in_keys=rank)
        self.memory = np.full(PAGES * self.layout.page_bytes, 0xFF, np.uint8)  # NaN
        self.isa, self.threads, self.kv = isa, threads, kv
        self.program = self.bind()

    def bind(self) -> Program:
        limits = {"max_rows": ROWS, "max_samples": 1, "max_sequences": 40, "vocab_size": 300}
        layout, pool = self.layout, Pool(self.threads)
        return Program(self.ops, self.end, self.memory, layout, PAGES, pool, isa=self.isa, **limits)

    def _region(self, rows: int, columns: int, dtype: str) -> Region:
        region = Region(self.end, rows, columns, dtype)
        self.end += region_nbytes(rows, columns, dtype)
        return region

    def step(self, *sequences) -> tuple[np.ndarray, ...]:
        """Return the arrays of a step of (first position, tokens, pages) sequences."""
        counts = [len(tokens) for _, tokens, _ in sequences]
        return (
            np.concatenate([tokens for _, tokens, _ in sequences]).astype(np.int32),
            np.cumsum([0, *counts]).astype(np.int32),
            np.array([first for first, _, _ in sequences], np.int32),
            np.concatenate([table for *_, table in sequences]).astype(np.int32),
            np.cumsum([0, *(len(table) for *_, table in sequences)]).astype(np.int32),
            np.zeros(0, np.int32),
        )

    def run(self, *sequences) -> np.ndarray:
        self.program.run(*self.step(*sequences))
        return self.program.view(self.out)[: sum(len(tokens) for _, tokens, _ in sequences)].copy()


def tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 300, n)


SHAPES = [
    {"heads": 3, "nope": 24, "rotary_dim": 16, "rank": 64, "value": 32},
    {"heads": 9, "nope": 128, "rotary_dim": 64, "rank": 512, "value": 128},
    {"heads": 1, "nope": 2, "rotary_dim": 2, "rank": 32, "value": 64},
    {"heads": 96, "nope": 16, "rotary_dim": 8, "rank": 32, "value": 32},  # two groups of heads share the keys
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape['heads']} heads, rank {shape['rank']}")
@pytest.mark.parametrize(
    ("weights", "kv", "page_size"),
    [("f32", "f32", 16), ("bf16", "bf16", 32), ("q8", "int8", 64), ("q4", "int8", 16), ("f32", "f16", 32)],
)
def test_latent_attention_matches_the_reference(weights, kv, page_size, shape):
    options = {"weights": weights, "kv": kv, "page_size": page_size, **shape}
    models = {isa: Latents(**options, isa=isa) for isa in LEVELS}
    reference = ReferenceProgram(models[LEVELS[0]].ops, kv, page_size, PAGES)
    a, b = np.arange(23, 11, -1), np.arange(12)
    pages_of = 64 // page_size * 2
    steps = [
        [(0, tokens(40, 1), a[:pages_of]), (0, tokens(3, 2), b[:1])],
        [(3, tokens(1, 3), b[:1]), (40, tokens(31, 4), a[:pages_of])],
        [(71, tokens(1, 5), a[:pages_of]), (4, tokens(1, 6), b[:1])],
    ]
    for step in steps:
        first = models[LEVELS[0]]
        reference.run(*first.step(*step))
        want = reference.regions[first.out]
        for isa, model in models.items():
            assert np.abs(model.run(*step) - want).max() <= 2 * tolerance(weights, kv) * np.ptp(want), isa


@pytest.mark.parametrize("kv", ["f32", "int8"])
def test_absorbed_matrices_give_the_attention_of_expanded_keys_and_values(kv):
    """The definition of multi-head latent attention: keys and values of each head are products of the latents."""
    model = Latents(kv=kv, heads=4, nope=32, rotary_dim=16, rank=64, value=32)
    ids = tokens(60)
    rows = model.table[ids].astype(np.float64)
    got = model.run((0, ids, np.arange(2)))
    rotary = model.attention.rotary[:60].astype(np.float64)

    def rotated(x: np.ndarray) -> np.ndarray:
        cos, sin, a, b = rotary[:, :8], rotary[:, 8:], x[:, :8], x[:, 8:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)

    latents = rows[:, 4 * 48 : 4 * 48 + 64]
    latents = latents / np.sqrt((latents**2).mean(axis=1, keepdims=True) + 1e-6) * model.norm
    shared = rotated(rows[:, 4 * 48 + 64 :])
    seen = np.tril(np.ones((60, 60), bool))
    for head in range(4):
        q = rows[:, head * 48 : head * 48 + 48]
        keys, values = latents @ model.up[head], latents @ model.down[head].T
        scores = (q[:, :32] @ keys.T + rotated(q[:, 32:]) @ shared.T) * 48**-0.5
        weights = np.where(seen, np.exp(scores - scores.max(axis=1, keepdims=True)), 0)
        want = weights / weights.sum(axis=1, keepdims=True) @ values
        error = np.abs(got[:, 32 * head : 32 * head + 32] - want).max() / np.ptp(want)
        assert error < {"f32": 2e-6, "int8": 1e-2}[kv]


@pytest.mark.parametrize(("heads", "isa"), [*((5, isa) for isa in LEVELS), (80, LEVELS[-1])])
@pytest.mark.parametrize(("weights", "kv"), [("f32", "f32"), ("bf16", "bf16"), ("q8", "int8")])
def test_rows_have_the_same_bits_in_any_chunks_batch_pages_and_on_any_threads(weights, kv, heads, isa):
    ids = tokens(300, 3)

    def last_rows(chunk: int, page_size: int, threads: int, others: int) -> bytes:
        model = Latents(weights=weights, kv=kv, heads=heads, page_size=page_size, threads=threads, isa=isa)
        table = np.arange(-(-300 // page_size))
        neighbors = [(0, tokens(1 + i % 2, i), np.array([PAGES - 1 - i])) for i in range(others)]
        chunks = [ids[at : min(at + chunk, 299)] for at in range(0, 299, chunk)]
        rows = [model.run((number * chunk, each, table), *neighbors)[: len(each)] for number, each in enumerate(chunks)]
        return np.concatenate([*rows, model.run(*neighbors, (299, ids[299:], table))[-1:]]).tobytes()

    cases = [(60, 32, 1, 0), (7, 64, 2, 2), (33, 16, 3, 1), (1, 32, 2, 0)]
    if isa == "scalar":
        cases = cases[:2]  # scalar is slow
    assert len({last_rows(*case) for case in cases}) == 1


@pytest.mark.parametrize(("weights", "kv"), [("f32", "f32"), ("q8", "int8"), ("q4", "f16")])
def test_rows_have_the_same_bits_at_every_level(weights, kv):
    ids = tokens(75, 3)
    found = {Latents(weights=weights, kv=kv, isa=isa).run((0, ids, np.arange(3))).tobytes() for isa in LEVELS}
    assert len(found) == 1


@pytest.mark.parametrize(
    ("kv", "token_bytes"), [("f32", 576 * 4), ("bf16", 576 * 2), ("f16", 576 * 2), ("int8", 576 + 18 * 2)]
)
def test_a_page_holds_one_latent_and_one_rotated_part_per_token_for_all_heads(kv, token_bytes):
    """The shape of DeepSeek-V2-Lite: 512 + 64 elements in each of 27 layers; int8 has an fp16 scale for each 32."""
    layout = KVLayout(27, 1, 576, kv, 32, values_in_keys=512)
    assert layout.token_bytes == 27 * token_bytes
    assert layout.page_bytes == 32 * layout.token_bytes


def test_a_number_that_is_not_finite_stays_in_its_sequence():
    model = Latents(kv="int8")
    want = model.run((0, tokens(9, 1), np.array([0])), (0, tokens(5, 2), np.array([1])))
    table = model.table.copy()
    ids = np.setdiff1d(np.arange(300), [*tokens(9, 1), *tokens(5, 2)])[:4]
    table[ids[0]] = np.nan
    model.ops[0] = Embed(packed(table, "f32"), model.ops[0].out)
    model.program = model.bind()
    got = model.run((0, tokens(9, 1), np.array([0])), (0, ids, np.array([2])), (0, tokens(5, 2), np.array([1])))
    assert np.isnan(got[9:13]).all()
    assert got[[*range(9), *range(13, 18)]].tobytes() == want.tobytes()


def test_sizes_that_do_not_fit_are_refused():
    model = Latents()
    split, up, attention, down = model.ops[1:]
    wrong = [
        (1, replace(split, stride=8), "has no heads of 8 columns"),
        (2, replace(up, weights=up.weights[:2]), "2 heads need weights of one shape"),
        (
            3,
            replace(attention, rank=32),
            "layer 0 with 1 x 48 KV heads does not fit a group of 1 layers with 1 x 80, the first 64",
        ),
        (3, replace(attention, first_key=-1), "has no 80 columns from -1 on"),
        (3, replace(attention, rotary=attention.rotary[:, :7].copy()), "with 1 x 71 KV heads does not fit"),
        (3, replace(attention, layer=1), "layer 1 with 1 x 80 KV heads does not fit a group"),
        (4, replace(down, input=model.ops[3].absorbed), "should hold at least"),
    ]
    for index, op, message in wrong:
        ops = list(model.ops)
        model.ops = [*ops[:index], op, *ops[index + 1 :]]
        with pytest.raises(ValueError, match=message):
            model.bind()
        model.ops = ops


def test_attention_with_values_is_refused_over_pages_of_latents():
    model = Latents(rank=64, rotary_dim=16)
    x = model.ops[0].out
    op = Attention(x, model.out, 0, 0, 1, 1, 80, None, None, 1e-6, None, 1.0, 0)
    model.ops = [model.ops[0], op]
    with pytest.raises(
        ValueError, match="does not fit a group of 1 layers with 1 x 80, the first 64 elements of keys as values"
    ):
        model.bind()
