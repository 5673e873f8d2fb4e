"""The preparation of images, equal to each family's processor in transformers: sizes, tiles, and text in the prompt.

Pillow resizes, so the pixels equal the reference's to the last bit. Rescaling and normalization belong to the model's
tower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image

from ...common.errors import CorruptCheckpoint, InvalidRequest, UnsupportedModel
from ...model.config_json import ConfigTable
from ...model.vision import MAX_ASPECT_RATIO, read_processor, read_sizes
from ..text.text_files import read_json

MAX_RESIZED_EDGE = 1 << 14  # pixels of the longer edge of a resized image
MAX_IMAGE_TOKENS = 1 << 16  # tokens of an image
MAX_SPLIT_EDGE = 4096  # pixels of the longer edge to which an image for splitting may be enlarged

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """The results of one image: arrays for the model's tower, and the text that stands for it in the prompt."""

    arrays: tuple[Pixels, ...]  # [height, width, 3] each: its tiles, or the whole image
    tokens: int  # length of each array's run of image tokens in the text
    text: str


class ImageProcessor(Protocol):
    """The preprocessing of one model. Any thread may call `process`."""

    @property
    def placeholder(self) -> str:
        """The text of the chat template for an image."""

    @property
    def image_token(self) -> str:
        """The token that the tower's output replaces."""

    def process(self, image: Image.Image) -> ProcessedImage:
        """Return the pixels and the text of an RGB image.

        Raises InvalidRequest for an image that the model cannot take.
        """


