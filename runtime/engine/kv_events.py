"""KV events: a publisher of the pages in an engine process's prefix cache, over ZeroMQ, in vLLM's encoding.

A batch has three frames: topic, sequence number (8 bytes, big-endian), and msgpack `[time, events, nil]`. Each event is
a map. The first batch clears the cache. Token ids are sent in clear, and subscribers need no key.

Must not be imported without the extra `events`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import closing

import msgspec
import numpy as np
import zmq

from ...pager import Content, Pager, root_key
from ..common.errors import ConfigError
from ..net.address import MAX_PORT

MAX_KEPT_BATCHES = 10_000  # batches kept for subscribers that missed some
MAX_UNSENT_BATCHES = 100_000  # unsent batches of one subscriber; further ones are lost
MAX_REPLAY_REQUEST_BYTES = 64  # size of a subscriber's request for batches
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MEDIUM = "GPU"  # device of the engine; vLLM's CPU backend sends the same
NO_SALT = root_key(b"")


class _Event(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(_Event):
    """Consecutive pages of one group that requests can find from now on."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None  # None: the first page of a prompt
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    # one per page: the root of a tenant's or salt's pages, and the digest of the page's images
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(_Event):
    """Pages whose memory is reused."""

    block_hashes: list[bytes]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(_Event):
    """The cache is empty."""


class KVEventPublisher:
    """Collects the events of the pages of a pager's cache, and publishes it after each step. Raises ConfigError."""

    def __init__(self, endpoint: str, replay_endpoint: str | None, topic: str, pager: Pager) -> None:
        self._page_size = pager.page_size
        self._windows = pager.windows
        self._topic = topic.encode()
        self._events: list[_Event] = [AllBlocksCleared()]
        self._encode = msgspec.msgpack.Encoder().encode
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=MAX_KEPT_BATCHES)  # sequence numbers and payloads
        self._keeping = threading.Lock()
        self._num_published = 0
        self._context = zmq.Context()
        try:
            self._socket = self._bound("kv_events", zmq.PUB, endpoint, MAX_UNSENT_BATCHES)
            if replay_endpoint is not None:
                num_answers = MAX_KEPT_BATCHES + 1  # answers to a request, doubled: a read answer counts for a while
                replay = self._bound("kv_events_replay", zmq.ROUTER, replay_endpoint, 2 * num_answers)
                threading.Thread(target=self._serve, args=(replay,), name="quire-kv-events", daemon=True).start()
        except ConfigError:
            self._context.destroy()
            raise
        pager.pool.on_index.append(self._note_stored)
        pager.pool.on_evict.append(self._note_removed)

    def publish(self) -> None:
        """Send the events since the last call as one batch, if there are any. Never waits for a subscriber."""
        if not self._events:
            return
        payload = self._encode((time.time(), self._events, None))
        self._events = []
        sequence = self._num_published.to_bytes(8, "big")
        self._num_published += 1
        with self._keeping:
            self._kept.append((sequence, payload))
        self._socket.send_multipart((self._topic, sequence, payload))

    def close(self) -> None:
        """Close the sockets."""
        self._socket.close(linger=0)
        self._context.term()  # ends the thread

    def _bound(self, option: str, kind: int, endpoint: str, max_unsent: int) -> zmq.Socket[bytes]:
        allowed = "an endpoint is tcp://*:5557 or ipc:///run/kv.sock"
        port = endpoint.rpartition(":")[2]
        if port.isdecimal() and int(port[:6]) > MAX_PORT:  # ZeroMQ would take the low 16 bits
            raise ConfigError(f"{option}: {endpoint!r} has a port above {MAX_PORT}; {allowed}")
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, max_unsent)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REPLAY_REQUEST_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"{option}: cannot listen on {endpoint!r}: {error}; {allowed}") from error
        return socket

    # Events of the pager

    def _note_stored(self, content: Content) -> None:
        token_ids: list[int] = np.frombuffer(content.token_ids, "<u4").tolist()
        last = self._events[-1] if self._events else None
        group = self._group(content)
        extra = _extra_keys(content)
        if isinstance(last, BlockStored) and (last.group_idx, last.block_hashes[-1]) == (group, content.parent):
            if extra is not None and last.extra_keys is None:
                last.extra_keys = [None] * len(last.block_hashes)
            last.block_hashes.append(content.key)
            last.token_ids += token_ids
            if last.extra_keys is not None:
                last.extra_keys.append(extra)
            return
        window = self._windows[content.group]
        self._events.append(
            BlockStored(
                [content.key],
                content.parent if content.depth else None,
                token_ids,
                self._page_size,
                lora_id=None,
                medium=MEDIUM,
                lora_name=None,
                extra_keys=None if extra is None else [extra],
                group_idx=group,
                kv_cache_spec_kind="sliding_window" if window else "full_attention",
                kv_cache_spec_sliding_window=window or None,
            )
        )

    def _note_removed(self, content: Content) -> None:
        last = self._events[-1] if self._events else None
        group = self._group(content)
        if isinstance(last, BlockRemoved) and last.group_idx == group:
            last.block_hashes.append(content.key)
        else:
            self._events.append(BlockRemoved([content.key], MEDIUM, group))

    def _group(self, content: Content) -> int | None:
        """Return the layer group; None if the model has one group, as most consumers expect."""
        return content.group if len(self._windows) > 1 else None

    # The thread that replays batches

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        with closing(socket):
            try:
                while True:
                    self._replay(socket, socket.recv_multipart())
            except zmq.ContextTerminated:
                pass

    def _replay(self, socket: zmq.Socket[bytes], request: list[bytes]) -> None:
        """Send the batches from a request's sequence number on; ignore malformed requests."""
        if len(request) != 3 or request[1] or len(request[2]) != 8:
            return
        subscriber, _, first = request
        with self._keeping:
            batches = [(sequence, payload) for sequence, payload in self._kept if sequence >= first]
        for sequence, payload in batches:
            socket.send_multipart((subscriber, b"", sequence, payload))
        socket.send_multipart((subscriber, b"", END_OF_REPLAY, b""))


def _extra_keys(content: Content) -> tuple[str, ...] | None:
    """Return the parts of a page's key besides its tokens and the pages before it."""
    salt = (content.parent.hex(),) if content.depth == 0 and content.parent != NO_SALT else ()
    return (*salt, *((content.images.hex(),) if content.images else ())) or None
