"""Tiny models that take images, with a tokenizer and a chat template, from golden weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

GOLDENS = Path(__file__).parents[1] / "goldens"
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
PLACES = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
SPECIAL = (*PLACES, "<|im_start|>", "<end_of_utterance>", "<global-img>", "<fake_token_around_image>", "<image>")
QWEN_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
VOCABULARY = 160  # vocabulary of the golden models, whose last id is the image token
TOKENS = 9  # tokens of a tile


def write_image_folder(folder: Path) -> Path:
    """Write a folder of Idefics 3. An image is up to four tiles, and one of the whole."""
    _write_text(folder, "idefics3", "smolvlm", SPECIAL)
    images = json.loads((GOLDENS / "idefics3" / "preprocessor_config.json").read_text())
    images |= {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}, "resample": 1}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": TOKENS}))
    return folder


def write_qwen_folder(folder: Path, family: str) -> Path:
    """Write a folder of a Qwen-VL family. An image has one token for 8 x 8 pixels."""
    _write_text(folder, family, "qwen3_vl" if family == "qwen3_5_images" else family, QWEN_SPECIAL)
    shutil.copyfile(GOLDENS / family / "preprocessor_config.json", folder / "preprocessor_config.json")
    return folder


def _write_text(folder: Path, weights: str, templates: str, specials: tuple[str, ...]) -> None:
    """Write a golden model with a tokenizer that makes one token of each character."""
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(GOLDENS / weights / name, folder / name)
    ids = {character: index for index, character in enumerate(CHARACTERS, 2)}
    unused = {f"<unused{index}>": index for index in range(VOCABULARY) if not 2 <= index < 2 + len(CHARACTERS)}
    special = {name: VOCABULARY - len(specials) + index for index, name in enumerate(specials)}
    vocabulary = {name: index for name, index in unused.items() if index not in special.values()} | ids | special
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unused0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copyfile(GOLDENS / "images" / templates / "tokenizer_config.json", folder / "tokenizer_config.json")
