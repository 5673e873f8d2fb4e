"""Compare the memory that `quire plan` computes with the memory of real processes, for every family and data type.

usage: plan_memory.py [--dtypes q8:int8,bf16:bf16,f32:f32,q4:int8] [--sequences 8] [MODEL ...]

Each process loads a model, runs steps that use the whole step arena, and waits. The plan is compared with the peak
memory since loading, anonymous and of files. A model with a vision tower also computes images of the largest size, one
more than its image cache holds. Without MODEL, a checkpoint with random weights is written for every golden: its
config.json, 16 times as wide; and quantized folders, which keep their types. Exit status 1 if a difference exceeds 5 %.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from math import isqrt
from pathlib import Path
from typing import Any

from quire.runtime.common.config import EngineConfig
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.common.settings import Settings
from quire.runtime.model import read_spec
from quire.runtime.model.states import lay_out_states
from quire.runtime.model.vision import DynamicVisionSpec, VisionSpec, read_vision
from quire.runtime.model.vision.packed import _build as build_tower
from quire.runtime.model.vision.spec import CHANNELS
from quire.runtime.model.weights.packing import WeightPlanner
from quire.runtime.model.weights.tensors import expected_tensors
from quire.runtime.tools.planning import PlanTarget, plan_serving

from tests.support.families import FAMILIES, GOLDENS
from tests.support.golden_images import FAMILIES as IMAGE_FAMILIES
from tests.support.quantized_folders import CONFIG, MATRICES, common_folders
from tests.support.random_models import write_random_model, write_random_tensors

WIDER = 16
SCALED = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("mamba_n_heads", "mamba_d_ssm", "mamba_num_heads", "linear_num_key_heads", "linear_num_value_heads"),
)
VOCABULARY = 16_000
KV_CACHE_MEMORY = 192 << 20
IMAGES = 3  # images, of which the image cache holds all but one
TOWER_HEADS = 12  # heads of 64 elements
TOWER_WIDTHS = ("hidden_size", "intermediate_size", "out_hidden_size")
TOWER_SIZES: dict[str, dict[str, dict[str, Any]]] = {  # file of a folder -> its content in widely used models
    "idefics3": {"vision_config": {"image_size": 512, "patch_size": 16}, "config": {"scale_factor": 4}},
    "gemma3_images": {
        "vision_config": {"image_size": 896, "patch_size": 14},
        "config": {"mm_tokens_per_image": 256},
        "text_config": {"sliding_window": 512},
    },
    "qwen2_5_vl": {
        "vision_config": {"patch_size": 14, "window_size": 112},
        "processor": {"patch_size": 14, "max_pixels": 896 * 896},
    },
    "qwen3_vl": {
        "vision_config": {"patch_size": 16, "num_position_embeddings": 2304},
        "processor": {"patch_size": 16, "max_pixels": 1024 * 1024},
    },
}
ALLOWED = 0.05
DTYPES = "q8:int8,bf16:bf16,f32:f32,q4:int8"
GENERATE = """
import json
import sys
import numpy as np
from quire import LLM, SamplingParams
from quire.runtime.common.prompts import PromptImage, image_digest
options, images = map(json.loads, sys.argv[1:])
sampling = SamplingParams(max_tokens=16, ignore_eos=True)
with LLM(**options) as llm:
    llm.generate([list(range(4, 100))] * options["max_num_seqs"], sampling)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak: it counts from here
    for brightness, (side, tokens, placeholder) in enumerate(images):
        pixels = np.full((side, side, 3), brightness, np.uint8)
        image = PromptImage(1, tokens, pixels, image_digest(pixels))
        llm.generate([[1, *[placeholder] * tokens, 5]], sampling, images=[[image]])
        del pixels, image
    print("generated", flush=True)
    sys.stdin.readline()
