"""The messages between the server and an engine process, on the link whose ends are in `link_end.py`.

Each message is a length prefix and one msgpack array, `[type, field, …]`. Both ends are the same build, so fields may
change freely. Requests, updates and tokens are the scheduler's own structs. Pixels of images are sent before their
request.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

import msgspec

from ...scheduler import (
    AdmissionEstimate,
    EncodeSpec,
    FinishReason,
    PlacedImage,
    Request,
    RequestSpec,
    RequestUpdate,
)
from ..common.config import EngineConfig
from ..common.errors import ProtocolError
from ..engine import CoreInfo, EngineStats, LoadedAdapter, Prefilled, StepStats
from ..model.runner import SamplingSpec

STATS_INTERVAL_S = 0.25  # each message wakes a process whose CPUs compute
PIXELS_MESSAGE_BYTES = 1 << 20
SHARED_FIELDS = ("prompt_token_ids", "images", "echoed")  # fields that the specs of one request's samples share

SpecT = TypeVar("SpecT", bound=RequestSpec | EncodeSpec)
MessageT = TypeVar("MessageT")
LogOptions = tuple[Literal["console", "json"], str]  # format and level


@dataclass(frozen=True, slots=True)
class SampledRequestSpec(RequestSpec):
    """A `RequestSpec` for decoding from the link, where `sampling` needs a type."""

    sampling: SamplingSpec


def as_read(spec: RequestSpec) -> SampledRequestSpec:
    """Return `spec` itself, which is encoded like a `SampledRequestSpec`."""
    return cast(SampledRequestSpec, spec)


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


# Server to engine process


class StartEngine(_Message, tag="START", frozen=True):
    config: EngineConfig
    cpus: frozenset[int] | None  # CPUs to run on; None: all that are allowed
    snapshot: str | None  # file that keeps the prefix cache
    name: str  # name in log lines
    log: LogOptions | None  # None: no logging
    adapters: tuple[tuple[str, str], ...] = ()  # keys and folders of adapters that a former process had loaded


class ImagePixels(_Message, tag="PIXELS", frozen=True):
    """A piece of the pixels of all images of the next request, which itself comes without pixels.

    A request with the same images as the previous request with images, such as another sample, has none.
    """

    pixels: memoryview


class AddRequests(_Message, tag="ADD", frozen=True):
    """A request, or its samples. The answer is an AddAnswer with the id of the first one.

    The samples have one prompt, which only the first one carries: `of` removes it from the others, `specs` restores it.
    """

    requests: tuple[SampledRequestSpec, ...]
    generated: tuple[tuple[int, ...], ...] = ()  # per request, the tokens after which it continues; (): none

    @classmethod
    def of(cls, specs: Sequence[RequestSpec], generated: tuple[tuple[int, ...], ...] = ()) -> AddRequests:
        """Return the message for the samples of one request."""
        bare: dict[str, Any] = dict.fromkeys(SHARED_FIELDS, ())
        requests = [*specs[:1], *[replace(spec, **bare) for spec in specs[1:]]]
        return cls(cast(tuple[SampledRequestSpec, ...], tuple(requests)), generated if any(generated) else ())

    def specs(self) -> list[SampledRequestSpec]:
        """Return the specs of all samples, each with the prompt."""
        first = self.requests[:1]
        others = self.requests[1:]
        shared: dict[str, Any] = {name: getattr(spec, name) for spec in first for name in SHARED_FIELDS}
        return [*first, *[replace(spec, **shared) for spec in others]]

    def as_requests(self, specs: Sequence[SampledRequestSpec]) -> list[Request]:
        """Return the requests with `specs`. Raises ValueError for an inconsistent message."""
        return [Request(spec, ids) for spec, ids in zip(specs, self.generated or ((),) * len(specs), strict=True)]


class ReadmitRequest(_Message, tag="READMIT", frozen=True):
    """A request that a former process had accepted, with the tokens generated so far. It has no answer."""

    request: SampledRequestSpec
    generated: tuple[int, ...]


class AddEncoding(_Message, tag="ADD_ENCODING", frozen=True):
    """Texts to encode. It is answered by an AddAnswer."""

    request: EncodeSpec


class ReadmitEncoding(_Message, tag="READMIT_ENCODING", frozen=True):
    """Texts to encode that a former process had accepted. It has no answer."""

    request: EncodeSpec


class CancelRequest(_Message, tag="CANCEL", frozen=True):
    request_id: int


class DropRequest(_Message, tag="DROP", frozen=True):
    request_id: int
    finish_reason: FinishReason | None
    error: str | None


class LoadAdapter(_Message, tag="LOAD_ADAPTER", frozen=True):
    """See `Core.load_adapter`. It is answered by an AdapterAnswer with the same number."""

    number: int
    name: str
    path: str
    kept: tuple[str, ...]
    leaving: tuple[str, ...]


class StopEngine(_Message, tag="STOP", frozen=True):
    """End every request, write the snapshot if there is one, and exit."""


# Engine process to server


class EngineReady(_Message, tag="READY", frozen=True):
    info: CoreInfo
    kv_bytes: int


class EngineFailed(_Message, tag="FAILED", frozen=True):
    """The engine could not start, or could not save its snapshot."""

    error: str  # name of a class in common/errors.py
    message: str


class SnapshotProgress(_Message, tag="SNAPSHOT", frozen=True):
    """Bytes of the snapshot that are on disk so far."""

    num_bytes: int


class AddAnswer(_Message, tag="ANSWER", frozen=True):
    """The outcome of AddRequests: accepted, or refused with an exception of the scheduler."""

    request_id: int
    estimate: AdmissionEstimate | None
    num_waiting: int
    refusal: str | None = None  # name of the exception's class
    message: str = ""


class AdapterAnswer(_Message, tag="ADAPTER", frozen=True):
    """The outcome of LoadAdapter: a loaded adapter or an error."""

    number: int
    loaded: LoadedAdapter | None
    error: str = ""  # name of a class in common/errors.py
    message: str = ""


class RequestsBegun(_Message, tag="BEGUN", frozen=True):
    """Requests that the next step computes for the first time. Sent before the step, which may crash the process."""

    requests: tuple[Prefilled, ...]  # requests with the tokens found in the prefix cache


class StepReport(_Message, tag="REPORT", frozen=True):
    """The outcome of a step, or events between steps."""

    updates: tuple[RequestUpdate, ...]
    num_waiting: int
    num_steps: int
    step: StepStats | None = None
    prefilled: tuple[Prefilled, ...] = ()

    def parts(self, num_updates: int) -> list[StepReport]:
        """Return the report in parts of at most `num_updates`; the last part has the figures of the whole step."""
        last = max(0, len(self.updates) - 1) // num_updates * num_updates
        parts = [
            StepReport(self.updates[begin : begin + num_updates], self.num_waiting, self.num_steps)
            for begin in range(0, last, num_updates)
        ]
        return [*parts, msgspec.structs.replace(self, updates=self.updates[last:])]


class StatsReport(_Message, tag="STATS", frozen=True):
    """Sent every STATS_INTERVAL_S."""

    stats: EngineStats | None  # None: the engine loop has ended unexpectedly
    predicted_wait_s: float = 0.0  # wait of a new request; 0 until step costs have been measured


ToEngine = (
    StartEngine
    | ImagePixels
    | AddRequests
    | ReadmitRequest
    | AddEncoding
    | ReadmitEncoding
    | CancelRequest
    | DropRequest
    | LoadAdapter
    | StopEngine
)
FromEngine = (
    EngineReady | EngineFailed | SnapshotProgress | AddAnswer | AdapterAnswer | RequestsBegun | StepReport | StatsReport
)
TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


class PixelSender:
    """A divider of messages with images on one link."""

    def __init__(self) -> None:
        self._digests: list[bytes] = []  # digests of the latest images on the link

    def parts(self, message: MessageT) -> Iterator[MessageT | ImagePixels | AddRequests | ReadmitRequest]:
        """Yield a request's pixels in pieces, then the request without pixels; yield other messages unchanged."""
        match message:
            case AddRequests((first, *others), generated) if first.images:
                yield from self._pieces(first.images)
                yield AddRequests((without_pixels(first), *others), generated)
            case ReadmitRequest(request, tokens) if request.images:
                yield from self._pieces(request.images)
                yield ReadmitRequest(without_pixels(request), tokens)
            case _:
                yield message

    def _pieces(self, images: Sequence[PlacedImage]) -> Iterator[ImagePixels]:
        former = self._digests
        self._digests = [image.digest for image in images]
        for image in images if self._digests != former else ():
            pixels = memoryview(image.pixels)
            for begin in range(0, len(pixels), PIXELS_MESSAGE_BYTES):
                yield ImagePixels(pixels[begin : begin + PIXELS_MESSAGE_BYTES])


