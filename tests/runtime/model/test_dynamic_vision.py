"""Towers of images of any size: the order of patches, allowed sizes, and refusals of the readers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from quire.runtime.common.errors import CorruptCheckpoint, MissingTensor, ModelError, UnsupportedModel, WrongTensor
from quire.runtime.engine.images import read_image_processor
from quire.runtime.model import read_spec
from quire.runtime.model.config_json import ConfigTable
from quire.runtime.model.vision import DynamicVisionSpec, VisionSpec, pack_tower, read_sizes, read_vision
from quire.runtime.model.vision.dynamic import ImageSizes

FAMILY = "qwen2_5_vl"


def spec_of(folder: Path, max_tokens: int = 4096) -> DynamicVisionSpec:
    spec = read_vision(folder, max_tokens)
    assert isinstance(spec, DynamicVisionSpec)
    return spec


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 2), (1, 7), (5, 1), (3, 5), (4, 6)])
def test_windows_hold_each_patch_once_and_rows_come_back_in_order(goldens: Path, rows: int, columns: int) -> None:
    """The pixels of a square encode its index, so the patches show their order."""
    spec = spec_of(goldens / FAMILY)
    spec = replace(spec, rescale=1.0, mean=(0.0,) * 3, std=(1.0,) * 3)
    pixels = np.repeat(np.repeat(np.arange(rows * columns).reshape(rows, columns), 8, 0), 8, 1)
    given = spec.input(np.repeat(pixels[:, :, None], 3, 2).astype(np.uint8))
    patches = given.rows(0, rows * columns).patches
    squares = patches[::4, 0].astype(int)
    assert (patches == np.repeat(squares, 4)[:, None]).all()
    assert (squares == given.places).all()
    windows, whole, _ = given.row_starts
    assert whole.tolist() == [0, rows * columns * 4]
    assert len(windows) - 1 <= spec.num_windows
    for first, end in zip(windows[:-1] // 4, windows[1:] // 4, strict=True):
        down, across = squares[first:end] // columns, squares[first:end] % columns
        assert len({(row // 2, column // 2) for row, column in zip(down, across, strict=True)}) == 1
        assert squares[first:end].tolist() == sorted(squares[first:end].tolist())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5_images", "idefics3", "gemma3_images"])
def test_squares_computed_in_parts_equal_the_whole_image(goldens: Path, family: str) -> None:
    spec = read_vision(goldens / family)
    assert spec is not None
    size = (spec.image_size,) * 2 if isinstance(spec, VisionSpec) else (5 * 8, 7 * 8)
    pixels = np.random.default_rng(3).integers(0, 256, (*size, 3), np.uint8)
    learned = np.random.default_rng(4).standard_normal((25, spec.body.hidden_size)).astype(np.float32)
    given = spec.input(pixels, learned) if family.startswith("qwen3") else spec.input(pixels)  # type: ignore[call-arg]
    whole = given.rows(0, len(given.places))
    assert len(whole.patches) == len(given.token_ids)
    parts = [given.rows(first, min(first + 2, len(given.places))) for first in range(0, len(given.places), 2)]
    for index, values in enumerate(whole):
        if values is not None:
            assert np.concatenate([part[index] for part in parts]).tobytes() == values.tobytes()


def test_heads_are_turned_by_row_and_column(goldens: Path) -> None:
    spec = spec_of(goldens / FAMILY)
    given = spec.input(np.zeros((24, 40, 3), np.uint8))
    rotary = given.rows(0, 15).rotary
    assert rotary is not None
    assert rotary.shape == (6 * 10, 16)
    # The last patch, of row 5 and column 9: angles are the position times 1, 0.1, 0.01 and 0.001.
    last = rotary.reshape(15, 4, 16)[given.places == 14][0, -1]
    angles = np.array([position * 10.0**-power for position in (5, 9) for power in range(4)])
    assert np.allclose(last, [*np.cos(angles), *np.sin(angles)], atol=1e-6)


@pytest.mark.parametrize("max_tokens", [1, 3, 50, 4096])
def test_the_tower_accepts_every_image_of_the_processor(
    goldens: Path, model_folder: Callable[..., Path], max_tokens: int
) -> None:
    folder = model_folder(FAMILY)
    most = spec_of(folder, max_tokens).num_tokens
    processor = read_image_processor(folder, max_tokens)
    for width, height in ((1, 1), (3, 600), (200, 1), (1000, 1000), (5, 7), (900, 300), (2000, 10), (64, 8)):
        assert 1 <= processor.process(Image.new("RGB", (width, height))).tokens <= most


def test_sizes_have_room_for_long_images() -> None:
    assert ImageSizes(14, 2, 56 * 56, 28 * 28 * 1280).max_tokens == 1280
    assert ImageSizes(14, 2, 1, 28 * 28).max_tokens == 18
    assert ImageSizes(14, 2, 28 * 28 * 100, 28 * 28 * 100).max_tokens == 101 + 142 + 10 + 2


def test_numbers_of_pixels_have_precedence_over_those_of_the_size() -> None:
    """Transformers does the same with a processor's file that has both."""
    size = {"size": {"shortest_edge": 100, "longest_edge": 2000}}
    sizes = read_sizes(ConfigTable(size), 4096)
    assert (sizes.min_pixels, sizes.max_pixels) == (100, 2000)
    sizes = read_sizes(ConfigTable({**size, "min_pixels": 300, "max_pixels": 9000}), 4096)
    assert (sizes.min_pixels, sizes.max_pixels) == (300, 9000)


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        ({"patch_size": 5}, "vision_config.patch_size is 5; it must be 4, the value in preprocessor_config.json"),
        ({"spatial_merge_size": 3}, "vision_config.spatial_merge_size is 3; it must be 2"),
        ({"window_size": 7}, "vision_config.window_size is 7; it must be at least the 8 pixels"),
        ({"window_size": 0}, "vision_config.window_size"),
        ({"in_channels": 1}, "vision_config.in_channels is 1; it must be 3"),
        ({"in_channels": None, "in_chans": 4}, "vision_config.in_chans is 4; it must be 3"),
        ({"hidden_act": "gelu"}, "vision_config.hidden_act"),
        ({"num_heads": 5}, "vision_config.hidden_size is 48; it must be a multiple of 4 num_heads"),
        ({"hidden_size": 1 << 15}, "vision_config.hidden_size"),
        ({"depth": 0}, "vision_config.depth"),
        ({"temporal_patch_size": 99}, "vision_config.temporal_patch_size"),
        ({"fullatt_block_indexes": [1.5]}, "vision_config.fullatt_block_indexes"),
        ({"fullatt_block_indexes": None}, "vision_config.fullatt_block_indexes"),
        ({"out_hidden_size": "x"}, "vision_config.out_hidden_size"),
        (
            {"out_hidden_size": 32},
            "vision_config.out_hidden_size is 32; it must be 64, the hidden_size of the text model",
        ),
    ],
)
def test_a_tower_that_cannot_be_run_is_refused(
    model_folder: Callable[..., Path], edit: dict[str, Any], fault: str
) -> None:
    folder = model_folder(FAMILY, lambda config: config["vision_config"].update(edit))
    with pytest.raises(UnsupportedModel) as error:
        read_vision(folder)
    assert fault in str(error.value)


