"""`ImageReader`: the images of one chat, from encoded files to pixels at their places among the prompt's token ids."""

from __future__ import annotations

from collections.abc import Sequence

from ...common.config import EngineConfig
from ...common.errors import CorruptCheckpoint, InvalidRequest, QuotaExceeded
from ...common.prompts import PromptImage, image_digest
from ..text import Tokenizer
from .decoding import decode_image
from .processors import ImageProcessor, ProcessedImage


class ImageReader:
    """Reads the images of one model's chats. Any thread may call its methods; each call takes memory for one image."""

    def __init__(self, processor: ImageProcessor, tokenizer: Tokenizer, config: EngineConfig) -> None:
        """Raise CorruptCheckpoint if the tokenizer lacks the model's image token."""
        self.max_images = config.max_images_per_request
        self.max_memory = config.max_image_memory  # bytes of the pixels of all live requests
        self._processor = processor
        self._max_pixels = config.max_image_pixels
        token_id = tokenizer.special_tokens.get(processor.image_token)
        if token_id is None:
            raise CorruptCheckpoint(f"tokenizer.json has no special token {processor.image_token!r}, of images")
        self._token_id = token_id

    def insert(self, text: str, files: Sequence[bytes]) -> tuple[str, list[ProcessedImage]]:
        """Return a rendered chat with the text of each image in place of its placeholder, and the images.

        Raises InvalidRequest for a file that is not an image within limits and for a text with other placeholders, and
        QuotaExceeded for images that take too much memory.
        """
        placeholder = self._processor.placeholder
        first, *others = text.split(placeholder)
        if len(others) != len(files):
            raise InvalidRequest(
                f"messages: {len(files)} images, and {len(others)} times {placeholder!r} in the prompt; this text "
                "stands for an image, leave it out of other texts"
            )
        images = []
        num_bytes = 0
        for number, file in enumerate(files, 1):
            images.append(self._read(file, number))
            num_bytes += sum(array.nbytes for array in images[-1].arrays)
            if num_bytes > self.max_memory:
                raise QuotaExceeded(
                    f"messages: the first {number} images take {num_bytes} bytes after resizing, and those of all live "
                    f"requests may take {self.max_memory} (`max_image_memory`)"
                )
        return first + "".join(image.text + after for image, after in zip(images, others, strict=True)), images

    def locate(self, token_ids: Sequence[int], images: Sequence[ProcessedImage]) -> tuple[PromptImage, ...]:
        """Return the images of a tokenized prompt, one for each array of pixels.

        Raises InvalidRequest if the prompt has image tokens elsewhere.
        """
        located = []
        end = 0
        for image in images:
            for pixels in image.arrays:
                start = self._next(token_ids, end)
                end = start + image.tokens
                if any(token != self._token_id for token in token_ids[start:end]) or end > len(token_ids):
                    raise self._misplaced()
                located.append(PromptImage(start, image.tokens, pixels, image_digest(pixels)))
        if self._next(token_ids, end) < len(token_ids):
            raise self._misplaced()
        return tuple(located)

    def _read(self, file: bytes, number: int) -> ProcessedImage:
        try:
            return self._processor.process(decode_image(file, self._max_pixels))
        except InvalidRequest as error:
            raise InvalidRequest(f"messages: image {number}: {error}") from None

    def _next(self, token_ids: Sequence[int], start: int) -> int:
        """Return the index of the next image token, or the number of ids without one."""
        try:
            return token_ids.index(self._token_id, start)
        except ValueError:
            return len(token_ids)

    def _misplaced(self) -> InvalidRequest:
        return InvalidRequest(
            f"messages: a text has {self._processor.image_token!r}, which stands for images; leave it out"
        )