@dataclass(frozen=True, slots=True)
class TiledProcessor:
    """Idefics3 and SmolVLM: square tiles in rows, then the whole image in one tile."""

    placeholder: str
    image_token: str
    border_token: str  # token before each tile, and after the last
    global_token: str  # token before the whole image
    longest_edge: int  # longer edge of the image that is split
    tile_edge: int
    splits: bool
    tokens: int  # tokens of a tile
    filter: Image.Resampling

    def process(self, image: Image.Image) -> ProcessedImage:
        """Return the tiles, row by row, and then the whole image; an image of one tile has only the whole image."""
        image = image.resize(self._size(*image.size), self.filter)
        rows, columns = 0, 0
        tiles = []
        if self.splits:
            width, height = self._whole_tiles(*image.size)
            image = image.resize((width, height), self.filter)
            if max(width, height) > self.tile_edge:
                rows, columns = height // self.tile_edge, width // self.tile_edge
                tiles = [self._tile(image, row, column) for row in range(rows) for column in range(columns)]
        whole = image.resize((self.tile_edge, self.tile_edge), self.filter)
        return ProcessedImage((*tiles, _pixels(whole)), self.tokens, self._text(rows, columns))

    def _size(self, width: int, height: int) -> tuple[int, int]:
        """Return the size with the longest edge as configured; the other edge is even."""
        ratio = width / height
        if width >= height:
            width = self.longest_edge
            height = _even(int(width / ratio))
        else:
            height = self.longest_edge
            width = _even(int(height * ratio))
        width, height = max(width, 1), max(height, 1)
        ratio = width / height
        if width >= height and width > MAX_SPLIT_EDGE:
            width, height = MAX_SPLIT_EDGE, int(MAX_SPLIT_EDGE / ratio)
        elif height > MAX_SPLIT_EDGE:
            width, height = int(MAX_SPLIT_EDGE * ratio), MAX_SPLIT_EDGE
        return max(width, 1), max(height, 1)

    def _whole_tiles(self, width: int, height: int) -> tuple[int, int]:
        """Return the size of the image in whole tiles."""
        ratio = width / height
        if width >= height:
            width = _up(width, self.tile_edge)
            height = _up(int(width / ratio), self.tile_edge)
        else:
            height = _up(height, self.tile_edge)
            width = _up(int(height * ratio), self.tile_edge)
        return width, height

    def _tile(self, image: Image.Image, row: int, column: int) -> Pixels:
        left = column * self.tile_edge
        top = row * self.tile_edge
        return _pixels(image.crop((left, top, left + self.tile_edge, top + self.tile_edge)))

    def _text(self, rows: int, columns: int) -> str:
        run = self.image_token * self.tokens
        tiles = "".join(
            "".join(f"{self.border_token}<row_{row}_col_{column}>{run}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        between = "\n" if rows else ""
        return f"{tiles}{between}{self.border_token}{self.global_token}{run}{self.border_token}"


@dataclass(frozen=True, slots=True)
class DynamicProcessor:
    """Qwen2-VL to Qwen3-VL: the image in about its own size, in whole blocks of merged patches."""

    placeholder: str
    image_token: str
    block: int  # side in pixels of the square that one token represents
    min_pixels: int
    max_pixels: int
    filter: Image.Resampling

    def process(self, image: Image.Image) -> ProcessedImage:
        """Return the whole image, with one token per block."""
        width, height = self._size(*image.size)
        tokens = (width // self.block) * (height // self.block)
        pixels = _pixels(image.resize((width, height), self.filter))
        return ProcessedImage((pixels,), tokens, self.image_token * tokens)

    def _size(self, width: int, height: int) -> tuple[int, int]:
        """Return the nearest size in whole blocks that has an allowed number of pixels."""
        if max(width, height) / min(width, height) > MAX_ASPECT_RATIO:
            raise InvalidRequest(
                f"it has {width} x {height} pixels; "
                f"the longer edge may be at most {MAX_ASPECT_RATIO} times the shorter one"
            )
        block = self.block
        area = round(width / block) * block * round(height / block) * block
        if area > self.max_pixels:
            scale = math.sqrt((height * width) / self.max_pixels)
            sizes = [max(block, math.floor(edge / scale / block) * block) for edge in (width, height)]
        elif area < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            sizes = [math.ceil(edge * scale / block) * block for edge in (width, height)]
        else:
            sizes = [round(edge / block) * block for edge in (width, height)]
        return sizes[0], sizes[1]


@dataclass(frozen=True, slots=True)
class FixedProcessor:
    """Gemma 3: the image in one size, with a fixed number of tokens."""

    placeholder: str
    image_token: str
    end_token: str
    width: int
    height: int
    tokens: int
    filter: Image.Resampling

    def process(self, image: Image.Image) -> ProcessedImage:
        """Return the whole image in the model's size."""
        pixels = _pixels(image.resize((self.width, self.height), self.filter))
        text = f"\n\n{self.placeholder}{self.image_token * self.tokens}{self.end_token}\n\n"
        return ProcessedImage((pixels,), self.tokens, text)


class ProcessorFiles:
    """The files of a model's folder with the settings of images."""

    def __init__(self, folder: Path, max_tokens: int) -> None:
        self.max_tokens = max_tokens  # limit for an image of any size
        self.images = read_processor(folder)
        self.processor = ConfigTable(read_json(folder / "processor_config.json"), source="processor_config.json")
        self.tokenizer = read_json(folder / "tokenizer_config.json")
        self.config = ConfigTable(read_json(folder / "config.json"))

    def token(self, name: str, default: str) -> str:
        """Return the token under a name in tokenizer_config.json, at the top level or among the extra tokens."""
        extra = self.tokenizer.get("extra_special_tokens")
        named = extra if isinstance(extra, dict) else {}
        for declared in (named.get(name), self.tokenizer.get(name)):
            text = declared.get("content") if isinstance(declared, dict) else declared
            if isinstance(text, str) and text:
                return text
        return default

    def filter(self, default: Image.Resampling) -> Image.Resampling:
        """Return the filter for resizing."""
        return Image.Resampling(self.images.integer("resample", 0, 5, int(default)))

    def tokens(self, key: str, default: int, computed: int) -> int:
        """Return the number of tokens under a key of processor_config.json, which must equal the tower's number."""
        declared = self.processor.integer(key, 1, MAX_IMAGE_TOKENS, default)
        if declared != computed:
            raise CorruptCheckpoint(
                f"processor_config.json: {key} is {declared}; the tower in config.json makes {computed} of an image"
            )
        return declared


def _read_tiled(files: ProcessorFiles) -> ImageProcessor:
    vision = files.config.table("vision_config")
    images = files.images
    tile_edge = images.table("max_image_size").integer("longest_edge", 1, MAX_SPLIT_EDGE, 364)
    patch = vision.integer("patch_size", 1, tile_edge, 32)
    factor = files.config.integer("scale_factor", 1, tile_edge, 2)
    image_token = files.token("image_token", "<image>")
    return TiledProcessor(
        placeholder=image_token,
        image_token=image_token,
        border_token=files.token("fake_image_token", "<fake_token_around_image>"),
        global_token=files.token("global_image_token", "<global-img>"),
        longest_edge=images.table("size").integer("longest_edge", 1, MAX_RESIZED_EDGE, 4 * 364),
        tile_edge=tile_edge,
        splits=images.flag("do_image_splitting", True),
        tokens=files.tokens("image_seq_len", 169, (tile_edge // patch) ** 2 // factor**2),
        filter=files.filter(Image.Resampling.LANCZOS),
    )


def _read_dynamic(files: ProcessorFiles) -> ImageProcessor:
    sizes = read_sizes(files.images, files.max_tokens)
    image_token = files.token("image_token", "<|image_pad|>")
    return DynamicProcessor(
        placeholder=image_token,
        image_token=image_token,
        block=sizes.block,
        min_pixels=sizes.min_pixels,
        max_pixels=sizes.max_pixels,
        filter=files.filter(Image.Resampling.BICUBIC),
    )


def _read_fixed(files: ProcessorFiles) -> ImageProcessor:
    size = files.images.table("size")
    if files.images.flag("do_pan_and_scan", False):
        raise files.images.refused("do_pan_and_scan", "false, null or absent: images are not cropped")
    return FixedProcessor(
        placeholder=files.token("boi_token", "<start_of_image>"),
        image_token=files.token("image_token", "<image_soft_token>"),
        end_token=files.token("eoi_token", "<end_of_image>"),
        width=size.integer("width", 1, MAX_RESIZED_EDGE, 224),
        height=size.integer("height", 1, MAX_RESIZED_EDGE, 224),
        tokens=files.tokens(
            "image_seq_length", 256, files.config.integer("mm_tokens_per_image", 1, MAX_IMAGE_TOKENS, 256)
        ),
        filter=files.filter(Image.Resampling.BILINEAR),
    )


PROCESSORS: Mapping[str, Callable[[ProcessorFiles], ImageProcessor]] = {  # `model_type` of config.json -> processor
    "idefics3": _read_tiled,
    "smolvlm": _read_tiled,
    "qwen2_vl": _read_dynamic,
    "qwen2_5_vl": _read_dynamic,
    "qwen3_vl": _read_dynamic,
    "qwen3_5": _read_dynamic,
    "qwen3_5_moe": _read_dynamic,
    "gemma3": _read_fixed,
}


def read_image_processor(folder: Path, max_tokens: int = MAX_IMAGE_TOKENS) -> ImageProcessor:
    """Return the preprocessing of a folder's model, which makes images of any size at most about `max_tokens` large.

    Raises UnsupportedModel or CorruptCheckpoint.
    """
    files = ProcessorFiles(folder, max_tokens)
    family = files.config.text("model_type", "")
    if family not in PROCESSORS:
        raise UnsupportedModel(f"{folder}: images are supported for {', '.join(PROCESSORS)} models, not for {family!r}")
    if not files.images.values:
        raise CorruptCheckpoint(f"{folder} has no preprocessor_config.json, which says how images are prepared")
    if not files.images.flag("do_resize", True):
        raise files.images.refused("do_resize", "true")
    return PROCESSORS[family](files)


def _pixels(image: Image.Image) -> Pixels:
    return np.asarray(image, np.uint8)


def _even(length: int) -> int:
    return length + length % 2


def _up(length: int, multiple: int) -> int:
    return math.ceil(length / multiple) * multiple
