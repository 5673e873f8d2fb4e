"""The peak rates can be measured at every level and on any number of threads; their height depends on the machine."""

import numpy as np
import pytest
from quire.kernels import Pool, peak_ops_per_s, read_bytes_per_s, supported_levels


@pytest.mark.parametrize("isa", supported_levels())
@pytest.mark.parametrize("threads", [1, 3])
def test_every_level_reads_and_computes(isa, threads):
    pool = Pool(threads)
    assert read_bytes_per_s(np.zeros(1 << 20, np.uint8), pool, isa) > 0
    for dtype in ("f32", "bf16", "q8"):
        assert peak_ops_per_s(dtype, pool, isa) > 0


def test_memory_that_does_not_divide_evenly_is_never_read_past_its_end():
    assert read_bytes_per_s(np.zeros(3 * 256 + 255, np.uint8), Pool(3)) > 0


def test_too_little_memory_and_unknown_dtypes_are_refused():
    with pytest.raises(ValueError, match="767 bytes are too few for 3 workers"):
        read_bytes_per_s(np.zeros(767, np.uint8), Pool(3))
    with pytest.raises(ValueError, match="unknown dtype 'int4'; a peak is measured for f32, bf16, q8"):
        peak_ops_per_s("int4", Pool(1))
