"""The campaign over random shapes, levels, threads and batches: some cases run clean, and a planted bug is reported."""

import msgspec
import pytest

from tests.kernels import random_bits
from tests.kernels.random_bits import Case, difference, random_case


@pytest.mark.parametrize("number", range(8))
def test_random_cases_have_the_bits_of_one_row_at_a_time(monkeypatch, number):
    monkeypatch.setattr(random_bits, "MULTIPLICATIONS", 2_000_000)
    assert difference(random_case(1, number)) is None


def test_a_difference_is_reported_with_a_small_case_that_repeats_it(monkeypatch, capsys):
    """Planted: on more than one thread, every row has another bit. The level that all machines have makes one case."""
    exact = random_bits.result
    monkeypatch.setattr(random_bits, "LEVELS", ("scalar",))
    monkeypatch.setattr(random_bits, "MULTIPLICATIONS", 200_000)
    monkeypatch.setattr(random_bits, "REDUCING_S", 1e9)

    def planted(model, program, index):
        found = exact(model, program, index)
        return found[:-1] + bytes([found[-1] ^ 1]) if model.threads > 1 else found

    monkeypatch.setattr(random_bits, "result", planted)
    assert random_bits.campaign(seed=1, seconds=1e9) == 1
    printed = capsys.readouterr().out
    case = msgspec.json.decode(printed.split("--case '")[1].split("'\n")[0], type=Case)
    assert "to repeat it" in printed
    assert difference(case)
    assert (len(case.lengths), len(case.steps), case.steps[0].threads) == (1, 1, 2)
