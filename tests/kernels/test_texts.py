"""Encoders without a KV cache against the numpy reference; a text's bits never depend on the other texts of a step."""

from dataclasses import replace

import numpy as np
import pytest
from quire.kernels import Pool, Program, supported_levels
from quire.kernels.ops import EphemeralAttention, Linear, NormRows, Region, region_nbytes

from tests.kernels.encoder import MAX_TEXTS, POSITIONS, TYPES, VOCAB, Encoder

LEVELS = supported_levels()
TOLERANCE = {"f32": 3e-5, "bf16": 2e-2, "q8": 5e-2}  # tolerance for vectors of length 1


def text(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, n).astype(np.int32)


def close(encoder: Encoder, *texts: np.ndarray) -> bool:
    types = text(sum(map(len, texts)), 5) % TYPES
    got = encoder.run(*texts, types=types)
    want = encoder.run_reference(*texts, types=types)
    return bool(np.abs(got - want).max() <= TOLERANCE[encoder.weights if encoder.kv == "f32" else "q8"])


PRE_NORM = {"post_norm": False, "rotates": True, "epilogue": "geglu_exact", "windows": (0, 9), "pooling": "first"}
GROUPED = {"group": 4, "hidden": 272, "intermediate": 400}
CAUSAL = {"causal": True, "kv_heads": 2, "qk_norm": True, "rotates": True, "windows": (0, 40), "pooling": "last"}


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(
    ("weights", "kv", "options"),
    [
        ("f32", "f32", {}),
        ("q8", "int8", {}),
        ("f32", "f32", PRE_NORM),
        ("bf16", "bf16", PRE_NORM),
        ("f32", "int8", CAUSAL),
        ("bf16", "bf16", CAUSAL),
        ("q8", "int8", {"epilogue": "relu", "head_dim": 32}),
        ("f32", "f32", {"biased": True, "kv_heads": 2}),
        ("q8", "int8", {"biased": True, "windows": (0, 20)}),
        ("q8", "int8", GROUPED),
        ("q8", "int8", {**GROUPED, "epilogue": "geglu_exact", "hidden": 160, "intermediate": 288, "group": 2}),
        ("bf16", "bf16", {"biased": True, "head_dim": 32}),
        ("f32", "f32", {"epilogue": "gelu_tanh", "head_dim": 10, "hidden": 33, "intermediate": 50}),
    ],
)
def test_an_encoder_matches_the_reference(weights, kv, options, isa):
    encoder = Encoder(weights=weights, kv=kv, isa=isa, **options)
    assert close(encoder, text(70, 1), text(1, 2), text(33, 3))


@pytest.mark.parametrize("kv", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("window", [0, 3, 64, 300])
def test_long_texts_see_both_sides_of_their_window(window, kv):
    encoder = Encoder(kv=kv, windows=(window,), biased=window == 64)
    assert close(encoder, text(600, 1), text(65, 2))


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(
    ("weights", "kv", "more"), [("f32", "f32", {}), ("bf16", "bf16", {}), ("q8", "int8", {}), ("q8", "int8", GROUPED)]
)
def test_a_text_has_the_same_bits_among_any_others_and_on_any_number_of_threads(weights, kv, more, isa):
    options = {"weights": weights, "kv": kv, "windows": (0, 20), "isa": isa, **more}
    encoder = Encoder(**options)
    one_thread = Encoder(**options, threads=1)
    mine = text(130, 1)
    alone = encoder.run(mine)[0].tobytes()
    assert one_thread.run(mine)[0].tobytes() == alone
    for others in ([1], [64, 65], [5] * 20):
        before = [text(n, i + 2) for i, n in enumerate(others)]
        assert encoder.run(*before, mine, text(9, 3))[len(others)].tobytes() == alone
        assert one_thread.run(mine, *before)[0].tobytes() == alone


@pytest.mark.parametrize(("weights", "kv", "more"), [("f32", "f32", {}), ("q8", "int8", {}), ("q8", "int8", GROUPED)])
@pytest.mark.parametrize("epilogue", ["gelu", "geglu_exact"])
def test_an_encoder_has_the_same_bits_at_every_level(epilogue, weights, kv, more):
    texts = [text(90, 1), text(3, 2)]
    options = {"weights": weights, "kv": kv, "epilogue": epilogue, "biased": epilogue == "gelu", **more}
    vectors = {Encoder(**options, isa=isa).run(*texts).tobytes() for isa in LEVELS}
    assert len(vectors) == 1


@pytest.mark.parametrize("kv", ["f32", "int8"])
def test_a_batch_that_advances_by_ranges_of_ops_has_the_same_bits(kv):
    encoder = Encoder(kv=kv)
    texts = [text(70, 1), text(12, 2)]
    want = encoder.run(*texts)
    step = encoder.step(*texts)
    num_ops = len(encoder.ops)
    for first in range(num_ops):
        encoder.program.run_texts(*step, None, first, first + 1)
    assert encoder.program.view(encoder.vectors)[:2, : encoder.hidden].tobytes() == want.tobytes()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("weights", "kv"), [("f32", "f32"), ("bf16", "bf16"), ("q8", "int8")])
