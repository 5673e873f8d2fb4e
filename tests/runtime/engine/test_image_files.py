"""Images of chats: pixels and token ids as transformers' processors make them, and typed errors for hostile files."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import struct
import zlib
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from PIL import Image
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import CorruptCheckpoint, InvalidRequest, QuotaExceeded, UnsupportedModel
from quire.runtime.common.prompts import image_digest
from quire.runtime.engine.images import ImageReader, read_image_processor
from quire.runtime.engine.images.decoding import MAX_SCANNED_PIXELS, decode_image
from quire.runtime.engine.text import ChatTemplate, Tokenizer

from tests.fuzz.fuzz_images import base_files, mutated

GOLDENS = Path(__file__).parents[2] / "goldens" / "images"
GOLDEN: dict[str, Any] = json.loads((GOLDENS / "golden.json").read_text())
FILES = {path.name: path.read_bytes() for path in sorted((GOLDENS / "files").iterdir())}
MANY = 1 << 25  # pixels
PLACEHOLDERS = {"smolvlm": "<image>", "qwen3_vl": "<|image_pad|>", "gemma3": "<start_of_image>"}


def reader_of(family: str, **options: Any) -> ImageReader:
    folder = GOLDENS / family
    return ImageReader(read_image_processor(folder), Tokenizer(folder), EngineConfig(**options))


def chat(parts: list[str]) -> list[dict[str, Any]]:
    """Return the chat that the goldens were made with; its earlier turns are plain text."""
    content = [{"type": "image"} if part == "*" else {"type": "text", "text": part} for part in parts]
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": content},
    ]


@pytest.mark.parametrize("family", GOLDEN)
def test_pixels_are_those_of_the_reference(family: str) -> None:
    """Every mode, orientation and shape: the digests are of transformers' own pixels."""
    processor = read_image_processor(GOLDENS / family)
    assert GOLDEN[family]["pixels"].keys() == FILES.keys()
    for name, expected in GOLDEN[family]["pixels"].items():
        image = decode_image(FILES[name], MANY)
        if isinstance(expected, str):
            with pytest.raises(InvalidRequest, match="at most 200 times the shorter"):
                processor.process(image)
            continue
        arrays = processor.process(image).arrays
        found = [[*each.shape[:2], hashlib.sha256(each.tobytes()).hexdigest()[:16]] for each in arrays]
        assert found == expected, name


@pytest.mark.parametrize("family", GOLDEN)
@pytest.mark.parametrize("name", ["first", "last", "two", "adjacent"])
def test_token_ids_are_those_of_the_reference(family: str, name: str) -> None:
    golden = GOLDEN[family]["chats"][name]
    reader = reader_of(family)
    tokenizer = Tokenizer(GOLDENS / family)
    text = ChatTemplate.load(GOLDENS / family).render(chat(golden["parts"]))
    expanded, images = reader.insert(text, [FILES[file] for file in golden["files"]])
    token_ids = tokenizer.encode(expanded, add_special_tokens=False)
    assert token_ids == golden["ids"]
    located = reader.locate(token_ids, images)
    runs = [index for image in located for index in range(image.position, image.position + image.tokens)]
    image_token = tokenizer.special_tokens[read_image_processor(GOLDENS / family).image_token]
    assert runs == [index for index, token in enumerate(token_ids) if token == image_token]
    assert [image.pixels.shape for image in located] == [each.shape for image in images for each in image.arrays]


def test_a_digest_is_of_pixels_and_shape() -> None:
    reader = reader_of("qwen3_vl")
    text = "<|image_pad|><|image_pad|><|image_pad|>"
    expanded, images = reader.insert(text, [FILES["wide.png"], FILES["wide.png"], FILES["tall.jpg"]])
    first, same, other = reader.locate(Tokenizer(GOLDENS / "qwen3_vl").encode(expanded), images)
    assert first.digest == same.digest != other.digest
    assert first.position == 0, "the lengths of runs that touch separate them"
    assert same.position == first.tokens
    assert image_digest(np.zeros((2, 8, 3), np.uint8)) != image_digest(np.zeros((4, 4, 3), np.uint8))


