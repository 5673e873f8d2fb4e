"""Images in prompts, through a whole engine: the logits, the same bits whatever is computed beside, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from quire import LLM, SamplingParams
from quire.runtime.common.errors import InvalidRequest
from quire.runtime.common.prompts import PromptImage, image_digest
from quire.runtime.engine import StepStats
from quire.runtime.engine import input as engine_input
from quire.runtime.engine.facade import SilentObserver
from quire.runtime.model.runner import SamplingSpec
from quire.runtime.workers.engine_link import TO_ENGINE, AddRequests, as_read
from quire.scheduler import RequestSpec, planning

FOLDER = Path(__file__).parents[2] / "goldens/idefics3"
PLACEHOLDER, TOKENS = 159, 9
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = {"weights": "f32", "kv_cache_dtype": "f32", "kv_cache_memory": 4 << 20, "page_size": 16}


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    with np.load(FOLDER / "images.npz") as data:
        return dict(data)


@pytest.fixture(scope="module")
def prompt(golden: dict[str, Any]) -> list[int]:
    ids: list[int] = golden["token_ids"].tolist()
    return ids


@pytest.fixture(scope="module")
def images(golden: dict[str, Any], prompt: list[int]) -> list[PromptImage]:
    first = prompt.index(PLACEHOLDER)
    second = prompt.index(PLACEHOLDER, first + TOKENS)
    return [image(pixels, at) for pixels, at in zip(golden["pixels"], (first, second), strict=True)]


class StepCounter(SilentObserver):
    """Counts the prefill tokens of all steps."""

    def __init__(self) -> None:
        self.prefill_tokens = 0

    def on_step(self, stats: StepStats) -> None:
        self.prefill_tokens += stats.prefill_tokens


def image(pixels: Any, position: int) -> PromptImage:
    return PromptImage(position, TOKENS, pixels, image_digest(pixels))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(FOLDER, **OPTIONS) as llm:
        yield llm
        assert llm.engine.stats().pages_owned == 0


@pytest.fixture(scope="module")
def wanted(llm: LLM, prompt: list[int], images: list[PromptImage]) -> tuple[int, ...]:
    (output,) = llm.generate(prompt, GREEDY, [images])
    return output.token_ids


# Logits and bits


@pytest.mark.parametrize(("weights", "tolerance"), [("f32", 2e-4), ("bf16", 0.02), ("q8", 0.05)])
def test_logits_are_those_of_transformers(
    golden: dict[str, Any], prompt: list[int], images: list[PromptImage], weights: Any, tolerance: float
) -> None:
    with LLM(FOLDER, **{**OPTIONS, "weights": weights}, max_num_seqs=7, max_num_batched_tokens=16) as llm:
        logits = llm.logits(prompt, images)
        assert np.abs(logits - golden["logits"]).max() <= tolerance * np.ptp(golden["logits"])
        without = llm.logits(prompt)
        assert np.abs(without - golden["logits"]).max() > 0.1 * np.ptp(golden["logits"])


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 5, "max_num_seqs": 2},
        {"threads": 3, "enable_prefix_caching": False, "image_cache_memory": 0},
        {"page_size": 64, "num_speculative_tokens": 4},
    ],
    ids=["small chunks", "no caches", "large pages and drafts"],
)
def test_same_tokens_with_any_options(
    prompt: list[int], images: list[PromptImage], wanted: tuple[int, ...], options: dict[str, Any]
) -> None:
    with LLM(FOLDER, **{**OPTIONS, **options}) as llm:
        others = [prompt, prompt[:20], [*prompt, 3, 4]]
        outputs = llm.generate([prompt, *others], GREEDY, [images, (), (), images])
        assert outputs[0].token_ids == wanted
        assert llm.generate(prompt, GREEDY, [images])[0].token_ids == wanted
        assert outputs[1].token_ids != wanted


def test_samples_and_beams_of_a_prompt_with_images(llm: LLM, prompt: list[int], images: list[PromptImage]) -> None:
    sampled = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1, seed=5, n=3)
    (output,) = llm.generate(prompt, sampled, [images])
    for index, sample in enumerate(output.outputs):
        alone = msgspec.structs.replace(sampled, seed=5 + index, n=1)
        assert sample.token_ids == llm.generate(prompt, alone, [images])[0].token_ids
    beams = SamplingParams(max_tokens=4, ignore_eos=True, beam_width=3)
    with_images, without = llm.generate([prompt, prompt], beams, [images, ()])
    assert with_images.token_ids != without.token_ids


def test_preemption_leaves_the_tokens_as_they_are(
    prompt: list[int], images: list[PromptImage], wanted: tuple[int, ...]
) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    options = {**OPTIONS, "kv_cache_memory": 96 << 10, "max_model_len": 150, "enable_prefix_caching": False}
    with LLM(FOLDER, **options) as llm:
        alone = llm.generate(prompt, params, [images])[0].token_ids
        assert alone[:8] == wanted
        outputs = llm.generate([prompt] * 4, params, [images] * 4)
        assert llm.engine.stats().preemptions
        assert {output.token_ids for output in outputs} == {alone}


def test_a_prompt_waits_for_its_images_stage_by_stage(
    prompt: list[int], images: list[PromptImage], wanted: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without time for images, a step computes one stage; only computed tokens are counted."""
    monkeypatch.setattr(planning, "seconds_beside", lambda load, seconds_left, cost: 0.0)
    observer = StepCounter()
    with LLM(FOLDER, **OPTIONS) as llm:
        llm.engine.set_observer(observer)
        with_images, text = llm.generate([prompt, prompt[:15]], GREEDY, [images, ()])
        assert with_images.token_ids == wanted
        assert text.token_ids == llm.generate(prompt[:15], GREEDY)[0].token_ids
        assert observer.prefill_tokens >= len(prompt)
        assert observer.prefill_tokens <= len(prompt) + 2 * 15


