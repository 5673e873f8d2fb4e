"""KV events over real sockets: what a router learns of the pages of a prefix cache, in vLLM's encoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from quire import LLM, SamplingParams
from quire.pager import Pager, root_key
from quire.runtime.common.errors import ConfigError
from quire.scheduler import PlacedImage

zmq = pytest.importorskip("zmq", reason="pip install 'quire[events]'")
from quire.runtime.engine import kv_events  # noqa: E402
from quire.runtime.engine.kv_events import KVEventPublisher  # noqa: E402

PAGE = 16
TIMEOUT_MS = 60_000
Cleared = {"type": "AllBlocksCleared"}


@pytest.fixture
def endpoint(tmp_path: Any) -> str:
    return f"ipc://{tmp_path}/events"


class Router:
    """A subscriber of events that can also request replays."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self.events, self.replays = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        for socket in (self.events, self.replays):
            socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        self.events.subscribe("kv@")
        self.events.connect(endpoint)
        self.replays.connect(f"{endpoint}.replay")

    def receive(self) -> tuple[bytes, int, list[Any]]:
        """Return topic, sequence number and the batch."""
        topic, sequence, payload = self.events.recv_multipart()
        return topic, int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload)

    def replay(self, first: int) -> list[tuple[int, list[Any]]]:
        """Return the batches from `first` on."""
        self.replays.send_multipart((b"", first.to_bytes(8, "big")))
        batches = []
        while True:
            _, sequence, payload = self.replays.recv_multipart()
            if sequence == kv_events.END_OF_REPLAY:
                assert payload == b""
                return batches
            batches.append((int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload)))

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def router(endpoint: str) -> Iterator[Router]:
    router = Router(endpoint)
    yield router
    router.close()


@pytest.fixture
def publisher(endpoint: str) -> Iterator[Callable[..., KVEventPublisher]]:
    made = []

    def make(pager: Pager, topic: str = "") -> KVEventPublisher:
        made.append(KVEventPublisher(endpoint, f"{endpoint}.replay", topic, pager))
        return made[-1]

    yield make
    for each in made:
        each.close()


def run(pager: Pager, token_ids: list[int], salt: bytes = b"") -> None:
    """Compute a prompt and release its pages."""
    table = pager.open(token_ids, salt)
    table.append(len(token_ids) - table.num_tokens)
    pager.commit(table, token_ids)
    table.release()


def stored(keys: list[bytes], parent: bytes | None, token_ids: list[int], **others: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": keys,
        "parent_block_hash": parent,
        "token_ids": token_ids,
        "block_size": PAGE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "kv_cache_spec_kind": "full_attention",
        **others,
    }


def removed(*keys: bytes, **others: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(keys), "medium": "GPU", **others}


def test_pages_are_stored_and_removed(router: Router, publisher: Callable[..., KVEventPublisher]) -> None:
    pager = Pager(PAGE, 4)
    publishing = publisher(pager, "kv@pod@model")
    prompt = list(range(2 * PAGE + 5))
    run(pager, prompt)
    publishing.publish()
    first, second = pager.pool.indexed_pages()
    batches = router.replay(0)
    (number, (_, events, rank)) = batches[0]
    assert (number, rank, len(batches)) == (0, None, 1)
    assert events == [Cleared, stored([first, second], None, prompt[: 2 * PAGE])]

    run(pager, [*prompt[:PAGE], *[7] * PAGE, 1])
    third = next(key for key in pager.pool.indexed_pages() if key not in (first, second))
    publishing.publish()
    publishing.publish()  # nothing has happened
    run(pager, [8] * 3 * PAGE)
    publishing.publish()
    later = [events for _, (_, events, _) in router.replay(1)]
    assert later[0] == [stored([third], first, [7] * PAGE)]
    assert [each for each in later[1] if each["type"] == "BlockRemoved"] == [removed(second, third)]
    assert later[1][-1]["token_ids"] == [8] * 3 * PAGE


def test_subscribers_get_batches_in_order(router: Router, publisher: Callable[..., KVEventPublisher]) -> None:
    pager = Pager(PAGE, 100)
    publishing = publisher(pager, "kv@pod@model")
    received = None
    for number in range(99):  # ends when the subscription has arrived
        run(pager, [number] * PAGE + [1])
        publishing.publish()
        if router.events.poll(100):
            received = router.receive()
            break
    assert received is not None
    topic, sequence, (time_s, events, _) = received
    assert topic == b"kv@pod@model"
    assert time_s > 1e9
    run(pager, [500] * PAGE + [1])
    publishing.publish()
    while events[-1]["token_ids"] != [500] * PAGE:
        _, following, (_, events, _) = router.receive()
        assert following == sequence + 1
        sequence = following