class PixelReceiver:
    """The pixels of one link that arrived before their request, and the pixels of the last request with images."""

    def __init__(self, max_bytes: int = sys.maxsize) -> None:
        self._max_bytes = max_bytes
        self._arrived = bytearray()
        self._last: tuple[PlacedImage, ...] = ()

    def add(self, piece: memoryview) -> None:
        """Keep a piece. Raises ProtocolError for pixels beyond `max_bytes`."""
        self._arrived += piece
        if len(self._arrived) > self._max_bytes:
            raise ProtocolError(f"images of more than {self._max_bytes} bytes")

    def with_pixels(self, images: Sequence[PlacedImage]) -> tuple[PlacedImage, ...]:
        """Return the images of an arrived request with their pixels. Raises ProtocolError."""
        if not self._arrived and [image.digest for image in images] == [image.digest for image in self._last]:
            return tuple(image._replace(pixels=last.pixels) for image, last in zip(images, self._last, strict=True))
        pixels = memoryview(self._arrived)
        self._arrived = bytearray()
        whole = []
        end = 0
        for image in images:
            if min(image.height, image.width) < 1:
                raise ProtocolError("an image without pixels")
            begin = end
            end += image.height * image.width * 3
            whole.append(image._replace(pixels=bytes(pixels[begin:end])))
        if end != len(pixels):
            raise ProtocolError("pixels of other images than those of the request")
        self._last = tuple(whole) or self._last
        return tuple(whole)


def without_pixels(spec: SampledRequestSpec) -> SampledRequestSpec:
    """Return `spec` with images for the link, without pixels."""
    return replace(spec, images=tuple(image._replace(pixels=b"") for image in spec.images))
