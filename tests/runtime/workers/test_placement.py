"""The CPUs of each engine process."""

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


def test_cpu_lists_are_parsed() -> None:
    assert parse_cpu_list("0-3,8,10-11") == {0, 1, 2, 3, 8, 10, 11}


def test_nodes_are_in_the_order_of_their_numbers(two_nodes: Path) -> None:
    assert [min(node) for node in numa_nodes(two_nodes)] == [0, 4]


@pytest.mark.parametrize("count", [0, 2])
def test_there_is_one_process_for_each_node(two_nodes: Path, count: int) -> None:
    assert place(count, frozenset(range(16)), two_nodes) == [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]


def test_nodes_without_allowed_cpus_get_no_process(two_nodes: Path) -> None:
    assert place(0, frozenset({5, 6}), two_nodes) == [{5, 6}]


@pytest.mark.parametrize("count", [1, 3, 4, 5, 16])
def test_a_given_number_of_processes_get_even_shares(two_nodes: Path, count: int) -> None:
    places = place(count, frozenset(range(16)), two_nodes)
    assert len(places) == count
    assert sorted(cpu for cpus in places for cpu in cpus) == list(range(16))
    assert max(map(len, places)) - min(map(len, places)) <= 1
    if count == 4:
        assert all(cpus <= node for cpus, node in zip(places, numa_nodes(two_nodes) * 2, strict=True) if 0 in cpus)


def test_a_system_without_node_files_is_one_node(tmp_path: Path) -> None:
    assert place(0, frozenset({0, 1}), tmp_path) == [{0, 1}]


def test_more_processes_than_cpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="engine_processes must be at most 2, one per CPU, not 3"):
        place(3, frozenset({0, 1}), tmp_path)