def test_events_name_groups_windows_and_salts(router: Router, publisher: Callable[..., KVEventPublisher]) -> None:
    pager = Pager(PAGE, 20, windows=(0, 2 * PAGE))
    publishing = publisher(pager)
    prompt = [3] * PAGE + [1]
    run(pager, prompt, b"tenant")
    run(pager, [4] * 2 * PAGE + [1], b"tenant")
    publishing.publish()
    _, (_, events, _) = router.replay(0)[0]
    full, sliding = (each for each in events[1:] if each["token_ids"] == [3] * PAGE)
    assert (full["group_idx"], full["kv_cache_spec_kind"]) == (0, "full_attention")
    assert "kv_cache_spec_sliding_window" not in full
    assert (sliding["group_idx"], sliding["kv_cache_spec_kind"]) == (1, "sliding_window")
    assert sliding["kv_cache_spec_sliding_window"] == 2 * PAGE
    assert full["extra_keys"] == sliding["extra_keys"] == [[root_key(b"tenant").hex()]]
    assert {len(each["extra_keys"]) for each in events[3:] if each["parent_block_hash"] is None} == {1}


def test_removed_pages_are_named_with_their_group(router: Router, publisher: Callable[..., KVEventPublisher]) -> None:
    pager = Pager(PAGE, 8, windows=(0, 2 * PAGE))
    publishing = publisher(pager)
    for number in range(6):
        run(pager, [number] * PAGE + [1])
    publishing.publish()
    _, (_, events, _) = router.replay(0)[0]
    stored_pages, removed_pages = (
        [(each["group_idx"], key) for each in events if each["type"] == kind for key in each["block_hashes"]]
        for kind in ("BlockStored", "BlockRemoved")
    )
    assert {group for group, _ in removed_pages} == {0, 1}
    assert len(set(removed_pages)) == len(removed_pages)
    assert set(removed_pages) <= set(stored_pages)


def test_events_name_the_images_of_pages(router: Router, publisher: Callable[..., KVEventPublisher]) -> None:
    pager = Pager(PAGE, 20)
    publishing = publisher(pager)
    prompt = [3] * 4 * PAGE + [1]
    for salt, start in ((b"", PAGE + 5), (b"tenant", 5)):
        table = pager.open(prompt, salt, images=(PlacedImage(start, 9, b"digest", 1, 1, b""),))
        table.append(len(prompt))
        pager.commit(table, prompt)
        table.release()
    publishing.publish()
    _, (_, (_, plain, salted), _) = router.replay(0)[0]
    nothing, (image,), *others = plain["extra_keys"]
    assert (nothing, others, len(bytes.fromhex(image))) == (None, [None, None], 32)
    first, *others = salted["extra_keys"]
    assert (first[0], len(first), others) == (root_key(b"tenant").hex(), 2, [None] * 3)
    assert plain["token_ids"] == salted["token_ids"] == prompt[:-1]


def test_bad_requests_for_replay_are_ignored(
    router: Router, publisher: Callable[..., KVEventPublisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MAX_KEPT_BATCHES", 2)
    pager = Pager(PAGE, 10)
    publishing = publisher(pager)
    for number in range(4):
        run(pager, [number] * PAGE + [1])
        publishing.publish()
    for frames in ((b"x",), (b"", b"short"), (b"", b"8 bytes.", b"more")):
        router.replays.send_multipart(frames)
    assert [number for number, _ in router.replay(0)] == [2, 3], "the last two are kept"
    assert router.replay(9) == []


def test_a_model_publishes_its_prompts(endpoint: str, router: Router) -> None:
    params = SamplingParams(max_tokens=2, temperature=0)
    with LLM(kv_events=endpoint, kv_events_replay=f"{endpoint}.replay", kv_cache_memory="4MiB") as llm:
        llm.generate([tuple(range(5, 105))], sampling_params=params)
        batches = router.replay(0)
    assert batches[0][1][1] == [Cleared]
    tokens = [token for _, (_, events, _) in batches[1:] for each in events for token in each["token_ids"]]
    assert tokens == list(range(5, 101))


@pytest.mark.parametrize("option", ["kv_events", "kv_events_replay"])
@pytest.mark.parametrize("text", ["5557", "tcp://*", "tcp://nowhere.invalid:1", "http://a:5557"])
def test_endpoints_that_cannot_be_used_are_refused(endpoint: str, option: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}: cannot listen on"):
        LLM(**{"kv_events": endpoint, option: text, "kv_cache_memory": "4MiB"})  # type: ignore[arg-type]


def test_a_port_that_no_socket_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_events: 'tcp://127.0.0.1:65536' has a port above 65535"):
        LLM(kv_events="tcp://127.0.0.1:65536", kv_cache_memory="4MiB")


@pytest.mark.parametrize("option", ["kv_events_replay", "kv_events_topic"])
def test_options_without_events_are_refused(endpoint: str, option: str) -> None:
    with pytest.raises(ConfigError, match=f"^{option} needs kv_events"):
        LLM(**{option: endpoint, "kv_cache_memory": "4MiB"})  # type: ignore[arg-type]
