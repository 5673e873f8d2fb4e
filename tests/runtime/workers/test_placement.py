"""Which CPUs an engine process gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from quire.runtime.common.errors import ConfigError
from quire.runtime.workers.placement import numa_nodes, parse_cpu_list, place


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    for node, cpus in (("node0", "0-3,8-11"), ("node1", "4-7,12-15"), ("node10", ""), ("nodes", "99")):
        folder = tmp_path / "sys/devices/system/node" / node
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    return tmp_path


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-3,8,10-11") == {0, 1, 2, 3, 8, 10, 11}


def test_nodes_in_order(two_nodes: Path) -> None:
    assert [min(node) for node in numa_nodes(two_nodes)] == [0, 4]


@pytest.mark.parametrize("count", [0, 2])
def test_one_for_each_node(two_nodes: Path, count: int) -> None:
    assert place(count, frozenset(range(16)), two_nodes) == [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]


def test_nodes_that_are_not_allowed_do_not_count(two_nodes: Path) -> None:
    assert place(0, frozenset({5, 6}), two_nodes) == [{5, 6}]


@pytest.mark.parametrize("count", [1, 3, 4, 5, 16])
def test_as_many_as_asked_for_as_even_as_can_be(two_nodes: Path, count: int) -> None:
    places = place(count, frozenset(range(16)), two_nodes)
    assert len(places) == count
    assert sorted(cpu for cpus in places for cpu in cpus) == list(range(16))
    assert max(map(len, places)) - min(map(len, places)) <= 1
    if count == 4:
        assert all(cpus <= node for cpus, node in zip(places, numa_nodes(two_nodes) * 2, strict=True) if 0 in cpus)


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    assert place(0, frozenset({0, 1}), tmp_path) == [{0, 1}]


def test_no_more_processes_than_cpus(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="engine_processes must be at most 2, one per CPU, not 3"):
        place(3, frozenset({0, 1}), tmp_path)