@pytest.mark.parametrize("family", PLACEHOLDERS)
def test_a_text_that_spells_a_placeholder_is_refused(family: str) -> None:
    reader = reader_of(family)
    tokenizer = Tokenizer(GOLDENS / family)
    placeholder = PLACEHOLDERS[family]
    with pytest.raises(InvalidRequest, match="messages: 1 images, and 2 times"):
        reader.insert(placeholder * 2, [FILES["pixel.png"]])
    with pytest.raises(InvalidRequest, match="messages: 2 images, and 1 times"):
        reader.insert(placeholder, [FILES["pixel.png"]] * 2)
    image_token = read_image_processor(GOLDENS / family).image_token
    for before, after in ((image_token, ""), ("", image_token), (image_token * 99, "")):
        expanded, images = reader.insert(placeholder, [FILES["pixel.png"]])
        with pytest.raises(InvalidRequest, match="messages: a text has"):
            reader.locate(tokenizer.encode(before + " " + expanded + " " + after), images)
    with pytest.raises(InvalidRequest, match="messages: a text has"):
        reader.locate(tokenizer.encode(image_token), images)


def test_the_memory_of_an_image_is_that_of_all_its_tiles() -> None:
    placeholder = PLACEHOLDERS["smolvlm"]
    file = FILES["wide.png"]
    _, (image,) = reader_of("smolvlm").insert(placeholder, [file])
    num_bytes = sum(array.nbytes for array in image.arrays)
    assert len(image.arrays) > 1
    reader_of("smolvlm", max_image_memory=num_bytes).insert(placeholder, [file])
    with pytest.raises(QuotaExceeded, match=f"the first 1 images take {num_bytes} bytes"):
        reader_of("smolvlm", max_image_memory=num_bytes - 1).insert(placeholder, [file])
    with pytest.raises(QuotaExceeded, match=f"the first 2 images take {2 * num_bytes} bytes"):
        reader_of("smolvlm", max_image_memory=2 * num_bytes - 1).insert(2 * placeholder, [file, file])


def test_an_image_that_is_nearly_a_line_has_a_size() -> None:
    processor = dataclasses.replace(read_image_processor(GOLDENS / "smolvlm"), longest_edge=8192)  # type: ignore[type-var]
    assert processor._size(20_000, 1) == (4096, 1)  # type: ignore[attr-defined]
    assert processor._size(1, 20_000) == (1, 4096)  # type: ignore[attr-defined]


# Hostile files


