"""Write tests/goldens/images: image files, folders of tiny models, and the results of transformers' processors.

Run it with transformers 5.5 and Pillow, without torchvision. The digests are those of the pixels before rescaling.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import transformers.models.smolvlm.processing_smolvlm as smolvlm
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.image_utils import load_image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.processing_utils import ProcessorMixin

FOLDER = Path(__file__).parent / "images"
ORIENTATION = 0x0112

TILED_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
DYNAMIC_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}<|im_end|>\n{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}"
    "{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FIXED_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}{{ '<start_of_image>' }}"
    "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TILED_TOKENS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
DYNAMIC_TOKENS = {"image_token": "<|image_pad|>", "start": "<|vision_start|>", "end": "<|vision_end|>"}
FIXED_TOKENS = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}

# Family -> config.json, preprocessor_config.json, processor_config.json, special tokens, template.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, str], str]] = {
    "smolvlm": (
        {"model_type": "smolvlm", "scale_factor": 2, "vision_config": {"patch_size": 8, "image_size": 32}},
        {"size": {"longest_edge": 120}, "max_image_size": {"longest_edge": 32}, "resample": 1},
        {"image_seq_len": 4},
        TILED_TOKENS,
        TILED_TEMPLATE,
    ),
    "idefics3": (
        {"model_type": "idefics3", "scale_factor": 2, "vision_config": {"patch_size": 8, "image_size": 40}},
        {"size": {"longest_edge": 90}, "max_image_size": {"longest_edge": 40}, "do_image_splitting": False},
        {"image_seq_len": 6},
        TILED_TOKENS,
        TILED_TEMPLATE,
    ),
    "qwen2_5_vl": (
        {"model_type": "qwen2_5_vl"},
        {
            "min_pixels": 56 * 56,
            "max_pixels": 28 * 28 * 24,
            "patch_size": 14,
            "merge_size": 2,
            "temporal_patch_size": 2,
        },
        {},
        DYNAMIC_TOKENS,
        DYNAMIC_TEMPLATE,
    ),
    "qwen3_vl": (
        {"model_type": "qwen3_vl"},
        {
            "size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 30},
            "patch_size": 16,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "resample": 3,
        },
        {},
        DYNAMIC_TOKENS,
        DYNAMIC_TEMPLATE,
    ),
    "gemma3": (
        {"model_type": "gemma3", "mm_tokens_per_image": 4},
        {"size": {"height": 48, "width": 48}, "resample": 2, "do_convert_rgb": None, "do_pan_and_scan": None},
        {"image_seq_length": 4},
        FIXED_TOKENS,
        FIXED_TEMPLATE,
    ),
}


def picture(width: int, height: int) -> Image.Image:
    """Return an RGB image whose pixels all matter, and which compresses well."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    planes = [(3 * x + y) % 256, (x * 255 // width + 5 * y) % 256, (x // 3 * 37 + y // 5 * 91) % 256]
    return Image.fromarray(np.stack(planes, -1).astype(np.uint8))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_with_16_bits(width: int, height: int) -> bytes:
    """Return a PNG file with 16 bits per channel, which Pillow reads and does not write."""
    pixels = np.asarray(picture(width, height), np.uint16) * 257 + 3
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


def write_files() -> None:
    folder = FOLDER / "files"
    folder.mkdir(parents=True)
    rgb = picture(61, 43)
    for name, width, height in (
        ("wide", 301, 97), ("column", 1, 37), ("row", 37, 1), ("pixel", 1, 1), ("long", 1500, 9), ("longer", 900, 4),
        ("square", 64, 64), ("even", 128, 96),
    ):  # fmt: skip
        picture(width, height).save(folder / f"{name}.png", optimize=True)
    picture(75, 311).save(folder / "tall.jpg", quality=80)
    picture(90, 70).save(folder / "progressive.jpg", quality=80, progressive=True)
    rgb.convert("CMYK").save(folder / "cmyk.jpg", quality=80)
    rgb.convert("L").save(folder / "grey.jpg", quality=80)
    rgb.convert("L").save(folder / "grey.png")
    rgb.convert("1").save(folder / "bits.png")
    Image.fromarray(np.asarray(rgb.convert("L"), np.uint16) * 200).save(folder / "grey16.png")
    (folder / "rgb16.png").write_bytes(png_with_16_bits(40, 30))
    alpha = Image.linear_gradient("L").resize(rgb.size)
    rgba = rgb.copy()
    rgba.putalpha(alpha)
    rgba.save(folder / "rgba.png")
    rgba.save(folder / "rgba.webp", lossless=True)
    rgb.save(folder / "lossy.webp", quality=80)
    Image.merge("LA", (rgb.convert("L"), alpha)).save(folder / "grey_alpha.png")
    palette = rgb.quantize(64)
    palette.save(folder / "palette.png")
    palette.save(folder / "palette_alpha.png", transparency=bytes(range(0, 256, 4)))
    palette.save(folder / "palette_colour.png", transparency=3)
    palette.save(folder / "still.gif", transparency=5)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        picture(50, 30).save(folder / f"turned{orientation}.jpg", quality=80, exif=exif)
    picture(50, 30).save(folder / "turned.png", exif=exif)
    picture(50, 30).save(folder / "turned.webp", exif=exif)


