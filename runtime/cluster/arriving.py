"""The requests of an API server to an engine host, converted for the host. Invalid messages end the link.

An API server knows the secret, but it may have a defect: its requests must not crash an engine process of others.
All functions raise ProtocolError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ...scheduler import EncodeSpec, PlacedImage
from ..common.errors import InvalidRequest, ProtocolError
from ..common.prompts import PromptImage
from ..engine import CoreInfo, check_images
from ..workers.engine_link import PixelReceiver, SampledRequestSpec
from .host_link import arrived

DIGEST_BYTES = 32


def arrived_requests(
    specs: Sequence[SampledRequestSpec],
    pixels: PixelReceiver,
    info: CoreInfo,
    id_here: Callable[[int], int],
    now: float,
) -> list[SampledRequestSpec]:
    """Return the specs of one request's samples. `id_here` returns the host's id for a new one."""
    if not specs or len({spec.request_id for spec in specs}) < len(specs):
        raise ProtocolError("a list of requests that is empty or has one twice")
    for spec in specs:
        _check_times(spec.deadline, spec.pin_s)
        if len(spec.prompt_token_ids) + spec.max_tokens > info.max_model_len:
            raise ProtocolError(f"a request of more than {info.max_model_len} tokens")
        check_tokens(spec.prompt_token_ids, info.vocab_size)
        check_tokens(spec.echoed, info.vocab_size)
    images = pixels.with_pixels(specs[0].images)
    _check_images(specs[0].prompt_token_ids, images, info)
    return [replace(arrived(spec, id_here(spec.request_id), now), images=images) for spec in specs]


def arrived_texts(spec: EncodeSpec, info: CoreInfo, id_here: Callable[[int], int], now: float) -> EncodeSpec:
    """Return texts to encode."""
    encoder = info.encoder
    if encoder is None:
        raise ProtocolError("texts for a host without an encoder")
    _check_times(spec.deadline)
    for text in spec.texts:
        if len(text.token_ids) > encoder.max_model_len:
            raise ProtocolError(f"a text of more than {encoder.max_model_len} tokens")
        check_tokens(text.token_ids, encoder.vocab_size)
    return arrived(spec, id_here(spec.request_id), now)


def check_tokens(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise ProtocolError for ids outside of this vocabulary."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise ProtocolError("token ids outside the vocabulary")


def _check_images(token_ids: Sequence[int], images: Sequence[PlacedImage], info: CoreInfo) -> None:
    if not images:
        return
    if info.images is None:
        raise ProtocolError("images for a model that takes none")
    if any(len(image.digest) != DIGEST_BYTES for image in images):
        raise ProtocolError("an image without its digest")
    prepared = [
        PromptImage(
            image.position,
            image.tokens,
            np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3),
            image.digest,
        )
        for image in images
    ]
    try:
        check_images(token_ids, prepared, info.images)
    except InvalidRequest as error:
        raise ProtocolError(str(error)) from None


def _check_times(*seconds: float | None) -> None:
    """Raise ProtocolError for times that are NaN or infinite."""
    if not all(math.isfinite(each) for each in seconds if each is not None):
        raise ProtocolError("a time that is not a number")
