"""Fixtures for encoders: golden folders, copies of them to damage, and batches on the kernels or the reference."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from quire.runtime.common.config import EngineConfig
from quire.runtime.model.encoder import PackedEncoder
from quire.runtime.model.runner.encoder_runner import EncoderRunner, load_encoder
from quire.scheduler import EncodedText

from tests.support.reference import ReferenceProgram

FOLDER = Path(__file__).parents[3] / "goldens" / "encoders"
NAMES = sorted(path.name for path in FOLDER.iterdir())

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Golden:
    """A model's folder, its inputs, and the results of sentence-transformers or transformers."""

    folder: Path
    texts: list[Any]
    prompt: str | None
    encoded: list[EncodedText]
    values: Values


def read_golden(name: str) -> Golden:
    data = json.loads((FOLDER / name / "golden.json").read_text())
    pairs = zip(data["token_ids"], data["type_ids"], strict=True)
    encoded = [EncodedText(tuple(ids), tuple(types) if any(types) else None) for ids, types in pairs]
    return Golden(FOLDER / name, data["texts"], data["prompt"], encoded, np.array(data["values"]))


@pytest.fixture(params=NAMES)
def golden(request: pytest.FixtureRequest) -> Golden:
    return read_golden(request.param)


@pytest.fixture
def encoder_folder(tmp_path: Path) -> Callable[..., Path]:
    """Copy a golden folder and edit one of its JSON files: `encoder_folder("bert", edit, "modules.json")`."""

    def copy(name: str, edit: Callable[[Any], object] = lambda content: None, file: str = "config.json") -> Path:
        folder = tmp_path / name
        shutil.copytree(FOLDER / name, folder)
        path = folder / file
        content = json.loads(path.read_text()) if path.is_file() else {}
        edit(content)
        path.write_text(json.dumps(content))
        return folder

    return copy


@pytest.fixture
def decoder_with_modules(tmp_path: Path) -> Callable[[str], Path]:
    """Copy the golden folder of a decoder, and add modules that make vectors of the mean of its rows."""

    def copy(name: str) -> Path:
        folder = tmp_path / name
        shutil.copytree(FOLDER.parent / name, folder)
        kinds = {"": "Transformer", "1_Pooling": "Pooling"}
        modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
        (folder / "modules.json").write_text(json.dumps(modules))
        return folder

    return copy


def load(folder: Path, **config: Any) -> EncoderRunner:
    return load_encoder(EngineConfig(model=str(folder), **{"weights": "f32", "threads": 1, **config}))


def run(runner: EncoderRunner, texts: list[EncodedText], stages: int = 1 << 20) -> npt.NDArray[np.float32]:
    runner.begin(texts)
    while not runner.advance(stages):
        pass
    return runner.values()


def run_reference(model: PackedEncoder, texts: list[EncodedText]) -> Values:
    """Compute a batch by the numpy reference, in float64."""
    lengths = [len(text.token_ids) for text in texts]
    plan = model.compile(max_rows=sum(lengths), max_texts=len(texts))
    program = ReferenceProgram(plan.ops, model.keys_values, 32, 0)
    types = [text.type_ids or (0,) * len(text.token_ids) for text in texts]
    row_start = np.cumsum([0, *lengths]).astype(np.int32)
    token_ids = np.array([token for text in texts for token in text.token_ids], np.int32)
    program.run_texts(token_ids, row_start, np.array([one for of_text in types for one in of_text], np.int32))
    values: Values = program.regions[plan.results[0]][: len(texts)]
    return values
