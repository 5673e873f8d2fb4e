"""Vision towers: their rows compared with transformers', the refusals of the readers, and the memory."""

from __future__ import annotations

import json
import math
import re
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from quire.kernels import supported_levels
from quire.kernels.pool import Pool
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import CorruptCheckpoint, MissingTensor, ModelError, UnsupportedModel, WrongTensor
from quire.runtime.model import read_spec
from quire.runtime.model.runner import decide_capacity
from quire.runtime.model.runner.image_runner import ImageRunner
from quire.runtime.model.vision import dynamic, pack_tower, plan_tower_memory, read_processor, read_vision
from quire.runtime.model.vision.spec import SQUARES_WRITTEN, nearest_positions
from quire.scheduler import PlacedImage, ScheduledSequence

from tests.support.golden_images import FAMILIES, golden_images

LEVELS = supported_levels()
Floats = npt.NDArray[np.float32]


def spec_of(folder: Path) -> Any:
    spec = read_vision(folder)
    assert spec is not None
    return spec


def runner_of(
    folder: Path, weights: Any = "f32", threads: int = 1, isa: str = LEVELS[-1], cache: int = 0
) -> ImageRunner:
    return ImageRunner(pack_tower(folder, spec_of(folder), weights), cache, Pool(threads), isa)


def placed(pixels: npt.NDArray[np.uint8], position: int = 0, name: bytes = b"") -> PlacedImage:
    """Return an image for Idefics 3 without a place in a prompt."""
    return PlacedImage(position, 9, name, *pixels.shape[:2], pixels.tobytes())


def distance(rows: Floats, golden: Floats) -> float:
    return float(np.abs(rows - golden).max() / np.ptp(golden))


def cosines(rows: Floats, golden: Floats) -> Floats:
    product: Floats = (rows * golden).sum(axis=1)
    return product / np.linalg.norm(rows, axis=1) / np.linalg.norm(golden, axis=1)


def images_of(family: str) -> tuple[Path, dict[str, list[Any]]]:
    golden = golden_images(family)
    return golden.folder, {"pixels": [image.pixels for image in golden.images], "rows": golden.rows}


@pytest.fixture(params=FAMILIES)
def golden(request: pytest.FixtureRequest) -> tuple[Path, Any]:
    return images_of(request.param)


@pytest.fixture
def square() -> tuple[Path, Any]:
    """Return the images of a family that has one size."""
    return images_of("idefics3")


# Rows


@pytest.mark.parametrize("isa", LEVELS)
def test_f32_rows_are_within_2e_4(golden: tuple[Path, Any], isa: str) -> None:
    folder, data = golden
    runner = runner_of(folder, isa=isa)
    for pixels, want in zip(data["pixels"], data["rows"], strict=True):
        assert distance(runner.encode(placed(pixels)), want) < 2e-4


@pytest.mark.parametrize("isa", LEVELS)
@pytest.mark.parametrize("weights", ["bf16", "q8", "q4", "auto"])
def test_smaller_weights_stay_close(golden: tuple[Path, Any], weights: str, isa: str) -> None:
    folder, data = golden
    runner = runner_of(folder, weights, isa=isa)
    for pixels, want in zip(data["pixels"], data["rows"], strict=True):
        assert cosines(runner.encode(placed(pixels)), want).min() >= 0.999


