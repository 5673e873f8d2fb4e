"""Compare the memory that `quire plan` computes with that of real processes, for every family and data type.

usage: plan_memory.py [--dtypes q8:int8,bf16:bf16,f32:f32,q4:int8] [MODEL ...]

Each process loads a model, runs steps that use the whole step arena, and waits; its anonymous memory and its files are
compared with the plan. Without MODEL, a checkpoint with random weights is written for every golden: its config.json,
16 times as wide; and quantised folders, which keep their types. Exit status 1 if a difference exceeds 5 %.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.runtime.common.config import EngineConfig
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.common.settings import Settings
from quire.runtime.model import read_spec
from quire.runtime.model.weights.tensors import expected_tensors
from quire.runtime.tools.planning import PlanTarget, plan_serving

from tests.bench.make_checkpoint import write_safetensors
from tests.families import FAMILIES, GOLDENS
from tests.quantised_folders import CONFIG, MATRICES, common_folders

WIDER = 16
SCALED = ("hidden_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads", "num_key_value_heads")
VOCABULARY = 16_000
KV_CACHE_MEMORY = 192 << 20
ALLOWED = 0.05
DTYPES = "q8:int8,bf16:bf16,f32:f32,q4:int8"
GENERATE = """
import sys
from quire import LLM, SamplingParams
model, weights, kv_cache_dtype, memory = sys.argv[1:]
dtypes = {"weights": weights, "kv_cache_dtype": kv_cache_dtype}
with LLM(model or None, **dtypes, kv_cache_memory=int(memory), max_num_seqs=8, threads=2) as llm:
    llm.generate([list(range(4, 100))] * 8, SamplingParams(max_tokens=16, ignore_eos=True))
    print("generated", flush=True)
    sys.stdin.readline()
"""


def measured_bytes(model: str, weights: str, kv_cache_dtype: str) -> int:
    """Return the memory of a process that has loaded a model ("": the bundled one) and generated tokens."""
    command = [sys.executable, "-c", GENERATE, model, weights, kv_cache_dtype, str(KV_CACHE_MEMORY)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "generated\n"
        return sum(resident_bytes(process.pid))


def planned_bytes(model: str, weights: Any, kv_cache_dtype: Any) -> int:
    """Return what the plan says of such a process: the engine's memory and the tokenizer."""
    config = EngineConfig(
        model=model or None,
        weights=weights,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory=KV_CACHE_MEMORY,
        max_num_seqs=8,
        threads=2,
    )
    plan = plan_serving(Settings(engine=config, server=ServerConfig()), PlanTarget())
    return plan.capacity.memory.total_bytes + plan.server_bytes["tokenizer"]


def resident_bytes(pid: int | str) -> tuple[int, int]:
    """Return the anonymous memory of a process, and what it maps of files."""
    fields = dict(re.findall(r"^(\w+): +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE))
    return int(fields["Anonymous"]) << 10, int(fields["Rss"]) - int(fields["Anonymous"]) << 10


def wide_checkpoint(family: str, folder: Path) -> Path:
    """Write a wider model than a golden, with the golden's features and random weights."""
    config = json.loads((GOLDENS / family / "config.json").read_text())
    config |= {key: WIDER * config[key] for key in SCALED if key in config} | {"vocab_size": VOCABULARY}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        write_safetensors(file, [_as_stored(*tensor) for tensor in expected_tensors(read_spec(folder))])
    return folder


def _as_stored(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return a tensor's name and shape in a folder: one tensor with all experts has no suffix and is transposed."""
    stacked = re.fullmatch(r"(.*\.experts\.(?:gate_up|down)_proj)\.(weight|bias)", name)
    if stacked is None:
        return name, shape
    return (f"{stacked[1]}_bias", shape) if stacked[2] == "bias" else (stacked[1], (shape[0], shape[2], shape[1]))


def _models(given: list[str], dtypes: str, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yield names, paths and dtypes; a checkpoint that was written for this run is removed afterwards."""
    yield from ((Path(model).name, model, dtypes) for model in given)
    if given:
        return
    for family in FAMILIES:
        written = (GOLDENS / family / "config.json").read_text()
        if "quantization_config" in written or "vision_config" in written:
            continue  # the same decoder without it has a golden too
        path = wide_checkpoint(family, folder / family)
        yield family, str(path), dtypes
        (path / "model.safetensors").unlink()
    wide = {name: (WIDER * outputs, WIDER * inputs) for name, (outputs, inputs) in MATRICES.items()}
    changes = {key: WIDER * CONFIG[key] for key in SCALED if key in CONFIG} | {"max_position_embeddings": 128}
    for name, path in common_folders(folder, wide, **changes, vocab_size=VOCABULARY).items():
        yield name, str(path), "auto:int8"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default=DTYPES, help="weights:KV cache, separated by commas")
    parser.add_argument("models", nargs="*", metavar="MODEL")
    options = parser.parse_args()
    worst = 0.0
    print(f"{'model':<24}{'weights':>8}{'KV':>6}{'planned MiB':>14}{'measured MiB':>14}{'difference':>12}")
    with tempfile.TemporaryDirectory() as folder:
        for name, model, dtypes in _models(options.models, options.dtypes, Path(folder)):
            for weights, kv_cache_dtype in (pair.split(":") for pair in dtypes.split(",")):
                planned = planned_bytes(model, weights, kv_cache_dtype)
                measured = measured_bytes(model, weights, kv_cache_dtype)
                difference = measured / planned - 1
                worst = max(worst, abs(difference))
                sizes = f"{planned / 2**20:>14,.1f}{measured / 2**20:>14,.1f}{difference:>+12.1%}"
                print(f"{name:<24}{weights:>8}{kv_cache_dtype:>6}{sizes}", flush=True)
    print(f"largest difference {worst:.1%}, allowed {ALLOWED:.0%}")
    raise SystemExit(worst > ALLOWED)


if __name__ == "__main__":
    main()
