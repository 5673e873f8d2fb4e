"""The vectors and scores of each encoder, compared with sentence-transformers and transformers in f32."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.kernels import supported_levels
from quire.kernels.ops import BIAS_PADDING
from quire.runtime.model.encoder import ENCODERS, pack_encoder, plan_encoder_memory, read_encoder
from quire.runtime.model.encoder.weights import BertWeights
from quire.runtime.model.runner.encoder_runner import EncoderRunner
from quire.scheduler import EncodedText

from .conftest import FOLDER, NAMES, Golden, load, read_golden, run, run_reference

FEW = ("bert_scores", "modernbert", "qwen3")
BITS = json.loads((FOLDER.parent / "encoder_bits.json").read_text())


def distance(values: Any, golden: Golden) -> float:
    """Return the largest difference, relative to the range of the golden values."""
    return float(np.abs(values - golden.values).max() / np.ptp(golden.values))


def cosines(values: Any, golden: Golden) -> Any:
    lengths = np.linalg.norm(values, axis=1) * np.linalg.norm(golden.values, axis=1)
    return (values * golden.values).sum(axis=1) / lengths


def test_every_family_has_a_golden() -> None:
    named = {json.loads((FOLDER / name / "config.json").read_text())["architectures"][0] for name in NAMES}
    for family in ENCODERS:
        assert family.name in ("Camembert", "Gte") or named & set(family.architectures)  # readers of others


def test_the_program_on_the_reference_matches(golden: Golden) -> None:
    assert distance(run_reference(pack_encoder(golden.folder, "f32"), golden.encoded), golden) < 2e-6


def test_f32_kernels_are_within_2e_4(golden: Golden) -> None:
    assert distance(run(load(golden.folder), golden.encoded), golden) < 2e-4


@pytest.mark.parametrize("weights", ["q8", "bf16"])
def test_rounded_weights_are_close(golden: Golden, weights: str) -> None:
    values = run(load(golden.folder, weights=weights), golden.encoded)
    if values.shape[1] > 3:  # a vector
        assert cosines(values, golden).min() > 0.999
    assert distance(values, golden) < 0.05


def test_q4_runs() -> None:
    golden = read_golden("bert")
    assert cosines(run(load(golden.folder, weights="q4"), golden.encoded), golden).min() > 0.9


def test_with_q4_the_words_are_q8() -> None:
    body = pack_encoder(FOLDER / "bert", "q4").weights.body
    assert isinstance(body, BertWeights)
    assert (body.words.dtype, {layer.qkv.dtype for layer in body.layers}) == ("q8", {"q4"})


def test_the_plan_has_the_bias_of_scores_that_is_made() -> None:
    """Both sides of 60 tokens, for each of 2 heads, and numbers that a kernel may read beyond them."""
    spec = replace(read_encoder(FOLDER / "mpnet"), max_model_len=60)
    plan = plan_encoder_memory(spec, weights="f32", max_rows=60, max_texts=1, workers=1)
    assert plan.position_bytes == 4 * 2 * (119 + BIAS_PADDING)


@pytest.mark.parametrize("weights", ["f32", "q8"])
@pytest.mark.parametrize("name", FEW)
def test_a_text_has_the_same_bits_alone_in_any_batch_and_any_stages(name: str, weights: str) -> None:
    golden = read_golden(name)
    runner = load(golden.folder, weights=weights, max_num_batched_tokens=1024)
    alone = np.concatenate([run(runner, [text]) for text in golden.encoded])
    shuffled = [*golden.encoded[::-1], *golden.encoded[2:], golden.encoded[0]]
    for stages in (1, 2, 100):
        values = run(runner, shuffled, stages)
        assert np.array_equal(values[: len(alone)][::-1], alone)
        assert np.array_equal(values[len(alone) : -1], alone[2:])
        assert np.array_equal(values[-1], alone[0])


@pytest.mark.parametrize("case", BITS)
def test_golden_bits(case: str) -> None:
    """`tests/goldens/encoder_bits.json` has a digest of the values, which are the same on every machine."""
    name, weights = case.split("/")
    golden = read_golden(name)
    for config in (*({"isa": level} for level in supported_levels()), {"threads": 3}):
        values = run(load(golden.folder, weights=weights, **config), golden.encoded)
        assert hashlib.sha256(values.tobytes()).hexdigest() == BITS[case], config


@pytest.mark.parametrize("name", ["mistral", "gemma3", "qwen3_moe", "granite"])
def test_decoders_make_vectors_too(name: str, decoder_with_modules: Callable[[str], Path]) -> None:
    folder = decoder_with_modules(name)
    texts = [EncodedText(tuple(range(length))) for length in (1, 60, 7)]
    expected = run_reference(pack_encoder(folder, "f32"), texts)
    values = run(load(folder), texts)
    assert np.abs(values - expected).max() / np.ptp(expected) < 2e-6


def test_a_new_batch_replaces_an_unfinished_one() -> None:
    golden = read_golden("bert")
    runner = load(golden.folder)
    runner.begin(golden.encoded)
    assert not runner.advance(1)
    assert distance(run(runner, golden.encoded), golden) < 2e-4


def test_texts_without_types_are_of_type_0_beside_others() -> None:
    runner = load(FOLDER / "bert")
    texts = [EncodedText((2, 5, 3), (0, 1, 1)), EncodedText((2, 7, 3))]
    alone = np.concatenate([run(runner, [text]) for text in texts])
    assert np.array_equal(run(runner, texts), alone)


def test_the_cost_of_a_stage_grows_with_rows_and_with_pairs_of_a_text() -> None:
    runner = load(FOLDER / "bert")
    runner._base_s = 1.0
    runner._row_s = 2.0
    runner._pair_s = 3.0
    assert runner.stage_seconds(5, 4 + 9) == 1 + 2 * 5 + 3 * (4 + 9)


def test_batches_that_do_not_fit_are_refused() -> None:
    golden = read_golden("bert")
    runner: EncoderRunner = load(golden.folder, max_num_batched_tokens=256, max_num_seqs=8, max_model_len=40)
    (text,) = golden.encoded[:1]
    for texts, message in (
        ([], "a batch takes"),
        ([text] * 86, "258 tokens of 86 texts"),
        ([text._replace(token_ids=())], "a batch takes"),
        ([text, text._replace(token_ids=())], "a text has 1 to 40 tokens"),
        ([text._replace(token_ids=(2,) * 41)], "a text has 1 to 40 tokens"),
        ([text._replace(token_ids=(2, 160))], "160"),
        ([text._replace(token_ids=(-1,))], "-1"),
        ([text._replace(type_ids=(0, 1))], "a text has a type for each token"),
        ([text._replace(type_ids=(0, 2, 0))], "2"),
    ):
        runner.begin([text])
        with pytest.raises(ValueError, match=message):
            runner.begin(texts)
        assert runner.advance(1), "nothing to do"
    assert runner.stage_seconds(32, 2 * 16**2) > runner.stage_seconds(16, 16**2) > 0