@pytest.mark.parametrize("parts", [2, 3, 7, 50, 1000])
def test_ops_in_parts_have_the_same_bits(weights, kv, threads, parts):
    """Parts may have no item at all, or some that store keys and some that attend to them."""
    encoder = Encoder(weights=weights, kv=kv, windows=(0, 9), threads=threads, rotates=True)
    texts = [text(300, 1), text(1, 2), text(130, 3), text(1, 4)]
    want = encoder.run(*texts)
    step = encoder.step(*texts)
    step_size = max(1, parts // 7)
    encoder.run(text(700, 9))
    for op in range(len(encoder.ops)):
        for part in range(0, parts, step_size):
            some = (part, min(part + step_size, parts), parts)
            encoder.program.run_texts(*step, None, op, op + 1, part=some)
    assert encoder.program.view(encoder.vectors)[:4, : encoder.hidden].tobytes() == want.tobytes()


def test_a_part_computes_its_rows_and_no_others():
    encoder = Encoder(post_norm=False)
    step = encoder.step(text(100))
    embedded = encoder.ops[0].out
    encoder.program.view(embedded).fill(np.nan)
    encoder.program.run_texts(*step, None, 0, 1, part=(1, 3, 4))
    done = ~np.isnan(encoder.program.view(embedded)[:, 0])
    assert np.flatnonzero(done).tolist() == list(range(25, 75))


@pytest.mark.parametrize("part", [(0, 0, 1), (1, 1, 2), (-1, 1, 2), (0, 3, 2), (0, 1, (1 << 24) + 1), (0, 0, 0)])
def test_parts_that_do_not_exist_are_refused(part):
    encoder = Encoder()
    with pytest.raises(ValueError, match="are not a range of"):
        encoder.program.run_texts(*encoder.step(text(3)), None, 0, 1, part=part)


def test_several_ops_have_no_parts():
    encoder = Encoder()
    for first, end in ((0, 2), (1, 1)):
        with pytest.raises(ValueError, match="not one op that has parts"):
            encoder.program.run_texts(*encoder.step(text(3)), None, first, end, part=(0, 1, 2))


@pytest.mark.parametrize("weights", ["f32", "q8"])
def test_no_op_reads_what_the_arena_held_before(weights):
    encoder = Encoder(weights=weights, head_dim=10, hidden=33, intermediate=50)
    texts = [text(40, 1), text(3, 2)]
    want = encoder.run(*texts).tobytes()
    for op in encoder.ops:
        if isinstance(op.out, Region) and op.out.dtype == "f32":
            encoder.program.view(op.out).fill(np.nan)
    assert encoder.run(*texts).tobytes() == want


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("kind", ["layer", "rms", "l2"])
def test_norms_of_zeros_are_finite_and_those_that_overflow_are_nan(kind, isa):
    source = Region(0, 3, 48, "f32")
    out = Region(region_nbytes(3, 48, "f32"), 3, 48, "f32")
    op = NormRows(source, kind, None if kind == "l2" else np.ones(48, np.float32), None, 1e-12, out)
    program = Program(
        [op], 2 * region_nbytes(3, 48, "f32"), None, None, 0, Pool(1), max_rows=3, max_samples=3, max_sequences=3,
        vocab_size=1, isa=isa,
    )  # fmt: skip
    rows = program.view(source)
    rows[0], rows[1], rows[2] = 0, np.where(np.arange(64) < 24, 1e38, 0), np.arange(64)
    rows[:, 48:] = 0
    program.view(out).fill(np.nan)
    program.run_texts(np.zeros(3, np.int32), np.array([0, 3], np.int32), None)
    got = program.view(out)
    assert not got[0].any()
    assert np.isnan(got[1, :48]).all()
    shift = rows[2, :48].mean() if kind == "layer" else 0
    y = rows[2, :48] - shift
    assert np.allclose(got[2, :48], y / (np.linalg.norm(y) if kind == "l2" else np.sqrt((y * y).mean())), atol=1e-6)
    assert not got[:, 48:].any(), "the padding is zero"


def test_only_a_text_with_nan_ends_as_nan():
    encoder = Encoder(pooling="mean")
    row = np.flatnonzero(text(70, 1) == text(70, 1)[7])
    encoder.ops = [
        replace(op, weight=_poisoned(encoder, int(text(70, 1)[7]))) if i == 0 else op
        for i, op in enumerate(encoder.ops)
    ]
    assert len(row)
    clean = np.setdiff1d(np.arange(VOCAB), text(70, 1)).astype(np.int32)[:20]
    got = encoder.run(text(70, 1), clean, program=encoder.bind())
    assert np.isnan(got[0]).all()
    assert np.isfinite(got[1]).all()


def _poisoned(encoder: Encoder, token: int):
    rows = encoder.random(VOCAB, encoder.hidden)
    rows[token] = np.nan
    matrix = encoder.packed(VOCAB, encoder.hidden, dtype="f32")
    matrix.fill(rows)
    return matrix


@pytest.mark.parametrize(
    ("token_ids", "row_start", "type_ids", "message"),
    [
        ([], [0], None, "0 rows of 0 texts"),
        ([1, 2], [0, 2, 2], None, "text 1 must have 1"),
        ([1, 2], [0, 1], None, "row_start must run"),
        ([1, VOCAB], [0, 2], None, "outside the vocabulary"),
        ([1, -1], [0, 2], None, "outside the vocabulary"),
        ([1, 2], [0, 2], [0, TYPES], "outside the 2 types"),
        ([1, 2], [0, 2], [0], "2 rows need as many type ids"),
        ([1] * (POSITIONS + 1), [0, POSITIONS + 1], None, f"1..{POSITIONS} tokens"),
        ([1] * (MAX_TEXTS + 1), list(range(MAX_TEXTS + 2)), None, f"1..{MAX_TEXTS}"),
    ],
)
def test_texts_that_do_not_fit_are_refused(token_ids, row_start, type_ids, message):
    types = None if type_ids is None else np.array(type_ids, np.int32)
    with pytest.raises(ValueError, match=message):
        Encoder().program.run_texts(np.array(token_ids, np.int32), np.array(row_start, np.int32), types)


def test_ranges_and_programs_that_do_not_fit_are_refused(toy):
    encoder = Encoder()
    step = encoder.step(text(3))
    for first, end in ((-1, 2), (3, 2), (0, 99)):
        with pytest.raises(ValueError, match="not a range"):
            encoder.program.run_texts(*step, None, first, end)
    with pytest.raises(ValueError, match="runs texts"):
        encoder.program.run(**toy().step((text(3), 0, np.array([0], np.int32))))
    with pytest.raises(ValueError, match="runs sequences"):
        toy().program.run_texts(*step)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 2}, "do not fit"),
        ({"window": -1}, "do not fit"),
        ({"rotary": np.zeros((8, 26), np.float32)}, "rotary table must be"),
        ({"bias": np.zeros((3, 100), np.float32)}, r"bias must be \[4, 2 \* positions - 1 \+ 63\], not \[3, 100\]"),
        ({"bias": np.zeros((4, 62), np.float32)}, "bias must be"),
        ({"bias": np.zeros((4, 65), np.float32)}, "bias must be"),
    ],
)
def test_attention_that_does_not_fit_its_pages_is_refused(changes, message):
    encoder = Encoder()
    encoder.ops = [replace(op, **changes) if isinstance(op, EphemeralAttention) else op for op in encoder.ops]
    with pytest.raises(ValueError, match=message):
        encoder.bind()


