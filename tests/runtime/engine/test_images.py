"""Images in prompts, through a whole engine: the logits, the same bits in any batch composition, and refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from quire import LLM, SamplingParams
from quire.runtime.common.errors import InvalidRequest
from quire.runtime.common.prompts import PromptImage
from quire.runtime.engine import StepStats
from quire.runtime.engine import input as engine_input
from quire.runtime.engine.facade import SilentObserver
from quire.runtime.model import BUNDLED_MODEL, kv_layout, read_spec
from quire.runtime.model.runner import SamplingSpec
from quire.runtime.model.states import lay_out_states
from quire.runtime.model.vision import packed
from quire.runtime.workers.engine_link import TO_ENGINE, AddRequests, as_read
from quire.scheduler import RequestSpec, planning

from tests.support.families import GOLDENS
from tests.support.golden_images import FAMILIES, GoldenImages, golden_images

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
OPTIONS: dict[str, Any] = {"weights": "f32", "kv_cache_dtype": "f32", "kv_cache_memory": 4 << 20, "page_size": 16}


@pytest.fixture(scope="module", params=[name for name in FAMILIES if name != "gemma3_images"])  # test_whole_images.py
def golden(request: pytest.FixtureRequest) -> GoldenImages:
    return golden_images(request.param)


@pytest.fixture(scope="module")
def prompt(golden: GoldenImages) -> list[int]:
    return golden.prompt


@pytest.fixture(scope="module")
def images(golden: GoldenImages) -> list[PromptImage]:
    return golden.images


class StepCounter(SilentObserver):
    """Counts the prefill tokens of all steps."""

    def __init__(self) -> None:
        self.prefill_tokens = 0

    def on_step(self, stats: StepStats) -> None:
        self.prefill_tokens += stats.prefill_tokens


@pytest.fixture(scope="module")
def llm(golden: GoldenImages) -> Iterator[LLM]:
    with LLM(golden.folder, **OPTIONS) as llm:
        yield llm
        assert llm.engine.stats().pages_owned == 0


@pytest.fixture(scope="module")
def wanted(llm: LLM, prompt: list[int], images: list[PromptImage]) -> tuple[int, ...]:
    (output,) = llm.generate(prompt, GREEDY, [images])
    return output.token_ids


def has_states(golden: GoldenImages) -> bool:
    return lay_out_states(read_spec(golden.folder)).nbytes > 0


# Logits and bits


@pytest.mark.parametrize(("weights", "tolerance"), [("f32", 2e-4), ("bf16", 0.02), ("q8", 0.05)])
def test_logits_are_those_of_transformers(
    golden: GoldenImages, prompt: list[int], images: list[PromptImage], weights: Any, tolerance: float
) -> None:
    with LLM(golden.folder, **{**OPTIONS, "weights": weights}, max_num_seqs=7, max_num_batched_tokens=16) as llm:
        # The recurrences of a model with random weights amplify rounding.
        bounds = (0.1, 0.997) if weights == "q8" and has_states(golden) else (tolerance, 0.999)
        golden.check_logits(llm.logits(prompt, images), *bounds)
        without = llm.logits(prompt)
        assert np.abs(without - golden.logits).max() > 0.1 * np.ptp(golden.logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_in_q8_changes_no_row_of_logits_much(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text model is in f32: in q8, its own random weights change rows of text alone down to a cosine of 0.994."""
    monkeypatch.setitem(packed.TOWER_DTYPES, "f32", "q8")
    monkeypatch.setitem(packed.KEYS_VALUES, "f32", "int8")
    golden = golden_images(family)
    with LLM(golden.folder, **OPTIONS) as llm:
        logits = llm.logits(golden.prompt, golden.images)
    cosines = (logits * golden.logits).sum(axis=1) / np.linalg.norm(logits, axis=1)
    cosines /= np.linalg.norm(golden.logits, axis=1)
    least = 0.998 if has_states(golden) else 0.999
    assert least <= cosines.min() < 0.99999


