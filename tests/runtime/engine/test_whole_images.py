"""Images whose tokens see each other (Gemma 3): a step has all of them, however prompts are cut and cached."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from quire import LLM, RequestOutput, SamplingParams
from quire.runtime.common.errors import ConfigError
from quire.runtime.common.prompts import PromptImage

from tests.support.golden_images import golden_images

GOLDEN = golden_images("gemma3_images")
FOLDER = GOLDEN.folder
TOKENS = 9
SAMPLED = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, seed=3, logprobs=1)
OPTIONS: dict[str, Any] = {"weights": "f32", "kv_cache_dtype": "f32", "kv_cache_memory": 4 << 20, "page_size": 16}
SMALLEST = {"max_num_batched_tokens": 16, "max_num_seqs": 7}  # steps in which an image and all sequences fit


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return GOLDEN.prompt


@pytest.fixture(scope="module")
def images() -> list[PromptImage]:
    return GOLDEN.images


@pytest.fixture(scope="module")
def wanted(prompt: list[int], images: list[PromptImage]) -> object:
    with LLM(FOLDER, **OPTIONS) as llm:
        return bits_of(llm.generate(prompt, SAMPLED, [images])[0])


def bits_of(output: RequestOutput) -> object:
    return output.token_ids, output.logprobs


@pytest.mark.parametrize(("weights", "tolerance"), [("f32", 2e-4), ("bf16", 0.02), ("q8", 0.05)])
@pytest.mark.parametrize("options", [{}, SMALLEST, {"max_num_seqs": 4}], ids=["whole", "small steps", "few samples"])
def test_logits_are_those_of_transformers(
    prompt: list[int], images: list[PromptImage], weights: Any, tolerance: float, options: dict[str, Any]
) -> None:
    """With fewer samples per step than an image has tokens, the logits of an image take several steps."""
    with LLM(FOLDER, **{**OPTIONS, "weights": weights}, **options) as llm:
        GOLDEN.check_logits(llm.logits(prompt, images), tolerance)


@pytest.mark.parametrize(
    "options",
    [
        SMALLEST,
        {"threads": 3, "enable_prefix_caching": False, "image_cache_memory": 0},
        {"page_size": 64, "num_speculative_tokens": 4},
        {"itl_target_ms": 0.01, **SMALLEST},
    ],
    ids=["small chunks", "no caches", "large pages and drafts", "no time"],
)
def test_same_tokens_with_any_options(
    prompt: list[int], images: list[PromptImage], wanted: object, options: dict[str, Any]
) -> None:
    with LLM(FOLDER, **{**OPTIONS, **options}) as llm:
        others = [prompt, prompt[:15], [*prompt, 3, 4]]
        outputs = llm.generate([prompt, *others], SAMPLED, [images, (), (), images])
        assert bits_of(outputs[0]) == wanted
        assert bits_of(llm.generate(prompt, SAMPLED, [images])[0]) == wanted
        assert bits_of(outputs[1]) != wanted


@pytest.mark.parametrize("options", [{}, {"weights": "q8", "kv_cache_dtype": "int8"}], ids=["f32", "q8"])
def test_same_tokens_after_a_part_of_an_image_from_the_prefix_cache(
    prompt: list[int], images: list[PromptImage], options: dict[str, Any]
) -> None:
    """The cached page has the image's first token, which has seen the others."""
    begin = images[0].position
    assert begin < 16 < begin + TOKENS
    short = prompt[: begin + TOKENS + 2]
    with LLM(FOLDER, **{**OPTIONS, **options, "enable_prefix_caching": False}) as llm:
        alone = llm.generate(short, SAMPLED, [images[:1]])[0]
    with LLM(FOLDER, **{**OPTIONS, **options}) as llm:
        llm.generate(prompt, SAMPLED, [images])
        after = llm.generate(short, SAMPLED, [images[:1]])[0]
    assert (alone.usage.cached_tokens, after.usage.cached_tokens) == (0, 16)
    assert bits_of(after) == bits_of(alone)


def test_preemption_leaves_the_tokens_as_they_are(prompt: list[int], images: list[PromptImage]) -> None:
    params = msgspec.structs.replace(SAMPLED, max_tokens=100)
    options = {**OPTIONS, **SMALLEST, "kv_cache_memory": 500 << 10, "max_model_len": 180}
    with LLM(FOLDER, **options, enable_prefix_caching=False) as llm:
        alone = bits_of(llm.generate(prompt, params, [images])[0])
        outputs = llm.generate([[2, 3], [2, 4], prompt, prompt], params, [(), (), images, images])
        assert llm.engine.stats().preemptions
        assert [bits_of(output) for output in outputs[2:]] == [alone, alone]


def test_a_text_has_the_same_bits_beside_an_image(prompt: list[int], images: list[PromptImage]) -> None:
    text = prompt[:12]
    with LLM(FOLDER, **OPTIONS, enable_prefix_caching=False) as llm:
        alone = llm.generate(text, SAMPLED)[0]
        beside = llm.generate([prompt, text, prompt], SAMPLED, [images, (), images])[1]
    assert bits_of(beside) == bits_of(alone)


def test_steps_that_cannot_hold_an_image_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens 15 must be at least 16: a step computes the 9"):
        LLM(FOLDER, **OPTIONS, max_num_batched_tokens=15, max_num_seqs=7)
