"""Linear layers on tiles: at every number of rows, the bits of the level below; in bf16, the bits of a row alone.

The level amx-twin runs everywhere; on a machine with AMX the level amx is compared too.
"""

import numpy as np
import pytest
from quire.kernels import PackedMatrix, Pool, Program, packed_nbytes, supported_levels
from quire.kernels.ops import Convert, Embed, Linear, Region, region_nbytes
from quire.pager.layout import KVLayout

LEVELS = [level for level in supported_levels() if level.startswith("amx")]
LOWER = "avx512-vnni-bf16" if "avx512-vnni-bf16" in supported_levels() else "scalar"
MOST = 200
AROUND_TILES = [1, 3, 4, 7, 8, 9, 15, 16, 17, 19, 20, 31, 32, 33, 64, 70, 96, 97, 100, 112, 113, 191, 192, 193, 200]
pytestmark = pytest.mark.skipif(not LEVELS, reason="needs AMX, or the build option amx_twin and AVX-512")


def multiply(isa, dtype, columns, group, counts, outputs=40):
    """Multiply the first rows of `MOST` random ones by a random matrix; return the results for each count of rows."""
    rng = np.random.default_rng((columns, group))
    x = rng.normal(0, 1, (MOST, columns)).astype(np.float32)
    raw = np.zeros(packed_nbytes(outputs, columns, dtype, group) + 64, np.uint8)
    weight = PackedMatrix(outputs, columns, dtype, raw[-raw.ctypes.data % 64 :], group=group)
    weight.fill(rng.normal(0, 1, (outputs, columns)).astype(np.float32))
    raw = np.zeros(packed_nbytes(MOST, columns, "f32") + 64, np.uint8)
    embedding = PackedMatrix(MOST, columns, "f32", raw[-raw.ctypes.data % 64 :])
    embedding.fill(x)
    kind = "bf16" if dtype == "bf16" else "q8"
    sizes = [(columns, "f32"), (columns, kind), (outputs, "f32")]
    offsets = np.cumsum([0, *(region_nbytes(MOST, n, each) for n, each in sizes)]).tolist()
    embedded = Region(offsets[0], MOST, columns, "f32")
    data = Region(offsets[1], MOST, columns, kind, group)
    out = Region(offsets[2], MOST, outputs, "f32")
    ops = [Embed(embedding, embedded), Convert(embedded, data), Linear(data, weight, None, out, "store")]
    layout = KVLayout(1, 1, 16, "f32", 64)
    pages = np.zeros(4 * layout.page_bytes, np.uint8)
    limits = {"max_rows": MOST, "max_samples": 1, "max_sequences": 1, "vocab_size": MOST}
    program = Program(ops, offsets[3], pages, layout, 4, Pool(1), isa=isa, **limits)
    table = np.arange(4, dtype=np.int32), np.array([0, 4], np.int32), np.zeros(0, np.int32)
    results = []
    for count in counts:
        program.run(np.arange(count, dtype=np.int32), np.array([0, count], np.int32), np.zeros(1, np.int32), *table)
        results.append(program.view(out)[:count, :outputs].copy())
    return results


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(
    ("dtype", "columns", "group"),
    [
        *(("q8", columns, 0) for columns in (32, 96, 160, 416)),
        *(("q8", columns, 1) for columns in (32, 96, 160)),
        *(("q8", columns, 2) for columns in (64, 160, 224)),
        *(("q8", columns, 4) for columns in (32, 64, 96, 128, 160, 224, 320, 576)),
        ("q4", 160, 0),
    ],
)
def test_every_number_of_rows_has_the_bits_of_the_level_below(isa, dtype, columns, group):
    (want,) = multiply(LOWER, dtype, columns, group, [MOST])
    for count, got in zip(AROUND_TILES, multiply(isa, dtype, columns, group, AROUND_TILES), strict=True):
        assert got.tobytes() == want[:count].tobytes(), count


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize(("dtype", "group"), [("q8", 0), ("q8", 1), ("q8", 4), ("bf16", 0)])
def test_all_numbers_of_rows_to_70_have_the_bits_of_more_rows(isa, dtype, group):
    counts = range(1, 71)
    (want,) = multiply(isa, dtype, 288, group, [MOST])
    for count, got in zip(counts, multiply(isa, dtype, 288, group, counts), strict=True):
        assert got.tobytes() == want[:count].tobytes(), count