"""


def measured_bytes(model: str, weights: str, kv_cache_dtype: str, sequences: int) -> int:
    """Return the largest memory of a process that has loaded a model ("": the bundled one) and generates tokens."""
    tower = _tower(model)
    options = _options(model, weights, kv_cache_dtype, sequences)
    images = [] if tower is None else [_image(tower)] * IMAGES
    command = [sys.executable, "-c", GENERATE, json.dumps(options), json.dumps(images)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "generated\n"
        return peak_bytes(process.pid)


def planned_bytes(model: str, weights: str, kv_cache_dtype: str, sequences: int) -> int:
    """Return the planned bytes of the process: the engine's memory and the tokenizer.

    The pixels of requests have a limit of their own: here the pixels of one image, as the client and as the engine have
    them.
    """
    config = EngineConfig(**_options(model, weights, kv_cache_dtype, sequences))
    plan = plan_serving(Settings(engine=config, server=ServerConfig()), PlanTarget())
    tower = _tower(model)
    pixels = 0 if tower is None else 2 * CHANNELS * _image(tower)[0] ** 2
    return plan.capacity.memory.total_bytes + plan.server_bytes["tokenizer"] + pixels


def _options(model: str, weights: str, kv_cache_dtype: str, sequences: int) -> dict[str, Any]:
    options: dict[str, Any] = {"model": model or None, "weights": weights, "kv_cache_dtype": kv_cache_dtype}
    states_bytes = sequences * lay_out_states(read_spec(model)).nbytes if model else 0
    options |= {"kv_cache_memory": KV_CACHE_MEMORY + states_bytes, "max_num_seqs": sequences, "threads": 2}
    options |= {"state_cache_memory": 0}  # the steps use no states of the prefix cache
    tower = _tower(model)
    if tower is None:
        return options
    rows_bytes = tower.num_tokens * tower.out_size * 4
    return options | {"image_cache_memory": (IMAGES - 1) * rows_bytes}


def _tower(model: str) -> VisionSpec | DynamicVisionSpec | None:
    return read_vision(model) if model else None


def _image(tower: VisionSpec | DynamicVisionSpec) -> tuple[int, int, int]:
    """Return the pixels of each side of the largest image, its tokens, and their id."""
    side = tower.image_size if isinstance(tower, VisionSpec) else isqrt(tower.sizes.max_pixels)
    return side, tower.num_tokens, tower.image_token_id


def peak_bytes(pid: int) -> int:
    """Return the largest memory that a process has had, anonymous or of files."""
    (size,) = re.findall(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(size) << 10


def resident_bytes(pid: int | str) -> tuple[int, int]:
    """Return the anonymous memory of a process, and its mapped files."""
    fields = dict(re.findall(r"^(\w+): +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE))
    return int(fields["Anonymous"]) << 10, int(fields["Rss"]) - int(fields["Anonymous"]) << 10


def wide_checkpoint(family: str, folder: Path) -> Path:
    """Write a wider model than a golden, with the golden's features and random weights."""
    config = json.loads((GOLDENS / family / "config.json").read_text())
    wider = {key: WIDER * config[key] for key in SCALED if key in config}
    return write_random_model(family, folder, **wider, vocab_size=VOCABULARY)


def wide_image_checkpoint(family: str, folder: Path) -> Path:
    """Write a model with a vision tower that is wider than a golden, for images as large as real models take."""
    config, processor = (
        json.loads((GOLDENS / family / name).read_text()) for name in ("config.json", "preprocessor_config.json")
    )
    text = config["text_config"]
    vision = config["vision_config"]
    sizes = TOWER_SIZES[family]
    for part, keys in ((text, SCALED), (vision, TOWER_WIDTHS)):
        part |= {key: WIDER * part[key] for key in keys if key in part}
    text |= {"vocab_size": VOCABULARY, "max_position_embeddings": 2048} | sizes.get("text_config", {})
    vision |= {key: TOWER_HEADS for key in ("num_attention_heads", "num_heads") if key in vision}
    vision |= sizes["vision_config"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | sizes.get("config", {})))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | sizes.get("processor", {})))
    tower = read_vision(folder)
    planner = WeightPlanner()
    assert tower is not None
    build_tower(tower, "f32", planner)
    tensors = dict(expected_tensors(read_spec(folder))) | planner.tensors
    if isinstance(tower, VisionSpec) and tower.mean_norm:  # such a connector is stored as [in_features, out_features]
        tensors[f"{tower.connector}.weight"] = tower.square_columns, tower.out_size
    write_random_tensors(folder, list(tensors.items()))
    return folder


def _models(given: list[str], dtypes: str, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield names, paths and dtypes; a checkpoint that was written for this run is removed afterwards."""
    yield from ((Path(model).name, model, dtypes) for model in given)
    if given:
        return
    for family in FAMILIES:
        written = (GOLDENS / family / "config.json").read_text()
        if "quantization_config" in written or "vision_config" in written:
            continue  # another golden has the same decoder without quantization or images
        path = wide_checkpoint(family, folder / family)
        yield family, str(path), dtypes
        (path / "model.safetensors").unlink()
    for family in IMAGE_FAMILIES:
        path = wide_image_checkpoint(family, folder / family)
        yield f"{family}, images", str(path), dtypes
        (path / "model.safetensors").unlink()
    wide = {name: (WIDER * outputs, WIDER * inputs) for name, (outputs, inputs) in MATRICES.items()}
    changes = {key: WIDER * CONFIG[key] for key in SCALED if key in CONFIG} | {"max_position_embeddings": 128}
    for name, path in common_folders(folder, wide, **changes, vocab_size=VOCABULARY).items():
        yield name, str(path), "auto:int8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default=DTYPES, help="weights:KV cache, separated by commas")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    options = parser.parse_args()
    worst = 0.0
    print(f"{'model':<24}{'weights':>8}{'KV':>6}{'planned MiB':>14}{'measured MiB':>14}{'difference':>12}")
    with tempfile.TemporaryDirectory() as folder:
        for name, model, dtypes in _models(options.models, options.dtypes, Path(folder)):
            for weights, kv_cache_dtype in (pair.split(":") for pair in dtypes.split(",")):
                planned = planned_bytes(model, weights, kv_cache_dtype, options.sequences)
                measured = measured_bytes(model, weights, kv_cache_dtype, options.sequences)
                difference = measured / planned - 1
                worst = max(worst, abs(difference))
                sizes = f"{planned / 2**20:>14,.1f}{measured / 2**20:>14,.1f}{difference:>+12.1%}"
                print(f"{name:<24}{weights:>8}{kv_cache_dtype:>6}{sizes}", flush=True)
    print(f"largest difference {worst:.1%}, allowed {ALLOWED:.0%}")
    raise SystemExit(worst > ALLOWED)


if __name__ == "__main__":
    main()