def test_what_follows_images_has_the_logits_of_the_whole_prompt(
    llm: LLM, prompt: list[int], images: list[PromptImage], wanted: tuple[int, ...]
) -> None:
    """Tokens that are decoded one by one have the places that they have in one prompt."""
    logits = llm.logits([*prompt, *wanted[:-1]], images)
    assert logits[len(prompt) - 1 :].argmax(axis=1).tolist() == list(wanted)


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
    golden: GoldenImages, prompt: list[int], images: list[PromptImage], wanted: tuple[int, ...], options: dict[str, Any]
) -> None:
    with LLM(golden.folder, **{**OPTIONS, **options}) as llm:
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
    golden: GoldenImages, prompt: list[int], images: list[PromptImage], wanted: tuple[int, ...]
) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    pages = 2 * -(-len(prompt) // 16) + 2  # pages of two prompts, which run together
    spec = read_spec(golden.folder)
    memory = pages * kv_layout(spec, "f32", 16).page_bytes + 4 * lay_out_states(spec).nbytes
    options = {**OPTIONS, "kv_cache_memory": memory, "max_model_len": 150, "enable_prefix_caching": False}
    with LLM(golden.folder, **options, max_num_seqs=4) as llm:
        alone = llm.generate(prompt, params, [images])[0].token_ids
        assert alone[:8] == wanted
        outputs = llm.generate([prompt] * 4, params, [images] * 4)
        assert llm.engine.stats().preemptions
        assert {output.token_ids for output in outputs} == {alone}


def test_a_prompt_waits_for_its_images_stage_by_stage(
    golden: GoldenImages,
    prompt: list[int],
    images: list[PromptImage],
    wanted: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that has no time for images computes one stage; only computed tokens are counted."""
    monkeypatch.setattr(planning, "seconds_beside", lambda load, seconds_left, cost: 0.0)
    observer = StepCounter()
    with LLM(golden.folder, **OPTIONS) as llm:
        llm.engine.set_observer(observer)
        with_images, text = llm.generate([prompt, prompt[:15]], GREEDY, [images, ()])
        assert with_images.token_ids == wanted
        assert text.token_ids == llm.generate(prompt[:15], GREEDY)[0].token_ids
        assert observer.prefill_tokens >= len(prompt)
        assert observer.prefill_tokens <= len(prompt) + 2 * 15


def test_logits_leave_no_pages_for_prompts_with_other_images(
    golden: GoldenImages, prompt: list[int], images: list[PromptImage]
) -> None:
    with LLM(golden.folder, **OPTIONS) as llm:
        llm.logits(prompt, images)
        without, with_images = llm.generate([prompt, prompt], GREEDY, [(), images])
        computed = 64 if has_states(golden) else len(prompt) - 1  # a state is kept where a step ends
        assert (without.usage.cached_tokens, with_images.usage.cached_tokens) == (0, computed // 16 * 16)


# Shared state


def test_only_prompts_with_the_same_images_share_pages(
    golden: GoldenImages, prompt: list[int], images: list[PromptImage]
) -> None:
    first, second = images
    swapped = [replace(first, pixels=second.pixels, digest=second.digest), second]
    last = [first, replace(second, pixels=first.pixels, digest=first.digest)]
    with LLM(golden.folder, **OPTIONS) as llm:
        llm.generate(prompt, GREEDY, [images])
        params = msgspec.structs.replace(GREEDY, logprobs=0)
        outputs = [llm.generate(prompt, params, [each])[0] for each in (images, swapped, last, ())]
    equal = [len(prompt) - 1, first.position, second.position, first.position]  # tokens before another image
    if has_states(golden):  # a state is kept at the end of a prompt
        equal[1:] = [0, 0, 0]
    assert [output.usage.cached_tokens for output in outputs] == [tokens // 16 * 16 for tokens in equal]
    assert len({tuple(token.logprob for token in output.logprobs or ()) for output in outputs}) == 4


def test_an_image_is_computed_once(golden: GoldenImages, prompt: list[int], images: list[PromptImage]) -> None:
    with LLM(golden.folder, **OPTIONS, enable_prefix_caching=False) as llm:
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
        ({"position": 14}, "the prompt must have the token 159 from position 14 to {end}"),
        ({"position": -1}, "position must be from 0 to {last}"),
        ({"position": 1000}, "position must be from 0 to {last}"),
        ({"tokens": 8}, "tokens must be {tokens}, not 8"),
        ({"tokens": 0}, "tokens must be {tokens}, not 0"),
        ({"pixels": np.zeros((64, 63, 3), np.uint8)}, r"pixels must be uint8 \[.*, 3\].*, not uint8 \[64, 63, 3\]"),
        ({"pixels": np.zeros((64, 64), np.uint8)}, r"not uint8 \[64, 64\]"),
        ({"pixels": np.zeros((64, 64, 3), np.float32)}, r"not float32 \[64, 64, 3\]"),
    ],
)
def test_images_that_do_not_fit_are_refused(
    llm: LLM, prompt: list[int], images: list[PromptImage], change: dict[str, Any], fault: str
) -> None:
    tokens = images[0].tokens
    fault = fault.format(tokens=tokens, end=13 + tokens, last=len(prompt) - tokens)
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


def test_a_folder_whose_text_part_alone_is_read_takes_no_images(tmp_path: Path) -> None:
    """The folder of a Gemma 4 with a tower and an image processor."""
    folder = shutil.copytree(GOLDENS / "gemma4_images", tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BUNDLED_MODEL / name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vision_config": {"model_type": "gemma4_vision"}}))
    (folder / "preprocessor_config.json").write_text('{"image_processor_type": "Gemma4ImageProcessor"}')
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,YWJj"}}
    with (
        LLM(folder, **OPTIONS) as llm,
        pytest.raises(InvalidRequest, match="messages: this model takes no images; send text parts only"),
    ):
        llm.chat([{"role": "user", "content": [{"type": "text", "text": "a"}, image]}], GREEDY)


# Images of any size


@pytest.mark.parametrize("shape", [(0, 8, 3), (8, 8, 4), (8, 12, 3), (8, 8 * 200, 3), (3, 8, 8)])
def test_sizes_that_the_tower_does_not_take_are_refused(shape: tuple[int, ...]) -> None:
    golden = golden_images("qwen2_5_vl")
    bad = replace(golden.images[0], pixels=np.zeros(shape, np.uint8))
    with LLM(golden.folder, **OPTIONS) as llm:
        allowed = r"\[height, width, 3\] in multiples of 8, of at most 114 tokens, not uint8"
        with pytest.raises(InvalidRequest, match=rf"images\[0\]: pixels must be uint8 {allowed}"):
            llm.generate(golden.prompt, GREEDY, [[bad, golden.images[1]]])


def test_an_image_is_as_large_as_the_tower_and_its_buffers_are_for_it() -> None:
    """The longest shape that a small tower takes has the same tokens with one whose buffers are larger."""
    folder = golden_images("qwen2_5_vl").folder
    pixels = np.random.default_rng(1).integers(0, 256, (8, 8 * 28, 3), np.uint8)
    image = PromptImage(1, 28, pixels, b"d" * 32)
    outputs = []
    for max_image_tokens, num_tokens in ((4, 29), (64, 114)):
        with LLM(folder, **OPTIONS, max_image_tokens=max_image_tokens) as llm:
            outputs.append(llm.generate([5, *[159] * 28, 6, 7], GREEDY, [[image]])[0].token_ids)
            info = llm.engine.core.info.images
            assert info is not None
            assert info.num_tokens == num_tokens
    assert outputs[0] == outputs[1]
