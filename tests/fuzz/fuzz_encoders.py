"""Open broken folders of encoders: whatever their files say, each must load, or raise a ModelError or ConfigError.

usage: fuzz_encoders.py [--cases 20000] [--seed 1]

A case is a golden encoder's folder with one to three changes of its files: values replaced by extreme or wrong ones,
keys and elements removed or repeated, bytes flipped, files truncated or removed. A model that loads
encodes a text. Exit status 1 on any breach.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError, InvalidRequest, ModelError
from quire.runtime.engine.embedding.encoder_text import EncoderText
from quire.runtime.model.encoder import is_encoder
from quire.runtime.model.runner.encoder_runner import load_encoder

GOLDENS = Path(__file__).parents[1] / "goldens" / "encoders"
ADDRESS_SPACE = 4 << 30  # more than this process needs, less than a config.json can claim
REPORTED_BREACHES = 5
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, -1, 7, 39, 41, 255, 1 << 20, 1 << 31, 1 << 63, 1e-300, 1e300, 0.5, "", "x",
    "../x", "gelu", "mean", "Normalize", "BertModel", "Qwen3ForCausalLM", [], [1], [None], {}, {"x": 1}, "\ud800",
)  # fmt: skip
FILES = (
    "config.json", "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json",
    "tokenizer_config.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Normalize/config.json",
    "1_LogitScore/config.json", "chat_template.jinja", "model.safetensors", "tokenizer.json",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    random = Random(options.seed)
    results: Counter[str] = Counter()
    names = sorted(path.name for path in GOLDENS.iterdir())
    with tempfile.TemporaryDirectory() as scratch:
        for case in range(options.cases):
            folder = Path(scratch) / "model"
            shutil.copytree(GOLDENS / random.choice(names), folder)
            for _ in range(random.randint(1, 3)):
                damage(random, folder)
            try:
                results[open_folder(folder)] += 1
            except Exception:
                results["breach"] += 1
                if results["breach"] <= REPORTED_BREACHES:
                    print(f"case {case}: {traceback.format_exc()}", file=sys.stderr)
            shutil.rmtree(folder)
    print(", ".join(f"{name} {count}" for name, count in results.most_common()))
    return 1 if results["breach"] else 0


def open_folder(folder: Path) -> str:
    """Return "loaded", or the name of the error that the folder raises."""
    try:
        if not is_encoder(folder):
            return "not an encoder"
        runner = load_encoder(EngineConfig(model=str(folder), weights="q8", threads=1, tune="off"))
        texts = EncoderText(folder, runner.spec)
        text = texts.truncated(texts.encode("The pool owns the pages."), min(4, runner.spec.max_model_len))
        texts.encode_pair("pages", "the pool")
        if text.token_ids and max(text.token_ids) < runner.spec.body.vocab_size:
            runner.begin([text])
            runner.advance(runner.num_stages)
    except (ModelError, ConfigError, InvalidRequest) as error:  # InvalidRequest: of the text, such as padding in it
        return type(error).__name__
    return "loaded"


def damage(random: Random, folder: Path) -> None:
    """Change one file of a folder."""
    path = folder / random.choice([name for name in FILES if (folder / name).is_file()] or ["config.json"])
    data = path.read_bytes() if path.is_file() else b"{}"
    kind = random.random()
    if kind < 0.05:
        path.unlink(missing_ok=True)
    elif kind < 0.2 or path.suffix != ".json":
        path.write_bytes(flipped(random, data))
    else:
        try:
            content = json.loads(data)
        except ValueError:
            return
        change(random, content)
        path.write_text(json.dumps(content))


def flipped(random: Random, data: bytes) -> bytes:
    """Return the bytes with one byte replaced, or cut off at a byte."""
    if not data:
        return b"\0"
    at = random.randrange(min(len(data), 4096))
    return data[:at] if random.random() < 0.3 else data[:at] + bytes([random.randrange(256)]) + data[at + 1 :]


def change(random: Random, content: Any) -> None:
    """Change one value anywhere in an object or list."""
    while isinstance(content, dict | list) and content:
        keys = list(content) if isinstance(content, dict) else list(range(len(content)))
        key = random.choice(keys)
        inner = content[key]
        if isinstance(inner, dict | list) and inner and random.random() < 0.8:
            content = inner
            continue
        if random.random() < 0.2:
            del content[key]
        elif isinstance(content, list) and random.random() < 0.3:
            content.append(inner)
        else:
            content[key] = random.choice(VALUES)
        return


if __name__ == "__main__":
    sys.exit(main())
