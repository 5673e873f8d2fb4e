"""Image files as RGB images, as transformers' `load_image` reads them. The files are untrusted.

A file is opened as one of four formats, and the sizes in its header are limited before decompression.
"""

from __future__ import annotations

import io

from PIL import ExifTags, Image, UnidentifiedImageError

from ...common.errors import InvalidRequest

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
SCAN = b"\xff\xda"  # begins each scan of a JPEG file
MAX_EDGE = (1 << 16) - 1  # pixels, as in JPEG: the filter for resizing takes 48 bytes for each
MAX_SCANNED_PIXELS = 1 << 30  # pixels times scans: a progressive file may scan its pixels repeatedly
MAX_REASON_CHARACTERS = 200

# The transpositions for the EXIF orientations 2 to 8.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_image(data: bytes, max_pixels: int) -> Image.Image:
    """Return the image in a file as RGB without transparency, rotated according to its EXIF data.

    Raises InvalidRequest that says what is allowed. Decoding takes about 16 bytes per pixel, so decode one image at a
    time.
    """
    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            _check_header(image, data, max_pixels)
            image.load()
            return _as_rgb(image)
    except InvalidRequest:
        raise
    except UnidentifiedImageError:
        reason = "it is not a PNG, JPEG, WebP or GIF file"
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        reason = f"it has more than {max_pixels} pixels (`max_image_pixels`)"
    # Pillow documents no common base class: damaged files raise OSError, SyntaxError, struct.error, ValueError, …
    except Exception as error:
        reason = f"it is damaged: {error}"[:MAX_REASON_CHARACTERS]
    raise InvalidRequest(reason)  # not within `except`: the other error's traceback holds the pixels


def _check_header(image: Image.Image, data: bytes, max_pixels: int) -> None:
    """Raise InvalidRequest for a file that is too expensive to decompress, or that has several frames."""
    width, height = image.size
    if width * height > max_pixels:
        raise InvalidRequest(f"it has {width} x {height} pixels; at most {max_pixels} (`max_image_pixels`)")
    if max(width, height) > MAX_EDGE:
        raise InvalidRequest(f"it has {width} x {height} pixels; at most {MAX_EDGE} along an edge")
    # A JPEG file with several pictures, as telephones write them, is not an animation: the first picture is the
    # photograph.
    if image.format in ("JPEG", "MPO"):
        num_scans = data.count(SCAN)
        if num_scans * width * height > MAX_SCANNED_PIXELS:
            raise InvalidRequest(f"it has {num_scans} scans of {width} x {height} pixels; save it with fewer")
    elif getattr(image, "is_animated", False):
        raise InvalidRequest("it is animated; send one of its frames as an image of its own")


def _as_rgb(image: Image.Image) -> Image.Image:
    turn = TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    if turn is not None:
        image = image.transpose(turn)
    image.info.pop("transparency", None)  # Pillow warns about the transparency of a palette.
    return image if image.mode == "RGB" else image.convert("RGB")