def test_a_text_must_not_be_longer_than_the_bias():
    encoder = Encoder()
    bias = np.zeros((4, 2 * 20 - 1 + 63), np.float32)
    encoder.ops = [replace(op, bias=bias) if isinstance(op, EphemeralAttention) else op for op in encoder.ops]
    program = encoder.bind()
    encoder.run(text(20), program=program)
    with pytest.raises(ValueError, match=r"text 0 must have 1\.\.20 tokens"):
        encoder.run(text(21), program=program)


def test_pages_that_do_not_hold_every_step_are_refused():
    encoder = Encoder()
    with pytest.raises(ValueError, match="800 rows of 41 texts need"):
        encoder.bind(max_samples=MAX_TEXTS + 1)
    encoder.offset = encoder.pages.nbytes - 64
    with pytest.raises(ValueError, match="not aligned or not inside"):
        encoder.bind()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": None, "converted": None}, "writes `out`, `converted` or both"),
        ({"kind": "l2"}, "takes a weight"),
        ({"kind": "rms"}, "a bias if it is layer"),
        ({"weight": None}, "takes a weight"),
        ({"weight": np.zeros(3, np.float32)}, "expected a vector"),
    ],
)
def test_norms_that_do_not_fit_are_refused(changes, message):
    encoder = Encoder()
    index = next(i for i, op in enumerate(encoder.ops) if isinstance(op, NormRows))
    encoder.ops[index] = replace(encoder.ops[index], **changes)
    with pytest.raises(ValueError, match=message):
        encoder.bind()