def test_logits_leave_no_pages_for_prompts_with_other_images(prompt: list[int], images: list[PromptImage]) -> None:
    with LLM(FOLDER, **OPTIONS) as llm:
        llm.logits(prompt, images)
        without, with_images = llm.generate([prompt, prompt], GREEDY, [(), images])
        assert (without.usage.cached_tokens, with_images.usage.cached_tokens) == (0, 64)


# What is shared


def test_only_prompts_with_the_same_images_share_pages(prompt: list[int], images: list[PromptImage]) -> None:
    first, second = images
    swapped = [replace(first, pixels=second.pixels, digest=second.digest), second]
    last = [first, replace(second, pixels=first.pixels, digest=first.digest)]
    with LLM(FOLDER, **OPTIONS) as llm:
        llm.generate(prompt, GREEDY, [images])
        outputs = [llm.generate(prompt, GREEDY, [each])[0] for each in (images, swapped, last, ())]
    whole = (len(prompt) - 1) // 16 * 16
    cached = [output.usage.cached_tokens for output in outputs]
    assert cached == [whole, first.position // 16 * 16, second.position // 16 * 16, first.position // 16 * 16]
    assert len({output.token_ids for output in outputs}) == 4


def test_an_image_is_computed_once(prompt: list[int], images: list[PromptImage]) -> None:
    with LLM(FOLDER, **OPTIONS, enable_prefix_caching=False) as llm:
        llm.generate([prompt] * 2, GREEDY, [images] * 2)
        shifted = [replace(each, position=each.position + 1) for each in images]
        llm.generate([7, *prompt], GREEDY, [shifted])
        stats = llm.engine.stats()
        assert (stats.encoded_images, stats.image_cache_hits) == (2, 4)


def test_images_reach_an_engine_process(images: list[PromptImage]) -> None:
    placed = engine_input.placed_images(images)
    spec = RequestSpec(1, (1, 2), max_tokens=3, sampling=SamplingSpec(GREEDY, 0, frozenset()), images=placed)
    message = TO_ENGINE.decode(msgspec.msgpack.encode(AddRequests((as_read(spec),))))
    assert isinstance(message, AddRequests)
    assert message.requests[0].images == placed
    pixels = np.frombuffer(placed[0].pixels, np.uint8).reshape(placed[0].height, placed[0].width, 3)
    assert (pixels == images[0].pixels).all()


# Refusals


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"position": 14}, "the prompt must have the token 159 from position 14 to 22"),
        ({"position": -1}, "position must be from 0 to 69"),
        ({"position": 70}, "position must be from 0 to 69"),
        ({"tokens": 8}, "tokens must be 9, not 8"),
        ({"tokens": 0}, "tokens must be 9, not 0"),
        ({"pixels": np.zeros((64, 63, 3), np.uint8)}, r"pixels must be uint8 \[64, 64, 3\], not uint8 \[64, 63, 3\]"),
        ({"pixels": np.zeros((64, 64), np.uint8)}, r"not uint8 \[64, 64\]"),
        ({"pixels": np.zeros((64, 64, 3), np.float32)}, r"not float32 \[64, 64, 3\]"),
    ],
)
def test_images_that_do_not_fit_are_refused(
    llm: LLM, prompt: list[int], images: list[PromptImage], change: dict[str, Any], fault: str
) -> None:
    with pytest.raises(InvalidRequest, match=rf"images\[0\]: .*{fault}"):
        llm.generate(prompt, GREEDY, [[replace(images[0], **change), images[1]]])


def test_images_in_another_order_are_refused(llm: LLM, prompt: list[int], images: list[PromptImage]) -> None:
    with pytest.raises(InvalidRequest, match=r"images\[1\]: position must be from"):
        llm.generate(prompt, GREEDY, [images[::-1]])
    with pytest.raises(InvalidRequest, match=r"images\[1\]: position must be from"):
        llm.generate(prompt, GREEDY, [[images[0], images[0]]])


def test_lists_of_images_for_other_prompts_are_refused(llm: LLM, prompt: list[int], images: list[PromptImage]) -> None:
    with pytest.raises(InvalidRequest, match="1 lists of images for 2 prompts; give one for each prompt"):
        llm.generate([prompt, prompt], GREEDY, [images])


def test_a_model_without_a_tower_takes_no_images(images: list[PromptImage]) -> None:
    with LLM(kv_cache_memory=8 << 20) as llm, pytest.raises(InvalidRequest, match="this model takes no images"):
        llm.generate([[1] * 99], GREEDY, [images])
