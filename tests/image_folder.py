"""A tiny model that takes images, with a tokenizer and a chat template, from the golden weights of Idefics 3."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

GOLDENS = Path(__file__).parent / "goldens"
TEMPLATES = GOLDENS / "images" / "smolvlm" / "tokenizer_config.json"
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
PLACES = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
SPECIAL = (*PLACES, "<|im_start|>", "<end_of_utterance>", "<global-img>", "<fake_token_around_image>", "<image>")
VOCABULARY = 160  # of the golden model, whose last id is the image token
TOKENS = 9  # of a tile


def write_image_folder(folder: Path) -> Path:
    """Write a folder whose texts have one token per character. An image is up to four tiles, and one of the whole."""
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(GOLDENS / "idefics3" / name)
    ids = {character: index for index, character in enumerate(CHARACTERS, 2)}
    unused = {f"<unused{index}>": index for index in range(VOCABULARY) if not 2 <= index < 2 + len(CHARACTERS)}
    special = {name: VOCABULARY - len(SPECIAL) + index for index, name in enumerate(SPECIAL)}
    vocabulary = {name: index for name, index in unused.items() if index not in special.values()} | ids | special
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<unused0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes(TEMPLATES.read_bytes())
    images = json.loads((GOLDENS / "idefics3" / "preprocessor_config.json").read_text())
    images |= {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}, "resample": 1}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": TOKENS}))
    return folder