@pytest.mark.parametrize(
    ("kind", "field", "message"),
    [
        (Linear, "input", "does not have the weight's group, 2"),
        (EphemeralAttention, "out", "2 heads of 32 do not fill blocks of 128"),
        (EphemeralAttention, "qkv", "only q8 has groups"),
    ],
)
def test_groups_that_do_not_fit_are_refused(kind, field, message):
    encoder = Encoder(weights="q8", kv="int8", group=2, heads=4, kv_heads=2, head_dim=32)
    index = next(i for i, op in enumerate(encoder.ops) if isinstance(op, kind))
    region = getattr(encoder.ops[index], field)
    encoder.ops[index] = replace(encoder.ops[index], **{field: replace(region, group=4)})
    with pytest.raises(ValueError, match=message):
        encoder.bind()


# Rotary rows of a step


def rotated_by_rows(dim: int, **options) -> Encoder:
    """Return an encoder whose heads are rotated in `dim` elements by rows that each step gives."""
    encoder = Encoder(**options)
    encoder.ops = [replace(op, rotary_dim=dim) if isinstance(op, EphemeralAttention) else op for op in encoder.ops]
    encoder.program, encoder.reference.ops = encoder.bind(), encoder.ops
    return encoder


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(("kv", "dim"), [("f32", 24), ("int8", 16), ("bf16", 8)])
def test_texts_rotated_by_rows_match_the_reference(kv, dim, isa):
    encoder = rotated_by_rows(dim, kv=kv, isa=isa)
    step = encoder.step(text(70, 1), text(1, 2), text(33, 3))
    rows = np.random.default_rng(4).uniform(-1, 1, (104, dim)).astype(np.float32)
    encoder.program.run_texts(*step, rotary=rows)
    encoder.reference.run_texts(*step, rotary=rows)
    want = encoder.reference.regions[encoder.vectors]
    got = encoder.program.view(encoder.vectors)[:3, : encoder.hidden]
    assert np.abs(got - want).max() <= TOLERANCE["f32" if kv == "f32" else "q8"]
    encoder.program.run_texts(*step, rotary=rows[::-1].copy())
    assert np.abs(encoder.program.view(encoder.vectors)[:3, : encoder.hidden] - want).max() > TOLERANCE["f32"]


def test_a_program_without_a_table_needs_rotary_rows():
    encoder = rotated_by_rows(8)
    with pytest.raises(ValueError, match="every step needs rotary rows"):
        encoder.run(text(3))
    with pytest.raises(ValueError, match=r"rotated in \[8\] elements"):
        encoder.program.run_texts(*encoder.step(text(3)), rotary=np.zeros((3, 6), np.float32))
    for dim in (-2, 7, 26):
        with pytest.raises(ValueError, match="rotary_dim must be even"):
            rotated_by_rows(dim)
    with pytest.raises(ValueError, match="rotary_dim 0, not 8"):
        rotated_by_rows(8, rotates=True)
