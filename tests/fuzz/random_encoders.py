"""Compare random encoders with the numpy reference, and each text of a batch with the same text alone.

usage: random_encoders.py [--models 200] [--seed 1]

A model has random shapes, sizes that fill no tile, and random weights in f32. It runs with f32, bf16 and q8 weights on
1 to 3 threads, in batches of random texts. Values must be close to the reference's, and a text must have the same
bits in a batch as alone. Exit status 1 on any breach.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from quire.runtime.common.config import EngineConfig, WeightDtype
from quire.runtime.model.encoder import pack_encoder, read_encoder
from quire.runtime.model.encoder.weights import build_encoder_weights
from quire.runtime.model.runner.encoder_runner import load_encoder
from quire.runtime.model.weights.packing import WeightPlanner
from quire.scheduler import EncodedText
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, for tests.kernels

from tests.support.reference import ReferenceProgram

ARCHITECTURES = (
    "BertModel", "RobertaModel", "ModernBertModel", "NomicBertModel", "BertForSequenceClassification",
    "ModernBertForSequenceClassification", "NewModel", "NewForSequenceClassification",
)  # fmt: skip
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 129)
LIMITS = {"f32": 3e-5, "bf16": 0.1, "q8": 0.1}  # limits of the difference, relative to the largest value
MAX_ROWS = 1024
MAX_TEXTS = 6

Floats = npt.NDArray[Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    breaches = [breach for seed in range(options.seed, options.seed + options.models) for breach in check(seed)]
    for breach in breaches:
        print(breach, file=sys.stderr)
    print(f"{options.models} models, {len(breaches)} breaches")
    return 1 if breaches else 0


def check(seed: int) -> list[str]:
    """Return the faults of the model of a seed."""
    random = Random(seed)
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = write_model(random, np.random.default_rng(seed), folder)
        texts = random_texts(random, config, read_encoder(folder).max_model_len)
        for weights in get_args(WeightDtype):
            if weights not in LIMITS:
                continue
            threads = random.randint(1, 3)
            values, alone = run(folder, weights, threads, texts)
            expected = reference(folder, weights, texts)
            error = np.abs(values - expected).max() / np.abs(expected).max()
            if not error < LIMITS[weights]:
                found.append(f"seed {seed}, {weights}: differs by {error}; {config}")
            if not np.array_equal(values, alone):
                found.append(f"seed {seed}, {weights}, {threads} threads: bits depend on the batch; {config}")
    return found


def write_model(random: Random, numbers: np.random.Generator, folder: Path) -> dict[str, Any]:
    """Write a folder with random weights; return its config.json."""
    heads = random.choice((1, 2, 3, 5, 7))
    config = {
        "architectures": [random.choice(ARCHITECTURES)],
        "vocab_size": random.choice((50, 64, 131)),
        "hidden_size": heads * random.choice((2, 8, 10, 16, 20, 32, 34, 64, 66, 128)),
        "num_hidden_layers": random.choice((1, 2, 3)),
        "num_attention_heads": heads,
        "intermediate_size": random.choice((1, 8, 33, 64, 100)),
        "max_position_embeddings": random.choice((150, 300)),
        "type_vocab_size": random.choice((1, 2, 3)),
        "pad_token_id": 1,
        "local_attention": random.choice((2, 7, 20, 64, 130, 400)),
        "num_labels": random.choice((1, 5, 40)),
        "classifier_pooling": random.choice(("cls", "mean")),
        "hidden_activation": random.choice(("gelu", "gelu_new")),
        **{key: random.random() < 0.5 for key in ("norm_bias", "mlp_bias", "attention_bias")},
    }
    (folder / "config.json").write_text(json.dumps(config))
    planner = WeightPlanner()
    build_encoder_weights(read_encoder(folder), "f32", planner)
    tensors = {}
    for name, shape in planner.tensors.items():
        values = numbers.standard_normal(shape) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)
        is_norm = "norm" in name.lower() and name.endswith("weight")
        tensors[name] = (values + is_norm).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return config


def random_texts(random: Random, config: dict[str, Any], longest: int) -> list[EncodedText]:
    lengths = random.choices([length for length in LENGTHS if length <= longest], k=random.randint(1, MAX_TEXTS))

    def draw(length: int, end: int) -> tuple[int, ...]:
        return tuple(random.randrange(end) for _ in range(length))

    return [
        EncodedText(
            draw(length, config["vocab_size"]),
            draw(length, config["type_vocab_size"]) if random.random() < 0.5 else None,
        )
        for length in lengths
    ]


def run(folder: Path, weights: WeightDtype, threads: int, texts: list[EncodedText]) -> tuple[Floats, Floats]:
    """Return the values of a batch, computed by single stages, and the values of each text alone."""
    sizes = {"threads": threads, "max_num_batched_tokens": MAX_ROWS}
    config = EngineConfig(model=str(folder), weights=weights, tune="off", **sizes)
    runner = load_encoder(config)
    runner.begin(texts)
    while not runner.advance(1):
        pass
    values = runner.values()
    alone = []
    for text in texts:
        runner.begin([text])
        runner.advance(runner.num_stages)
        alone.append(runner.values())
    return values, np.concatenate(alone)


def reference(folder: Path, weights: WeightDtype, texts: list[EncodedText]) -> Floats:
    """Return the values of a batch by the numpy reference."""
    model = pack_encoder(folder, weights)
    plan = model.compile(max_rows=MAX_ROWS, max_texts=MAX_TEXTS)
    program = ReferenceProgram(plan.ops, model.keys_values, 32, 0)
    lengths = [len(text.token_ids) for text in texts]
    types = [one for text in texts for one in text.type_ids or (0,) * len(text.token_ids)]
    token_ids = [token for text in texts for token in text.token_ids]
    row_start = np.cumsum([0, *lengths]).astype(np.int32)
    program.run_texts(np.array(token_ids, np.int32), row_start, np.array(types, np.int32))
    return program.regions[plan.results[0]][: len(texts)]


if __name__ == "__main__":
    sys.exit(main())
