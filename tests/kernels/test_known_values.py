"""Results computed by hand, at every level, in case the kernels and the reference are wrong in the same way."""

import numpy as np
import pytest
from quire.kernels import PackedMatrix, Pool, Program, Sampler, packed_nbytes, supported_levels
from quire.kernels.ops import ALIGNMENT, AddNorm, Attention, Convert, Embed, Gather, Linear, Normed, Region
from quire.kernels.sample import ADJUSTMENT, ROW, philox
from quire.pager.layout import KVLayout

LN3 = float(np.log(3))
LEVELS = supported_levels()
MAX_ROWS = MAX_POSITIONS = 300
NUM_PAGES = 5  # pages of 64 tokens


def packed(weight, dtype="f32") -> PackedMatrix:
    weight = np.array(weight, np.float32)
    raw = np.zeros(packed_nbytes(*weight.shape, dtype) + ALIGNMENT, np.uint8)
    matrix = PackedMatrix(*weight.shape, dtype, raw[-raw.ctypes.data % ALIGNMENT :])
    matrix.fill(weight)
    return matrix


class Arena:
    """Allocates regions one after another."""

    def __init__(self) -> None:
        self.nbytes = 0

    def region(self, columns: int, dtype: str = "f32") -> Region:
        region = Region(self.nbytes, MAX_ROWS, columns, dtype)
        self.nbytes += region.nbytes
        return region

    def normed(self, columns: int, weight, dtype: str = "f32") -> Normed:
        return Normed(self.region(columns, dtype), self.region(-(-columns // 32)), np.array(weight, np.float32), 0.0)


def run(arena: Arena, ops: list, rows: int, out: Region, isa: str, *, kv="f32", head_dim=2, kv_heads=1, window=0):
    """Run one sequence whose row i is token i, the last row of which samples; return the rows of `out`."""
    layout = KVLayout(1, kv_heads, head_dim, kv, 64, (window,))
    program = Program(
        ops,
        arena.nbytes,
        np.full(NUM_PAGES * layout.page_bytes, 0xFF, np.uint8),
        layout,
        NUM_PAGES,
        Pool(2),
        max_rows=MAX_ROWS,
        max_samples=MAX_ROWS,
        max_sequences=1,
        vocab_size=rows,
        isa=isa,
    )
    ids = np.arange(rows, dtype=np.int32)
    pages = np.arange(NUM_PAGES, dtype=np.int32)
    starts = np.array([0, rows], np.int32), np.zeros(1, np.int32), pages, np.array([0, NUM_PAGES], np.int32)
    program.run(ids, *starts, np.array([rows - 1], np.int32))
    return program.view(out)[:rows, : out.columns]


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8"])
def test_linear(dtype, isa):
    """All numbers are exact in every dtype: each row and column has a 127, so the scales of q8 are 1."""
    x = [[127, 2, -3], [1, -127, 0]]
    weight = [[127, 1, 0], [-5, 127, 1]]
    arena = Arena()
    rows = arena.region(3)
    converted = arena.region(3, dtype)
    y = arena.region(2)
    bias = np.array([0.5, -1], np.float32)
    ops = [
        Embed(packed(x), rows),
        Convert(rows, converted),
        Linear(converted, packed(weight, dtype), bias, y, "store"),
    ]
    assert run(arena, ops, 2, y, isa).tolist() == [[16131.5, -385.0], [0.5, -16135.0]]


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8"])
def test_columns_change_places(dtype, isa):
    arena = Arena()
    rows = arena.region(35)
    converted = arena.region(35, dtype)
    y = arena.region(35)
    order = np.arange(35)[::-1].astype(np.int32)
    ops = [
        Embed(packed([np.arange(93, 128), np.arange(127, 92, -1)]), rows),
        Convert(rows, converted, order),
        Linear(converted, packed(np.eye(35) * 127, dtype), None, y, "store"),
    ]
    want = 127 * np.array([np.arange(127, 92, -1), np.arange(93, 128)])
    assert run(arena, ops, 2, y, isa) == pytest.approx(want, abs={"f32": 0, "bf16": 0, "q8": 64}[dtype])


@pytest.mark.parametrize("order", [[0, 1, 1], [0, 1], [0, 1, 3], [-1, 0, 1], [[0, 1, 2]]])
def test_an_order_has_each_column_once(order):
    arena = Arena()
    rows = arena.region(3)
    converted = arena.region(3)
    ops = [Embed(packed([[1, 2, 3]]), rows), Convert(rows, converted, np.array(order, np.int32))]
    with pytest.raises(ValueError, match="each of 3 columns once"):
        run(arena, ops, 1, converted, None)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8"])
def test_linear_adds_to_its_output(dtype, isa):
    arena = Arena()
    rows = arena.region(2)
    converted = arena.region(2, dtype)
    y = arena.region(2)
    ops = [
        Embed(packed([[127, 1]]), rows),
        Convert(rows, converted),
        Embed(packed([[10, 20]]), y),
        Linear(converted, packed([[127, 1], [0, 127]], dtype), None, y, "add"),
    ]
    assert run(arena, ops, 1, y, isa).tolist() == [[16140.0, 147.0]]


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "q8"])
def test_rms_norm(dtype, isa):
    """sqrt((1 + 49 + 49 + 1) / 4) = 5. The norm's weights are 5, 10, 5, 5."""
    arena = Arena()
    rows = arena.region(4)
    normed = arena.normed(4, [5, 10, 5, 5], dtype)
    y = arena.region(4)
    ops = [
        Embed(packed([[1, 7, -7, 1]]), rows, normed),
        Linear(normed, packed(np.eye(4) * 127, dtype), None, y, "store"),
    ]
    want = np.array([1, 14, -7, 1]) * 127
    assert run(arena, ops, 1, y, isa)[0] == pytest.approx(want, abs={"f32": 1e-3, "bf16": 1e-3, "q8": 8}[dtype])


def gated(epilogue, gates, ups, isa):
    """Return an epilogue's results for these pairs of values."""
    weight = packed(np.zeros((64, 1)))
    for interleave, values in enumerate((gates, ups)):
        column = np.zeros((32, 1), np.float32)
        column[: len(values), 0] = values
        weight.fill(column, interleave=interleave)
    arena = Arena()
    rows = arena.region(1)
    y = arena.region(32)
    ops = [Embed(packed([[1]]), rows), Linear(rows, weight, None, y, epilogue)]
    return run(arena, ops, 1, y, isa)[0, : len(gates)]


@pytest.mark.parametrize("isa", LEVELS)
def test_swiglu(isa):
    """silu(0) * 5 = 0, silu(ln 3) * 2 = 1.5 ln 3, silu(-ln 3) * 4 = -ln 3; an input of 1 selects the weights."""
    assert gated("swiglu", [0, LN3, -LN3], [5, 2, 4], isa) == pytest.approx([0, 1.5 * LN3, -LN3], abs=1e-6)


@pytest.mark.parametrize("isa", LEVELS)
def test_geglu(isa):
    """gelu(0) * 5 = 0; gelu(1) = 0.841192, gelu(-1) = gelu(1) - 1, by the approximation with tanh."""
    assert gated("geglu", [0, 1, -1], [5, 2, 1], isa) == pytest.approx([0, 1.682384, -0.158808], abs=1e-6)


@pytest.mark.parametrize("isa", LEVELS)
def test_exact_geglu(isa):
    """gelu(1) = 0.8413447, gelu(-1) = gelu(1) - 1, by the error function; it ends before 6."""
    gates = [0, 1, -1, 6, -9]
    ups = [5, 2, 1, 1, 1]
    want = [0, 1.6826895, -0.1586553, 6, 0]
    assert gated("geglu_exact", gates, ups, isa) == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(
    ("epilogue", "want"),
    [
        ("gelu", [0, 0.8413447, -0.1586553, 9]),
        ("gelu_tanh", [0, 0.8411920, -0.1588080, 9]),
        ("relu", [0, 1, 0, 9]),
        ("relu_squared", [0, 1, 0, 81]),
        ("tanh", [0, 0.7615942, -0.7615942, 1]),
    ],
)
def test_functions_of_results(epilogue, want, isa):
    arena = Arena()
    rows = arena.region(1)
    y = arena.region(4)
    ops = [Embed(packed([[1]]), rows), Linear(rows, packed([[0], [1], [-1], [9]]), None, y, epilogue)]
    assert run(arena, ops, 1, y, isa)[0] == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("isa", LEVELS)
def test_clamped_swiglu(isa):
    """gate / (1 + exp(-1.702 gate)) * (up + 1), where a gate of 9 is 7 and up is -7 to 7; a gate of -9 stays."""
    gates = [0, 1, -1, 9, -9, 1, 1]
    ups = [5, 2, 2, 1, 1, 9, -9]
    sigmoid_of_1 = 1 / (1 + np.exp(-1.702))
    want = [0, 3 * sigmoid_of_1, -3 * (1 - sigmoid_of_1), 13.999906, -4.01e-6, 8 * sigmoid_of_1, -6 * sigmoid_of_1]
    assert gated("swiglu_clamped", gates, ups, isa) == pytest.approx(want, abs=2e-6)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("epilogue", ["swiglu", "geglu", "geglu_exact", "swiglu_clamped"])
def test_a_gate_and_a_value_that_are_not_finite_stay_so(epilogue, isa):
    assert np.isnan(gated(epilogue, [np.nan, 1], [1, np.nan], isa)).all()


@pytest.mark.parametrize("isa", LEVELS)
def test_results_are_scaled_then_capped(isa):
    """2 tanh((2 * 1 + 2) / 2 / 2) = 2 tanh(1); an embedding of 1 has the scale 2."""
    arena = Arena()
    rows = arena.region(1)
    y = arena.region(2)
    bias = np.array([2, -200], np.float32)
    ops = [
        Embed(packed([[1]]), rows, scale=2.0),
        Linear(rows, packed([[1], [0]]), bias, y, "store", scale=0.5, softcap=2.0),
    ]
    assert run(arena, ops, 1, y, isa)[0] == pytest.approx([2 * np.tanh(1), -2], rel=1e-6)


@pytest.mark.parametrize("isa", LEVELS)
def test_the_norm_of_a_branch_is_added(isa):
    """sqrt((1 + 49 + 49 + 1) / 4) = 5, and the norm's weights are 5, 10, 5, 5; the next norm's are 1."""
    arena = Arena()
    branch = arena.region(4)
    rows = arena.region(4)
    normed = arena.normed(4, [1, 1, 1, 1], "f32")
    y = arena.region(4)
    ops = [
        Embed(packed([[1, 7, -7, 1]]), branch),
        Embed(packed([[1, 0, 3, 0]]), rows),
        AddNorm(branch, np.array([5, 10, 5, 5], np.float32), 0.0, rows, normed),
        Linear(normed, packed(np.eye(4)), None, y, "store"),
    ]
    total = np.array([2, 14, -4, 1])
    assert run(arena, ops, 1, rows, isa)[0] == pytest.approx(total, rel=1e-6)
    assert run(arena, ops, 1, y, isa)[0] == pytest.approx(total / np.sqrt((total**2).mean()), rel=1e-5)


def attend(qkv, isa, *, kv="f32", rotary=None, q_norm=None, window=0, scale=1.0, heads=1, **more):
    """Attention over rows of [queries, key, value] with head_dim 2, without rotation unless `rotary` is given."""
    qkv = np.array(qkv, np.float32)
    arena = Arena()
    rows = arena.region(qkv.shape[1])
    out = arena.region(heads * 2)
    table = np.tile(np.array([1, 0], np.float32), (MAX_POSITIONS, 1)) if rotary is None else np.float32(rotary)
    norm = None if q_norm is None else np.array(q_norm, np.float32)
    ops = [
        Embed(packed(qkv), rows),
        Attention(rows, out, 0, 0, heads, 1, 2, norm, None, 0.0, table, scale, window, **more),
    ]
    return run(arena, ops, len(qkv), out, isa, kv=kv, window=window)


TOLERANCE = {"f32": 1e-5, "bf16": 0.03, "int8": 0.05}
KV = list(TOLERANCE)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("kv", KV)
def test_attention_over_two_tokens(kv, isa):
    """Scores ln 3 and 0 are weights 3/4 and 1/4; the first row sees its own token only."""
    out = attend([[1, 0, 1, 0, 4, 0], [1, 0, 0, 1, 0, 8]], isa, kv=kv, scale=LN3)
    assert out == pytest.approx(np.array([[4, 0], [3, 2]]), abs=TOLERANCE[kv])


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("kv", KV)
def test_capped_scores(kv, isa):
    """The scores ln 3 * (20, 0) become ln 3 * (tanh 20, 0), so the weights are 3/4 and 1/4."""
    out = attend([[1, 0, 1, 0, 4, 0], [1, 0, 0, 1, 0, 8]], isa, kv=kv, scale=20 * LN3, softcap=LN3)
    assert out == pytest.approx(np.array([[4, 0], [3, 2]]), abs=TOLERANCE[kv])


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("kv", KV)
def test_a_sink_takes_its_share_of_the_softmax(kv, isa):
    """The scores ln 3 and 0 with a sink of ln 4 give the weights 3/8 and 1/8; a sink of -100 takes no share."""
    qkv = [[1, 0, 1, 0, 1, 0, 4, 0], [1, 0, 1, 0, 0, 1, 0, 8]]
    sinks = np.array([np.log(4), -100], np.float32)
    out = attend(qkv, isa, kv=kv, scale=LN3, heads=2, sinks=sinks)
    assert out == pytest.approx(np.array([[12 / 7, 0, 4, 0], [1.5, 1, 3, 2]]), abs=TOLERANCE[kv])


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(("sink", "kept"), [(0, 300 / 301), (np.log(300), 1 / 2), (200, 0)])
def test_a_sink_counts_once_over_all_splits(sink, kept, isa):
    out = attend([[1, 0, 0, 0, 4, -4]] * 300, isa, sinks=np.array([sink], np.float32))
    assert out[299] == pytest.approx([4 * kept, -4 * kept], abs=1e-5)


@pytest.mark.parametrize("isa", LEVELS)
def test_the_norm_of_a_row_is_over_all_its_query_heads(isa):
    """The queries (3, 4) and (0, 0) have the mean square 25/4: the first becomes (3, 4) * 2/5 * (5/6, 5/8) = 1, 1."""
    qkv = [[3, 4, 0, 0, 1, 0, 4, 0], [3, 4, 0, 0, 0, 0, 0, 8]]
    norms = {"q_norm": [5 / 6, 5 / 8, 1, 1], "norms_rows": True}
    out = attend(qkv, isa, heads=2, scale=LN3, **norms)
    assert out[1] == pytest.approx([3, 2, 2, 4], abs=1e-5)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("kv", KV)
def test_rotation_turns_queries_and_keys_by_position(kv, isa):
    """A quarter turn at position 1 makes (1, 0) of q and k (0, 1): scores of 0 with key 0 and ln 3 with key 1."""
    out = attend([[1, 0, 1, 0, 4, 0], [1, 0, 1, 0, 0, 8]], isa, kv=kv, scale=LN3, rotary=[[1, 0], [0, 1]])
    assert out[1] == pytest.approx([1, 6], abs=TOLERANCE[kv])


@pytest.mark.parametrize("isa", LEVELS)
def test_rotation_is_counterclockwise(isa):
    """A quarter turn of (a, b) is (-b, a): the key (1, 2) at position 1 becomes (-2, 1), parallel to the query."""
    rotary = [[1, 0], [0, 1], [1, 0]]
    out = attend([[0, 0, 0, 0, 0, 0], [0, 0, 1, 2, 9, 0], [-2, 1, 0, 0, 0, 9]], isa, scale=LN3 / 5, rotary=rotary)
    assert out[2] == pytest.approx([27 / 5, 9 / 5], abs=1e-5)


@pytest.mark.parametrize("isa", LEVELS)
def test_qk_norm_scales_each_head_to_rms_1(isa):
    """The query (7, 7) is (1, 1) after its norm, so its score with the key (1, 0) is ln 3, with (0, 0) it is 0."""
    out = attend([[0, 0, 1, 0, 4, 0], [7, 7, 0, 0, 0, 8]], isa, scale=LN3, q_norm=[1, 1])
    assert out[1] == pytest.approx([3, 2], abs=1e-5)


@pytest.mark.parametrize("isa", LEVELS)
def test_a_layer_norm_of_heads_subtracts_the_mean_and_has_weights_for_each_head(isa):
    """The queries (5, 1) and (9, 7) are both (1, -1) after their norm, and 1, 0 and 0, -1 times their weights."""
    qkv = [[5, 1, 9, 7, 1, 0, 4, 0], [5, 1, 9, 7, 0, -1, 0, 8]]
    out = attend(qkv, isa, heads=2, scale=LN3, q_norm=[1, 0, 0, 1], head_norm="layer")
    assert out[1] == pytest.approx([3, 2, 1, 6], abs=1e-5)


@pytest.mark.parametrize("isa", LEVELS)
def test_a_norm_after_the_rotation_has_the_weights_of_turned_elements(isa):
    """A quarter turn makes the query (7, 7) (-7, 7), the norm (-1, 1), the weights (-1, 0)."""
    rotary = [[1, 0], [0, 1]]
    out = attend(
        [[0, 0, 1, 0, 4, 0], [7, 7, 0, 0, 0, 8]], isa, scale=LN3, rotary=rotary, q_norm=[1, 0], head_norm="rotated"
    )
    assert out[1] == pytest.approx([1, 6], abs=1e-5)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("kv", KV)
def test_queries_are_scaled_by_their_position(kv, isa):
    """Row 1 has the score ln 3 * 1 with key 0, row 2 ln 3 * 2 with key 0: weights 9/11 and 1/11 twice."""
    scales = np.array([5, 1, 2], np.float32)
    qkv = [[1, 0, 1, 0, 4, 0], [1, 0, 0, 1, 0, 8], [1, 0, 0, 1, 0, 8]]
    out = attend(qkv, isa, kv=kv, scale=LN3, query_scales=scales)
    assert out == pytest.approx(np.array([[4, 0], [3, 2], [36 / 11, 16 / 11]]), abs=TOLERANCE[kv])


@pytest.mark.parametrize("isa", LEVELS)
def test_query_heads_share_a_key_value_head(isa):
    out = attend([[1, 0, 0, 1, 1, 0, 4, 0], [1, 0, 0, 1, 0, 1, 0, 8]], isa, scale=LN3, heads=2)
    assert out[1] == pytest.approx([3, 2, 1, 6], abs=1e-5)


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize(("window", "mean"), [(0, 149.5), (1, 299.0), (10, 294.5), (290, 154.5)])
def test_equal_keys_give_the_mean_of_all_visible_values(window, mean, kv, isa):
    """Over several tiles and two splits; the values are 0, 1, ... 299."""
    out = attend([[1, 0, 1, 0, t, -t] for t in range(300)], isa, kv=kv, window=window)
    assert out[299] == pytest.approx([mean, -mean], rel={"f32": 1e-6, "bf16": 4e-3, "int8": 4e-3}[kv])


@pytest.mark.parametrize("isa", LEVELS)
def test_gather_takes_the_rows_that_sample(isa):
    arena = Arena()
    rows = arena.region(2)
    sampled = arena.region(2)
    ops = [Embed(packed([[1, 2], [3, 4], [5, 6]]), rows), Gather(rows, sampled)]
    assert run(arena, ops, 3, sampled, isa)[0].tolist() == [5, 6]


def test_packing_rounds_to_nearest():
    """bf16 has 8 bits of mantissa, ties to even; q8 has steps of max|w| / 127, ties away from zero."""
    weights = [[1.00390625, 1.01171875, 65535.0, -3.0]]
    assert packed(weights, "bf16").unpack().tolist() == [[1.0, 1.015625, 65536.0, -3.0]]
    assert packed([[127, -63.5, 0.4, 62.5]], "q8").unpack().tolist() == [[127, -64, 0, 63]]


# Sampling


def draw(logits, isa, **settings):
    """Sample one row; `settings` are fields of ROW."""
    row = np.zeros(1, ROW)
    row["temperature"] = row["top_p"] = row["repetition_penalty"] = 1
    row["logprobs"] = -1
    for field, value in settings.items():
        row[field] = value
    stride = -(-len(logits) // 32) * 32
    padded = np.zeros((1, stride), np.float32)
    padded[0, : len(logits)] = logits
    maxima = np.array([[padded[0, i : min(i + 32, len(logits))].max() for i in range(0, len(logits), 32)]], np.float32)
    tokens, logprobs, *_ = Sampler(len(logits), stride, 1, Pool(1), isa).sample(
        padded, maxima, row, np.zeros(0, ADJUSTMENT)
    )
    return int(tokens[0]), float(logprobs[0])


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(
    ("seed", "position"), [(0, 0), (1, 0), (1 << 32, 0), (0, 1), (0, 1 << 32), (2**64 - 1, 2**63 - 1), (77, 1234)]
)
def test_a_draw_uses_philox_keyed_by_seed_and_counted_by_position(seed, position, isa):
    """Equal weights map the uniform number u to token floor(1000 u). For (0, 0) u is 0x6627E8D5 / 2**32 = 0.39905."""
    first, second, *_ = philox([position % 2**32, position >> 32, 0, 0], [seed % 2**32, seed >> 32])
    token = int(((first >> 5) * 2**26 + (second >> 6)) / 2**53 * 1000)
    assert token == 399 or (seed, position) != (0, 0)
    assert draw(np.zeros(1000), isa, seed=seed, position=position, logprobs=0) == (
        token,
        pytest.approx(-np.log(1000), abs=1e-6),
    )


@pytest.mark.parametrize("isa", LEVELS)
def test_temperature_top_k_top_p_and_min_p_at_a_known_number(isa):
    """The uniform number is 0.39905. Comments give the cumulative weights that it is compared with."""
    logits = np.log([1, 2, 3, 4])
    assert draw(logits, isa)[0] == 2  # 0.1, 0.3, 0.6
    assert draw(logits, isa, top_k=2)[0] == 2  # 3/7, 4/7
    assert draw(logits, isa, top_k=1)[0] == 3  # 1
    assert draw(logits, isa, top_p=0.39)[0] == 3
    assert draw(logits, isa, top_p=0.41)[0] == 2
    assert draw(logits, isa, min_p=0.76)[0] == 3
    assert draw(logits, isa, min_p=0.74)[0] == 2
    assert draw(logits, isa, temperature=0.0)[0] == 3
    assert draw(logits, isa, temperature=0.5)[0] == 2  # 1, 5, 14 of 30
    assert draw(logits, isa, temperature=0.25)[0] == 3  # 1, 17, 98 of 354
    assert draw(logits, isa, temperature=100.0)[0] == 1  # 0.25, 0.50