def png(width: int, height: int, data: bytes = b"", *, extra: bytes = b"") -> bytes:
    """Return a PNG file that declares a size, with this much of its compressed pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + extra + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def animation(kind: str) -> bytes:
    out = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "green", "blue")]
    frames[0].save(out, kind, save_all=True, append_images=frames[1:])
    return out.getvalue()


def saved(kind: str, size: tuple[int, int] = (8, 8)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size).save(out, kind)
    return out.getvalue()


HOSTILE = {
    "nothing": (b"", "not a PNG, JPEG, WebP or GIF"),
    "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a PNG, JPEG, WebP or GIF"),
    "a format that Pillow reads": (saved("TIFF"), "not a PNG, JPEG, WebP or GIF"),
    "a program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a PNG, JPEG, WebP or GIF"),
    "100 megapixels": (png(10_000, 10_000), r"33554432.*\(`max_image_pixels`\)"),
    "a bomb": (png(50_000, 50_000, zlib.compress(bytes(1 << 20))), "more than 33554432 pixels"),
    "a long edge": (png(1 << 25, 1), "33554432 x 1 pixels; at most 65535 along an edge"),
    "no pixels": (png(0, 8), "."),
    "no data": (png(8, 8), "damaged"),
    "too little data": (png(8, 8, zlib.compress(bytes(10))), "damaged"),
    "half a PNG file": (FILES["wide.png"][:-40], "damaged"),
    "half a JPEG file": (FILES["tall.jpg"][:900], "damaged"),
    "half a WebP file": (FILES["lossy.webp"][:200], "."),
    "half a GIF file": (FILES["still.gif"][:900], "damaged"),
    "an animated GIF file": (animation("GIF"), "animated"),
    "an animated PNG file": (animation("PNG"), "animated"),
    "an animated WebP file": (animation("WEBP"), "animated"),
}


@pytest.mark.parametrize(("data", "reason"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as refusal:
        decode_image(data, MANY)
    assert len(str(refusal.value)) <= 250
    assert refusal.value.__cause__ is refusal.value.__context__ is None, "it holds no pixels"


def test_a_file_of_many_scans_is_refused_by_the_work_that_they_are() -> None:
    data = FILES["progressive.jpg"]
    scan = data[data.index(b"\xff\xda") : data.rindex(b"\xff\xda")]
    assert decode_image(data, MANY).size == (90, 70)
    num_scans = MAX_SCANNED_PIXELS // (90 * 70)
    with pytest.raises(InvalidRequest, match=r"scans of 90 x 70 pixels; save it with fewer"):
        decode_image(data + b"\xff\xda" * num_scans + scan, MANY)


def test_the_pixels_of_an_image_are_limited() -> None:
    assert decode_image(FILES["square.png"], 64 * 64).size == (64, 64)
    with pytest.raises(InvalidRequest, match="64 x 64 pixels; at most 4095"):
        decode_image(FILES["square.png"], 64 * 64 - 1)
    assert decode_image(png(65_535, 1, zlib.compress(bytes(1 + 3 * 65_535))), MANY).size == (65_535, 1)
    with pytest.raises(InvalidRequest, match="65536 x 1 pixels; at most 65535 along an edge"):
        decode_image(png(65_536, 1), MANY)


def test_of_the_pictures_in_a_photograph_the_first_is_read() -> None:
    """Phones write JPEG files with several pictures. Such a file is not an animation."""
    out = io.BytesIO()
    first = Image.new("RGB", (8, 8), "red")
    second = Image.new("RGB", (8, 8), "blue")
    first.save(out, "MPO", save_all=True, append_images=[second])
    red, green, blue = np.asarray(decode_image(out.getvalue(), MANY))[4, 4].tolist()
    assert red > 200 > 50 > max(green, blue)


def test_damaged_metadata_gives_an_image_or_a_typed_error() -> None:
    for exif in (b"", b"MM\0*", b"II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x04abcd"):
        out = io.BytesIO()
        Image.new("RGB", (8, 4)).save(out, "JPEG", exif=exif)
        with contextlib.suppress(InvalidRequest):
            assert decode_image(out.getvalue(), MANY).size == (8, 4)


def test_an_error_names_the_image() -> None:
    with pytest.raises(InvalidRequest, match=r"^messages: image 2: it is not a PNG"):
        reader_of("smolvlm").insert("<image><image>", [FILES["pixel.png"], b"x"])


def test_mutated_files_give_pixels_or_typed_errors() -> None:
    """A small part of tests/fuzz/fuzz_images.py."""
    random = Random(5)
    files = base_files()
    num_read = 0
    processor = read_image_processor(GOLDENS / "qwen3_vl")
    for _ in range(150):
        with contextlib.suppress(InvalidRequest):
            processor.process(decode_image(mutated(random, files), 1 << 16))
            num_read += 1
    assert 5 < num_read < 100


# Folders


def folder_with(tmp_path: Path, family: str, **changes: dict[str, Any] | None) -> Path:
    """Return a folder like the golden one, with the keys of some files changed, or without a file."""
    for path in (GOLDENS / family).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for name, change in changes.items():
        path = tmp_path / f"{name}.json"
        if change is None:
            path.unlink()
        else:
            path.write_text(json.dumps(json.loads(path.read_text()) | change))
    return tmp_path


@pytest.mark.parametrize(
    ("family", "changes", "error", "match"),
    [
        ("smolvlm", {"preprocessor_config": None}, CorruptCheckpoint, "has no preprocessor_config.json"),
        ("smolvlm", {"config": {"model_type": "other"}}, UnsupportedModel, "not for 'other'"),
        ("smolvlm", {"processor_config": {"image_seq_len": 5}}, CorruptCheckpoint, "image_seq_len is 5; the tower"),
        ("gemma3", {"processor_config": {"image_seq_length": 5}}, CorruptCheckpoint, "image_seq_length is 5"),
        ("smolvlm", {"preprocessor_config": {"size": {"longest_edge": 0}}}, UnsupportedModel, "size.longest_edge"),
        ("smolvlm", {"preprocessor_config": {"resample": 9}}, UnsupportedModel, "resample is 9"),
        ("gemma3", {"preprocessor_config": {"do_resize": False}}, UnsupportedModel, "do_resize is false"),
        ("qwen3_vl", {"preprocessor_config": {"patch_size": "x"}}, UnsupportedModel, "patch_size"),
        ("qwen3_vl", {"preprocessor_config": {"size": 7}}, UnsupportedModel, "size is 7"),
    ],
)
def test_a_folder_with_other_settings_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        read_image_processor(folder_with(tmp_path, family, **changes))


def test_settings_nested_in_the_processor_file_win(tmp_path: Path) -> None:
    nested = {"image_processor": {"size": {"height": 20, "width": 30}}}
    folder = folder_with(tmp_path, "gemma3", processor_config=nested)
    (pixels,) = read_image_processor(folder).process(Image.new("RGB", (5, 5))).arrays
    assert pixels.shape == (20, 30, 3)


def test_a_tokenizer_without_the_image_token_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "smolvlm", tokenizer_config={"extra_special_tokens": {"image_token": "<no>"}})
    with pytest.raises(CorruptCheckpoint, match="no special token '<no>'"):
        ImageReader(read_image_processor(folder), Tokenizer(folder), EngineConfig())