@pytest.mark.parametrize(
    ("edit", "fault"),
    [
        ({"num_position_embeddings": 24}, "vision_config.num_position_embeddings is 24; it must be the square"),
        ({"deepstack_visual_indexes": [2, 0]}, "vision_config.deepstack_visual_indexes is [2, 0]; it must be a list"),
        ({"deepstack_visual_indexes": [0, 4]}, "a list of layers from 0 to 3 in ascending order"),
        ({"deepstack_visual_indexes": [1, 1]}, "deepstack_visual_indexes"),
        ({"deepstack_visual_indexes": 2}, "deepstack_visual_indexes"),
        (
            {"rope_parameters": {"rope_theta": 5e3}},
            "vision_config.rope_parameters.rope_theta is 5000.0; it must be 10000",
        ),
        ({"hidden_act": "silu"}, "vision_config.hidden_act"),
    ],
)
def test_a_tower_of_qwen3_that_cannot_be_run_is_refused(
    model_folder: Callable[..., Path], edit: dict[str, Any], fault: str
) -> None:
    folder = model_folder("qwen3_vl", lambda config: config["vision_config"].update(edit))
    with pytest.raises(UnsupportedModel) as error:
        read_vision(folder)
    assert fault in str(error.value)


def test_a_tower_of_qwen3_5_has_no_deepstack(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("qwen3_5_images", lambda config: config["vision_config"].update(deepstack_visual_indexes=[1]))
    with pytest.raises(UnsupportedModel, match=r"deepstack_visual_indexes is \[1\]; it must be absent or \[\]"):
        read_vision(folder)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5_images", "qwen3_vl"])
def test_a_folder_that_does_not_say_how_images_are_prepared_is_refused(
    model_folder: Callable[..., Path], family: str
) -> None:
    folder = model_folder(family)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(
        CorruptCheckpoint, match=r"has no preprocessor_config\.json, which says how images are prepared"
    ):
        read_vision(folder)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_folder_without_a_tower_is_for_text(model_folder: Callable[..., Path], family: str) -> None:
    folder = model_folder(family, lambda config: config.pop("vision_config"))
    assert read_vision(folder) is None


def test_more_levels_than_text_layers_are_refused(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("qwen3_vl", lambda config: config["text_config"].update(num_hidden_layers=1))
    with pytest.raises(UnsupportedModel, match=r"deepstack_visual_indexes .* a list of at most 1 layers of the tower"):
        read_spec(folder)


def test_positions_are_between_the_learned_ones(goldens: Path) -> None:
    """The learned positions of a 5 x 5 grid are their coordinates, so the results show the places of patches."""
    spec = spec_of(goldens / "qwen3_vl")
    learned = np.zeros((5, 5, spec.body.hidden_size), np.float32)
    learned[..., 0], learned[..., 1] = np.arange(5)[:, None], np.arange(5)
    for rows, columns in ((1, 1), (3, 5), (8, 1)):
        given = spec.input(np.zeros((8 * rows, 8 * columns, 3), np.uint8), learned.reshape(25, -1))
        positions = given.rows(0, rows * columns).positions
        assert positions is not None
        places = positions.reshape(rows, columns, 2, 2, -1).transpose(0, 2, 1, 3, 4).reshape(2 * rows, 2 * columns, -1)
        assert np.allclose(places[..., 0], np.linspace(0, 4, 2 * rows)[:, None], atol=1e-5)
        assert np.allclose(places[..., 1], np.linspace(0, 4, 2 * columns), atol=1e-5)


@pytest.mark.parametrize("sections", [None, [2, 3], [2, 3, 4], [2, 3, 3.0], [-2, 5, 5], "2, 3, 3"])
def test_sections_that_do_not_fill_a_head_are_refused(model_folder: Callable[..., Path], sections: Any) -> None:
    folder = model_folder(
        FAMILY, lambda config: config["text_config"]["rope_parameters"].update(mrope_section=sections)
    )
    with pytest.raises(UnsupportedModel, match=r"rope_parameters.mrope_section .* three integers whose sum is 8"):
        read_spec(folder)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("hidden_size", 96, WrongTensor),
        ("temporal_patch_size", 1, WrongTensor),
        ("depth", 4, MissingTensor),
    ],
)
def test_a_config_that_does_not_fit_the_tensors_is_refused(
    model_folder: Callable[..., Path], key: str, value: int, error: type[ModelError]
) -> None:
    folder = model_folder(FAMILY, lambda config: config["vision_config"].update({key: value}))
    with pytest.raises(error):
        pack_tower(folder, spec_of(folder), "f32")


def test_pixels_are_normalized_by_the_values_of_clip_if_the_folder_has_none(
    model_folder: Callable[..., Path],
) -> None:
    folder = model_folder(FAMILY)
    path = folder / "preprocessor_config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in values.items() if not key.startswith("image_")}))
    assert spec_of(folder).mean == (0.48145466, 0.4578275, 0.40821073)
    assert spec_of(folder).std == (0.26862954, 0.26130258, 0.27577711)