@pytest.mark.parametrize("weights", ["f32", "q8"])
def test_same_bits_at_every_level_with_any_threads_and_after_any_image(golden: tuple[Path, Any], weights: str) -> None:
    folder, data = golden
    first, second = map(placed, data["pixels"])
    rows = set()
    for isa in LEVELS:
        for threads in (1, 3):
            runner = runner_of(folder, weights, threads, isa)
            rows.add(runner.encode(second).tobytes())
            runner.encode(first)
            rows.add(runner.encode(second).tobytes())
    assert len(rows) == 1


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_mergers_take_a_large_image_in_several_pieces(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of the goldens fit one piece; the last of these has fewer squares than the others."""
    folder, data = images_of(family)
    image = placed(data["pixels"][0])
    want = runner_of(folder).encode(image)
    monkeypatch.setattr(dynamic, "MAX_SQUARES", 4)
    assert len(want) % 4
    assert runner_of(folder).encode(image).tobytes() == want.tobytes()


def test_numbers_that_are_not_finite_stay_in_their_image(golden: tuple[Path, Any]) -> None:
    """The padding of the input is zero, whatever the arena held before."""
    folder, data = golden
    runner = runner_of(folder)
    for program in (runner._patches, *runner._squares):
        for memory in program._inputs:
            memory.fill(np.nan)
    assert distance(runner.encode(placed(data["pixels"][0])), data["rows"][0]) < 2e-4


def test_positions_are_rounded_as_torch_rounds_them() -> None:
    """Known answers of torch 2.13: the patches whose position is not their own."""
    others = {
        grid: {at: position for at, position in enumerate(nearest_positions(grid).tolist()) if at != position}
        for grid in (1, 9, 16, 19, 25, 26, 27, 32, 64)
    }
    assert {grid: positions for grid, positions in others.items() if positions} == {
        19: {12: 11},
        25: {5: 4, 9: 8, 10: 9, 11: 10, 12: 11, 13: 12, 15: 14, 18: 17, 20: 19, 23: 22},
    }


# The rows of a step


def sequence(first: int, count: int, *images: PlacedImage, salt: bytes = b"") -> ScheduledSequence:
    return ScheduledSequence(0, (), first, (0,) * count, 0, None, (), 0, (), images, salt)


def test_a_step_gets_the_rows_of_its_tokens(square: tuple[Path, Any]) -> None:
    """The first sequence ends within its image, and the second one begins within another."""
    folder, data = square
    runner = runner_of(folder)
    a, b = placed(data["pixels"][0], 3, b"a"), placed(data["pixels"][1], 10, b"b")
    found = runner.embeddings([sequence(0, 8, a), sequence(0, 1), sequence(12, 9, b)])
    assert found is not None
    indices, given = found
    assert indices.tolist() == [-1, -1, -1, 0, 1, 2, 3, 4, -1, 5, 6, 7, 8, 9, 10, 11, -1, -1]
    assert given.tobytes() == np.concatenate([runner.encode(a)[:5], runner.encode(b)[2:]]).tobytes()
    assert runner.embeddings([sequence(0, 3), sequence(0, 1)]) is None


def test_a_row_of_a_whole_image_sees_all_of_it(goldens: Path) -> None:
    """The second sequence begins within its image, after cached pages."""
    a, b = placed(np.zeros((64, 64, 3), np.uint8), 2), placed(np.zeros((64, 64, 3), np.uint8), 10)
    sequences = [sequence(0, 12, a), sequence(5, 1), sequence(16, 12, b)]
    seen = runner_of(goldens / "gemma3_images").last_seen(sequences)
    assert seen is not None
    assert seen.tolist() == [0, 1, *[10] * 9, 11, 5, 18, 18, 18, *range(19, 28)]
    assert runner_of(goldens / "gemma3_images").last_seen([sequence(0, 12)]) is None
    assert runner_of(goldens / "idefics3").last_seen(sequences) is None


def test_rows_are_kept_per_salt_and_digest_within_the_bound(square: tuple[Path, Any]) -> None:
    folder, data = square
    spec = spec_of(folder)
    runner = runner_of(folder, cache=2 * spec.num_tokens * spec.out_size * 4)
    images = {name: placed(data["pixels"][0], 0, name.encode()) for name in "abcd"}

    def uses(*names: str, salt: bytes = b"") -> tuple[int, int]:
        before = runner.num_encoded, runner.num_cache_hits
        for name in names:
            while runner.prepare([sequence(0, 9, images[name], salt=salt)], math.inf):
                pass
            assert runner.embeddings([sequence(0, 9, images[name], salt=salt)]) is not None
        return runner.num_encoded - before[0], runner.num_cache_hits - before[1]

    assert uses("a", "a", "b", "a") == (2, 2)
    assert uses("c", "a") == (1, 1), "b was not used for the longest time"
    assert uses("b") == (1, 0)
    assert uses("b", "d", salt=b"another tenant") == (2, 0), "each is computed once"


def test_a_cache_without_room_holds_the_last_image(golden: tuple[Path, Any]) -> None:
    folder, data = golden
    runner = runner_of(folder, cache=0)
    a, b = placed(data["pixels"][0], 0, b"a"), placed(data["pixels"][1], 0, b"b")
    for image in (a, a, b, b, a):
        while runner.prepare([sequence(0, 9, image)], math.inf):
            pass
    assert (runner.num_encoded, runner.num_cache_hits) == (3, 2)


def test_an_image_is_computed_in_parts(golden: tuple[Path, Any]) -> None:
    """A call that has no time computes one part. The sequence joins the step that follows the last part."""
    folder, data = golden
    runner = runner_of(folder, cache=1 << 20)
    image = sequence(0, 9, placed(data["pixels"][0], 0, b"a"))
    text = sequence(0, 9)._replace(request_id=7)
    waits = [runner.prepare([text, image], 0.0)]
    while waits[-1]:
        waits.append(runner.prepare([text, image], 0.0))
    assert len(waits) > 8 * spec_of(folder).body.num_layers, "one op at most"
    assert set(waits[:-1]) == {frozenset({0})}
    assert (runner.num_encoded, runner.num_cache_hits) == (1, 0)
    assert not runner.prepare([image], 0.0)
    assert (runner.num_encoded, runner.num_cache_hits) == (1, 1)
    found = runner.embeddings([image])
    assert found is not None
    assert found[1].tobytes() == runner.encode(placed(data["pixels"][0]))[:9].tobytes()


class WorkClock:
    """A clock that advances by the cost of kernels' items: seconds of a program's op."""

    def __init__(self) -> None:
        self.now = 0.0
        self.parts: list[float] = []  # seconds of each

    def __call__(self) -> float:
        return self.now

    def watch(self, runner: ImageRunner) -> None:
        """Let all work of the runner advance this clock by a nanosecond per unit of its size."""
        pieces = runner._pieces

        def timed(given: Any) -> Any:
            for piece in pieces(given):
                yield replace(piece, do=self._timed(piece))

        runner._pieces = timed  # type: ignore[method-assign]

    def _timed(self, piece: Any) -> Callable[[int, int], None]:
        def do(first: int, end: int) -> None:
            piece.do(first, end)
            self.parts.append((end - first) * piece.size * 1e-9)
            self.now += self.parts[-1]

        return do


@pytest.mark.parametrize("share", [0.3, 0.05, 0.01])
def test_a_step_computes_the_part_of_an_image_that_fits(golden: tuple[Path, Any], share: float) -> None:
    """Virtual time: a step takes no longer than it may, or one least part, and steps are well filled."""
    folder, data = golden
    image = sequence(0, 1, placed(data["pixels"][0], 0, b"a"))
    clock = WorkClock()
    runner = ImageRunner(pack_tower(folder, spec_of(folder), "f32"), 1 << 20, Pool(2), LEVELS[-1], clock)
    clock.watch(runner)
    want = runner.encode(placed(data["pixels"][0])).tobytes()
    whole_s = clock.now
    clock.parts = []
    durations = []
    while True:
        start = clock.now
        clock.parts = []
        if not runner.prepare([image], share * whole_s):
            break
        durations.append((clock.now - start, len(clock.parts)))
    assert all(duration <= share * whole_s * 1.001 or parts == 1 for duration, parts in durations)
    assert sum(duration for duration, _ in durations) == pytest.approx(whole_s)
    found = runner.embeddings([sequence(0, image.images[0].tokens, image.images[0])])
    assert found is not None
    assert found[1].tobytes() == want[: found[1].nbytes]


def test_images_that_take_turns_are_done(square: tuple[Path, Any]) -> None:
    """A call for another image continues the one that is begun."""
    folder, data = square
    runner = runner_of(folder, cache=1 << 20)
    a, b = (sequence(0, 9, placed(pixels, 0, bytes([n]))) for n, pixels in enumerate(data["pixels"]))
    turns = []
    while runner.num_encoded < 2:
        turns.append([bool(runner.prepare([each], 0.0)) for each in (a, b)])
    assert len(turns) > 8
    assert turns[0] == [True, True]
    assert not runner.prepare([a], 0.0)
    assert not runner.prepare([b], 0.0)
    both = runner.embeddings([a, b])
    assert both is not None
    alone = [runner.encode(placed(pixels))[:9] for pixels in data["pixels"]]
    assert both[1].tobytes() == np.concatenate(alone).tobytes()


def test_an_image_that_is_begun_is_not_taken_for_one_that_is_computed_meanwhile(square: tuple[Path, Any]) -> None:
    """Logits of a prompt are computed with all of its images at once."""
    folder, data = square
    runner = runner_of(folder, cache=1 << 20)
    a, b = (sequence(0, 9, placed(pixels, 0, bytes([n]))) for n, pixels in enumerate(data["pixels"]))
    assert runner.prepare([a], 0.0)
    assert runner.embeddings([b]) is not None
    while runner.prepare([a], math.inf):
        pass
    found = runner.embeddings([a])
    assert found is not None
    assert found[1].tobytes() == runner.encode(placed(data["pixels"][0]))[:9].tobytes()


# Reading


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        ({"patch_size": 0}, "vision_config.patch_size is 0; it must be an integer from 1 to 64"),
        ({"patch_size": 65}, "vision_config.patch_size is 65"),
        ({"patch_size": 8}, "such that the 8 patches of a side are a multiple of 3"),
        ({"image_size": [64, 64]}, "vision_config.image_size is [64, 64]"),
        ({"image_size": 4096, "patch_size": 7}, "large enough for at most 16384 patches"),
        ({"image_size": 1 << 40}, "vision_config.image_size"),
        ({"num_channels": 1}, "vision_config.num_channels is 1; it must be 3"),
        ({"hidden_act": "swish"}, "vision_config.hidden_act"),
        ({"layer_norm_eps": 0}, "vision_config.layer_norm_eps"),
        ({"num_hidden_layers": 0}, "vision_config.num_hidden_layers"),
        ({"num_attention_heads": 5}, "vision_config.hidden_size is 48; it must be a multiple"),
        ({"hidden_size": -1}, "vision_config.hidden_size"),
    ],
)
def test_a_tower_that_cannot_be_run_is_refused(
    model_folder: Callable[..., Path], edit: dict[str, Any], fault: str
) -> None:
    folder = model_folder("idefics3", lambda config: config["vision_config"].update(edit))
    with pytest.raises(UnsupportedModel) as error:
        read_vision(folder)
    assert fault in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"), [("scale_factor", 0), ("scale_factor", "2"), ("image_token_id", -1), ("vision_config", 3)]
)
def test_a_bad_key_beside_the_tower_is_refused(model_folder: Callable[..., Path], key: str, value: Any) -> None:
    folder = model_folder("idefics3", lambda config: config.update({key: value}))
    with pytest.raises(UnsupportedModel, match=f"config.json: {key} is"):
        read_vision(folder)


def test_a_text_model_that_is_not_llama_is_refused(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("idefics3", lambda config: config["text_config"].update(model_type="mistral"))
    with pytest.raises(UnsupportedModel, match=r'text_config.model_type is "mistral"; it must be "llama" or absent'):
        read_spec(folder)


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        ({"mm_tokens_per_image": 8}, "mm_tokens_per_image is 8; it must be the square of a number that divides the 9"),
        ({"mm_tokens_per_image": 16}, "mm_tokens_per_image is 16; it must be the square of a number"),
        ({"mm_tokens_per_image": 0}, "mm_tokens_per_image is 0; it must be an integer"),
        ({"image_token_index": -1}, "image_token_index is -1"),
        ({"vision_config": {"patch_size": 200, "image_size": 100}}, "vision_config.patch_size is 200"),
        ({"text_config": {"sliding_window": 8}}, "text_config.sliding_window is 8; it must be at least 9: the tokens"),
    ],
)
def test_a_tower_of_gemma3_that_cannot_be_run_is_refused(
    model_folder: Callable[..., Path], edit: dict[str, Any], fault: str
) -> None:
    folder = model_folder("gemma3_images", lambda config: config.update(edit))
    with pytest.raises(UnsupportedModel) as error:
        read_vision(folder)
    assert fault in str(error.value)


def test_a_gemma3_without_a_tower_takes_text_only(model_folder: Callable[..., Path]) -> None:
    assert read_vision(model_folder("gemma3_images", lambda config: config.pop("vision_config"))) is None


@pytest.mark.parametrize(
    ("tower", "projector"),
    [
        ("vision_tower.vision_model.", "multi_modal_projector."),
        ("model.vision_tower.vision_model.", "model.multi_modal_projector."),
        ("vision_tower.", "multi_modal_projector."),
        ("model.vision_tower.", "model.multi_modal_projector."),
    ],
)
def test_tensors_of_gemma3_have_the_names_of_any_version(
    model_folder: Callable[..., Path], tower: str, projector: str
) -> None:
    """transformers writes all of them, depending on its version; 5.24 the third."""
    folder = model_folder("gemma3_images")
    image = placed(np.full((64, 64, 3), 99, np.uint8))
    rows = runner_of(folder, "q8").encode(image)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    header_end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:header_end])
    known = re.compile(r"(?:model\.)?(?:(vision_tower)\.vision_model|multi_modal_projector)\.")
    renamed = {known.sub(lambda found: tower if found[1] else projector, name): header[name] for name in header}
    assert sum(name.startswith((tower, projector)) for name in renamed) > 30
    data = json.dumps(renamed).encode()
    file.write_bytes(len(data).to_bytes(8, "little") + data + content[header_end:])
    assert (runner_of(folder, "q8").encode(image) == rows).all()


def test_tiles_of_another_size_than_the_tower_takes_are_refused(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("idefics3")
    file = folder / "preprocessor_config.json"
    file.write_text('{"max_image_size": {"longest_edge": 64}}')
    assert spec_of(folder).image_size == 64
    file.write_text('{"max_image_size": {"longest_edge": 32}}')
    with pytest.raises(
        UnsupportedModel, match=r"max_image_size.longest_edge is 32; it must be 64, which is vision_con"
    ):
        read_vision(folder)


@pytest.mark.parametrize(
    ("content", "error", "fault"),
    [
        ("{", CorruptCheckpoint, "cannot be read as JSON"),
        ("[]", CorruptCheckpoint, "holds a JSON list"),
        ('{"image_mean": [0.5, 0.5]}', UnsupportedModel, "preprocessor_config.json: image_mean"),
        ('{"image_mean": [0.5, NaN, 0.5]}', UnsupportedModel, "preprocessor_config.json: image_mean"),
        ('{"image_std": [0.5, 0, 0.5]}', UnsupportedModel, r"preprocessor_config.json: image_std\[1\] is 0"),
        ('{"rescale_factor": "1"}', UnsupportedModel, "preprocessor_config.json: rescale_factor"),
        ('{"do_rescale": 1}', UnsupportedModel, "preprocessor_config.json: do_rescale"),
    ],
)
def test_a_bad_processor_file_is_refused(
    model_folder: Callable[..., Path], content: str, error: type[ModelError], fault: str
) -> None:
    folder = model_folder("idefics3")
    (folder / "preprocessor_config.json").write_text(content)
    with pytest.raises(error, match=fault):
        read_vision(folder)


def test_normalization_is_read_from_any_of_the_processor_files(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("idefics3")
    spec = spec_of(folder)
    assert (spec.mean, spec.std, spec.rescale) == ((0.4, 0.5, 0.6), (0.3, 0.25, 0.2), 1 / 255)
    old = folder / "preprocessor_config.json"
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": json.loads(old.read_text())}))
    old.unlink()
    assert spec_of(folder) == spec
    (folder / "processor_config.json").write_text('{"image_processor": {"do_rescale": false, "do_normalize": false}}')
    assert spec_of(folder) == replace(spec, mean=(0.0,) * 3, std=(1.0,) * 3, rescale=1.0)
    (folder / "processor_config.json").unlink()
    assert spec_of(folder) == replace(spec, mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.mark.parametrize(("nested", "mean"), [({"image_mean": [0.1] * 3}, 0.1), ({}, 0.9), (None, 0.9), (..., 0.9)])
def test_the_nested_object_has_precedence_over_the_processor_file(
    model_folder: Callable[..., Path], nested: Any, mean: float
) -> None:
    folder = model_folder("idefics3")
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.9, 0.9, 0.9], "size": {"longest_edge": 64}}')
    processor = {"image_seq_len": 9} if nested is ... else {"image_processor": nested}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    assert spec_of(folder).mean == (mean,) * 3
    assert read_processor(folder).numbers("image_mean", 3) == (mean,) * 3


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("hidden_size", 96, WrongTensor),
        ("patch_size", 10, WrongTensor),
        ("num_hidden_layers", 3, MissingTensor),
        ("intermediate_size", 73, WrongTensor),
    ],
)
def test_a_config_that_does_not_fit_the_tensors_is_refused(
    model_folder: Callable[..., Path], key: str, value: int, error: type[ModelError]
) -> None:
    folder = model_folder("idefics3", lambda config: config["vision_config"].update({key: value}))
    with pytest.raises(error):
        pack_tower(folder, spec_of(folder), "f32")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_models_without_a_supported_tower_have_none(goldens: Path, family: str) -> None:
    assert read_vision(goldens / family) is None


# Memory


@pytest.mark.parametrize("weights", ["bf16", "q8"])
def test_the_plan_is_what_packing_and_running_take(golden: tuple[Path, Any], weights: Any) -> None:
    folder, _ = golden
    spec = spec_of(folder)
    tower = pack_tower(folder, spec, weights)
    plan = plan_tower_memory(spec, weights, 1 << 20, workers=2)
    programs = tower.programs
    assert plan.cache_bytes == 1 << 20
    assert plan.buffers_bytes > programs.patches.arena_bytes + sum(each.arena_bytes for each in programs.squares)
    assert plan_tower_memory(spec, weights, 0, workers=2).cache_bytes == spec.num_tokens * spec.out_size * 4
    config = EngineConfig(model=str(folder), weights=weights, image_cache_memory=1 << 20, threads=2)
    memory = decide_capacity(config, read_spec(folder)).memory
    assert memory.images == plan
    assert memory.total_bytes - replace(memory, images=None).total_bytes == plan.total_bytes
    assert f"vision tower {plan.total_bytes:>23,} B" in memory.describe()


def test_making_the_input_takes_the_planned_memory(golden: tuple[Path, Any]) -> None:
    """The patches, rotations and positions of as many squares as are made at a time."""
    folder, reference = golden
    tower = pack_tower(folder, spec_of(folder), "f32")
    spec: Any = tower.spec
    given = tower.input(max(reference["pixels"], key=lambda pixels: pixels.size))
    squares = min(SQUARES_WRITTEN, len(given.places))
    given.rows(0, squares)  # warm-up of memory that is made once
    tracemalloc.start()
    try:
        rows = given.rows(0, squares)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    of_image = 0 if rows.rotary is None else 4 * spec.num_patches * spec.body.head_dim
    planned = (spec.input_bytes - of_image) * squares / SQUARES_WRITTEN
    assert 0.7 * planned < peak < planned + 4096
