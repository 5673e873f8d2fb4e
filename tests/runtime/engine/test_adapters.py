"""Adapters that are loaded, evicted, pinned and unloaded while requests use them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest
from quire import ConfigError, InvalidRequest, ModelError
from quire.runtime.common.errors import Overloaded
from quire.runtime.engine.adapters import NO_ADAPTER, AdapterRegistry
from quire.runtime.engine.core import LoadedAdapter

from tests.support.samples import INFO


class FakeCore:
    """A core with two places, whose adapters take 10 bytes each; the digest of a folder is its entry in `digests`."""

    def __init__(self) -> None:
        self.loaded = ["a@1"]
        self.digests = {"a": "1", "b": "2", "c": "3", "d": "4"}
        self.calls: list[tuple[str, list[str], list[str]]] = []
        self.open = asyncio.Event()  # loads wait for it
        self.open.set()
        self.refusals: list[Exception] = []  # raised by the next loads

    async def load_adapter(self, name: str, path: str, kept: Sequence[str], leaving: Sequence[str]) -> LoadedAdapter:
        self.calls.append((name, list(kept), list(leaving)))
        await self.open.wait()
        if self.refusals:
            raise self.refusals.pop(0)
        key = f"{name}@{self.digests[path]}"
        evicted = []
        if key not in self.loaded:
            candidates = [each for each in self.loaded if each not in (*kept, *leaving)] + list(leaving)
            while len(self.loaded) == 2:
                if not candidates:
                    raise ConfigError("there is no room")
                evicted.append(candidates.pop(0))
                self.loaded.remove(evicted[-1])
            self.loaded.append(key)
        return LoadedAdapter(key, 10, tuple(evicted))


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def registry(core: FakeCore) -> AdapterRegistry:
    info = msgspec.structs.replace(INFO, adapters={"a": "a@1"}, adapter_paths={"a": "a"}, max_adapters=2)
    return AdapterRegistry(cast(Any, core), info)


def states(registry: AdapterRegistry) -> dict[str, tuple[bool, int]]:
    """Return whether each adapter is loaded, and its live requests."""
    found = {name: registry.status(name) for name in registry.names}
    return {name: (each.is_loaded, each.num_requests) for name, each in found.items()}


async def use(registry: AdapterRegistry, *names: str) -> None:
    for name in names:
        registry.release(await registry.acquire(name))


async def test_the_least_recently_used_adapter_leaves_and_returns_with_the_next_request_for_it(
    core: FakeCore, registry: AdapterRegistry
) -> None:
    await registry.load("b", "b")
    await use(registry, "a")
    await registry.load("c", "c")
    assert core.loaded == ["a@1", "c@3"]
    assert states(registry) == {"a": (True, 0), "b": (False, 0), "c": (True, 0)}
    await use(registry, "b")
    assert core.loaded == ["c@3", "b@2"]
    assert (registry.num_loads, registry.num_evictions) == (3, 2)


async def test_adapters_of_live_requests_and_pinned_ones_stay(core: FakeCore, registry: AdapterRegistry) -> None:
    await registry.load("b", "b", is_pinned=True)
    adapter = await registry.acquire("a")
    with pytest.raises(Overloaded, match="there is no room; live requests and pinned adapters keep theirs") as refused:
        await registry.load("c", "c")
    assert refused.value.retry_after_ms == 1000
    registry.release(adapter)
    await registry.load("c", "c")
    assert core.loaded == ["b@2", "c@3"]


async def test_pinned_adapters_that_no_request_can_name_leave_first(core: FakeCore, registry: AdapterRegistry) -> None:
    await registry.load("b", "b", is_pinned=True)
    registry.unload("b")
    await registry.load("c", "c", is_pinned=True)
    assert core.loaded == ["a@1", "c@3"]
    core.digests["c"] = "5"
    await registry.load("c", "c", in_place=True)
    assert core.loaded == ["c@3", "c@5"]
    await registry.load("d", "d")
    assert core.loaded == ["c@5", "d@4"]


async def test_an_unloaded_adapter_is_refused_and_kept_for_its_live_request(
    core: FakeCore, registry: AdapterRegistry
) -> None:
    await registry.load("b", "b")
    adapter = await registry.acquire("b")
    registry.unload("b")
    with pytest.raises(InvalidRequest, match="'b' is no loaded adapter; the adapters are: a"):
        await registry.acquire("b")
    await registry.load("c", "c")
    assert core.loaded == ["b@2", "c@3"]
    registry.release(adapter)
    await registry.load("a2", "a")
    assert core.loaded == ["c@3", "a2@1"], "an adapter that no request can name leaves before others"


async def test_a_request_for_an_adapter_that_may_be_leaving_waits_and_loads_it_again(
    core: FakeCore, registry: AdapterRegistry
) -> None:
    await registry.load("b", "b")
    core.open.clear()
    loading = asyncio.create_task(registry.load("c", "c"))
    await asyncio.sleep(0)
    acquiring = asyncio.create_task(registry.acquire("a"))
    other = await registry.acquire("b")  # stays, so it does not wait
    await asyncio.sleep(0)
    assert not acquiring.done()
    core.open.set()
    await loading
    adapter = await acquiring
    assert core.loaded == ["b@2", "a@1"]
    assert (adapter.key, other.key) == ("a@1", "b@2")
    assert states(registry) == {"a": (True, 1), "b": (True, 1), "c": (False, 0)}


async def test_a_load_whose_caller_leaves_is_noted_with_the_adapters_that_left_for_it(
    core: FakeCore, registry: AdapterRegistry
) -> None:
    await registry.load("b", "b")
    core.open.clear()
    loading = asyncio.create_task(registry.load("c", "c"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    core.open.set()
    await use(registry, "a")
    assert core.loaded == ["c@3", "a@1"]
    assert states(registry) == {"a": (True, 0), "b": (False, 0), "c": (True, 0)}


async def test_more_adapters_leave_only_if_the_bytes_of_fewer_do_not_suffice(
    core: FakeCore, registry: AdapterRegistry
) -> None:
    await registry.load("b", "b")
    core.refusals = [ConfigError("too few bytes")]
    await registry.load("c", "c")
    assert core.calls[1:] == [("c", ["b@2"], ["a@1"]), ("c", [], ["a@1", "b@2"])]


async def test_a_name_is_replaced_only_in_place_and_live_requests_keep_the_former_files(
    core: FakeCore, registry: AdapterRegistry
) -> None:
    former = await registry.acquire("a")
    with pytest.raises(InvalidRequest, match="'a' is loaded already; set load_inplace"):
        await registry.load("a", "b")
    await registry.load("a", "b", in_place=True)
    assert (await registry.acquire("a")).key == "a@2"
    assert (former.key, core.loaded) == ("a@1", ["a@1", "a@2"])


async def test_changed_files_do_not_take_the_place_of_an_evicted_adapter(
    core: FakeCore, registry: AdapterRegistry
) -> None:
    await registry.load("b", "b")
    await registry.load("c", "c")
    core.digests["a"] = "9"
    with pytest.raises(ModelError, match="files of adapter 'a' have changed; load it again with load_inplace"):
        await registry.acquire("a")
    assert states(registry)["a"] == (False, 0)
    await registry.load("a", "a", in_place=True)
    assert (await registry.acquire("a")).key == "a@9"


async def test_a_failed_load_changes_nothing(core: FakeCore, registry: AdapterRegistry) -> None:
    core.refusals = [ModelError("wrong files")]
    with pytest.raises(ModelError, match="wrong files"):
        await registry.load("b", "b")
    assert states(registry) == {"a": (True, 0)}
    await registry.load("b", "b")
    await registry.load("c", "c")
    core.refusals = [ModelError("wrong files in /secret")]
    with pytest.raises(ModelError, match=r"^the files of adapter 'a' can no longer be read; load it again$"):
        await registry.acquire("a")
    assert states(registry) == {"a": (False, 0), "b": (True, 0), "c": (True, 0)}


@pytest.mark.parametrize("name", ["", "a b", "a@1", "a\0", "ä" * 129])
async def test_names_that_keys_cannot_have_are_refused(registry: AdapterRegistry, name: str) -> None:
    with pytest.raises(InvalidRequest, match="must be 1 to 128 letters, digits and _"):
        await registry.load(name, "b")


async def test_without_an_adapter_nothing_is_loaded_and_without_max_loras_none_may_be(core: FakeCore) -> None:
    registry = AdapterRegistry(cast(Any, core), INFO)
    assert await registry.acquire("") is NO_ADAPTER
    registry.release(NO_ADAPTER)
    with pytest.raises(InvalidRequest, match="start it with --max-loras"):
        await registry.load("b", "b")
    assert core.calls == []
