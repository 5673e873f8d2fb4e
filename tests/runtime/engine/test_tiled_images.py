"""SmolVLM from a chat with image files to logits, compared with transformers: template, tiles, tower and text model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from quire import LLM, SamplingParams
from quire.kernels import supported_levels
from quire.kernels.pool import Pool
from quire.runtime.common.config import EngineConfig
from quire.runtime.engine.images import ImageReader, read_image_processor
from quire.runtime.engine.input import placed_images
from quire.runtime.engine.text import ChatTemplate, Tokenizer
from quire.runtime.model.runner.image_runner import ImageRunner
from quire.runtime.model.vision import pack_tower, read_vision

GOLDENS = Path(__file__).parents[2] / "goldens"
CHAT = json.loads((GOLDENS / "images" / "golden.json").read_text())["smolvlm"]["chats"]["two"]
FILES = [(GOLDENS / "images" / "files" / name).read_bytes() for name in CHAT["files"]]
OPTIONS: dict[str, Any] = {"kv_cache_dtype": "f32", "kv_cache_memory": 4 << 20, "page_size": 16}
TOLERANCES = {"f32": 2e-4, "bf16": 0.02, "q8": 0.05}
LEAST_COSINES = {"f32": 0.9999, "bf16": 0.999, "q8": 0.9985}  # least of all rows; random weights have no outliers

Floats = npt.NDArray[np.float32]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the golden model with the files of its tokenizer and its processor."""
    paths = [*(GOLDENS / "images" / "smolvlm").iterdir(), *(GOLDENS / "smolvlm").glob("*")]
    for name, path in {path.name: path for path in paths}.items():
        shutil.copyfile(path, tmp_path / name)
    return tmp_path


@pytest.fixture(scope="module")
def golden() -> dict[str, Floats]:
    with np.load(GOLDENS / "smolvlm" / "tiles.npz") as data:
        return dict(data)


def messages(*files: bytes) -> list[dict[str, Any]]:
    """Return the chat with the files in it, or without any."""
    images = iter([{"image": file} for file in files] or [{}, {}])
    content = [
        {"type": "image", **next(images)} if part == "*" else {"type": "text", "text": part} for part in CHAT["parts"]
    ]
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": content},
    ]


def read_chat(folder: Path) -> tuple[list[int], Any]:
    tokenizer = Tokenizer(folder)
    reader = ImageReader(read_image_processor(folder), tokenizer, EngineConfig())
    text, tiles = reader.insert(ChatTemplate.load(folder).render(messages()), FILES)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return token_ids, reader.locate(token_ids, tiles)


def cosines(rows: Floats, golden: Floats) -> Floats:
    product: Floats = (rows * golden).sum(axis=-1)
    return product / np.linalg.norm(rows, axis=-1) / np.linalg.norm(golden, axis=-1)


@pytest.mark.parametrize("weights", TOLERANCES)
def test_rows_and_logits_are_those_of_transformers(folder: Path, golden: dict[str, Floats], weights: Any) -> None:
    prompt, tiles = read_chat(folder)
    assert prompt == CHAT["ids"]
    spec = read_vision(folder)
    assert spec is not None
    runner = ImageRunner(pack_tower(folder, spec, weights), 0, Pool(1), supported_levels()[-1])
    rows = np.stack([runner.encode(placed) for placed in placed_images(tiles)])
    with LLM(folder, **OPTIONS, weights=weights) as llm:
        logits = llm.logits(prompt, tiles)
    for name, values in (("rows", rows), ("logits", logits)):
        assert np.abs(values - golden[name]).max() <= TOLERANCES[weights] * np.ptp(golden[name])
        assert cosines(values, golden[name]).min() >= LEAST_COSINES[weights]


def test_a_chat_is_answered_as_its_prompt(folder: Path, golden: dict[str, Floats]) -> None:
    with LLM(folder, **OPTIONS, weights="f32") as llm:
        output = llm.chat(messages(*FILES), SamplingParams(max_tokens=1, ignore_eos=True))
    assert output.token_ids == (int(golden["logits"][-1].argmax()),)
    assert output.usage.prompt_tokens == len(CHAT["ids"])