def write_tokenizer(folder: Path, tokens: dict[str, str], template: str) -> PreTrainedTokenizerFast:
    """Write a tokenizer of bytes and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    places = (
        [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)] if "<image>" in template else []
    )
    others = ["<bos>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"]
    fast.add_special_tokens([AddedToken(text, special=True) for text in (*others, *tokens.values(), *places)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<bos>", extra_special_tokens=tokens, chat_template=template
    )
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"chat_template": template, "extra_special_tokens": tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return tokenizer


def processor_of(family: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    """Return the family's processor; its pixels are neither rescaled nor normalized."""
    _, images, processor, _, template = FAMILIES[family]
    images = images | {"do_rescale": False, "do_normalize": False}
    if family == "smolvlm":
        smolvlm.num2words = str  # function for videos
        own = SmolVLMImageProcessorPil(**images)
        return smolvlm.SmolVLMProcessor(own, tokenizer, None, chat_template=template, **processor)
    if family == "idefics3":
        return Idefics3Processor(Idefics3ImageProcessorPil(**images), tokenizer, chat_template=template, **processor)
    if family == "gemma3":
        return Gemma3Processor(Gemma3ImageProcessorPil(**images), tokenizer, chat_template=template, **processor)
    cls = Qwen3VLProcessor if family == "qwen3_vl" else Qwen2_5_VLProcessor
    return cls(Qwen2VLImageProcessorPil(**images), tokenizer, None, chat_template=template)


def arrays_of(output: Any, images: dict[str, Any]) -> list[np.ndarray]:
    """Return the uint8 arrays [height, width, 3] of a processor's output."""
    pixels = np.asarray(output["pixel_values"])
    if "image_grid_thw" in output:
        (_, rows, columns) = output["image_grid_thw"][0]
        patch = images["patch_size"]
        merge = images["merge_size"]
        blocks = pixels.reshape(rows // merge, columns // merge, merge, merge, 3, 2, patch, patch)[:, :, :, :, :, 0]
        planes = blocks.transpose(4, 0, 2, 5, 1, 3, 6)  # [channel, row of blocks, row of patches, row, …]
        pixels = planes.reshape(1, 3, rows * patch, columns * patch)
    stacked = pixels.reshape(-1, *pixels.shape[-3:])
    assert np.array_equal(stacked, stacked.astype(np.uint8))
    return [each.transpose(1, 2, 0).astype(np.uint8) for each in stacked]


def shown(arrays: list[np.ndarray]) -> list[list[Any]]:
    return [[*each.shape[:2], hashlib.sha256(np.ascontiguousarray(each).tobytes()).hexdigest()[:16]] for each in arrays]


def chat(*parts: str) -> list[dict[str, Any]]:
    """Return a chat with a text in an earlier turn; `*` is an image."""
    content = [{"type": "image"} if part == "*" else {"type": "text", "text": part} for part in parts]
    return [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]},
        {"role": "user", "content": content},
    ]


CHATS = {  # parts, and the files of their images
    "first": (("*", "What is this?"), ("wide.png",)),
    "last": (("Grüße: ", "*"), ("pixel.png",)),
    "two": (("*", "and", "*", "differ?"), ("tall.jpg", "rgba.png")),
    "adjacent": (("*", "*"), ("row.png", "column.png")),
}


def write_family(family: str) -> dict[str, Any]:
    config, images, processor_config, tokens, template = FAMILIES[family]
    folder = FOLDER / family
    folder.mkdir()
    tokenizer = write_tokenizer(folder, tokens, template)
    for name, content in (("config", config), ("preprocessor_config", images), ("processor_config", processor_config)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    processor = processor_of(family, tokenizer)
    pixels = {}
    for path in sorted((FOLDER / "files").iterdir()):
        try:
            output = processor.image_processor([load_image(str(path))])
        except ValueError as error:
            pixels[path.name] = str(error)
        else:
            pixels[path.name] = shown(arrays_of(output, images))
    chats = {}
    for name, (parts, files) in CHATS.items():
        text = tokenizer.apply_chat_template(chat(*parts), tokenize=False, add_generation_prompt=True)
        loaded = [load_image(str(FOLDER / "files" / file)) for file in files]
        output = processor(images=loaded, text=[text], add_special_tokens=False)
        chats[name] = {"parts": parts, "files": files, "ids": list(map(int, output["input_ids"][0]))}
    return {"pixels": pixels, "chats": chats}


def main() -> None:
    ProcessorMixin.check_argument_for_proper_class = lambda *_: None  # videos need torchvision
    shutil.rmtree(FOLDER, ignore_errors=True)
    write_files()
    goldens = {family: write_family(family) for family in FAMILIES}
    (FOLDER / "golden.json").write_text(json.dumps(goldens, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
