"""Open broken model files: whatever their headers claim, each must load or raise a ModelError.

usage: fuzz_files.py [--cases 200000] [--seed 1] [--only PART OF A SEED'S NAME ...]

A case is a small GGUF file, a part of a split one, or a safetensors folder, with one or more changes: numbers in the
header replaced by extreme ones, bytes flipped, ranges removed, repeated or exchanged, the file truncated. Folders that
are quantized are changed anywhere. A file that is accepted is packed too. Every 20th case runs under tracemalloc, to
check that memory is bounded by the size of the file, and the address space is limited throughout. Exit status 1 on any
breach.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import struct
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from quire.runtime.common.errors import ModelError
from quire.runtime.engine import TextProcessor
from quire.runtime.model import pack_model, read_spec
from quire.runtime.model.weights.gguf import GGUFFile
from quire.runtime.model.weights.tensors import expected_tensors
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, for tests.support

from tests.support.families import GOLDENS
from tests.support.gguf_files import CHANGED, Tensor, describe, rope_factors, stored_tensors, write
from tests.support.quantized_folders import Make, awq, folder_of, fp8, gptq, int8, words

TRACED = 20  # one case in TRACED runs under tracemalloc
MAX_PEAK_PER_BYTE = 64  # a metadata entry of 14 bytes is an object, a string and an entry of a dict
MAX_PEAK_BASE = 8 << 20  # bytes allowed for any file, however short
ADDRESS_SPACE = 4 << 30  # more than this process needs, less than a header can claim
REPORTED_BREACHES = 5
IN_MEMORY = "/dev/shm"  # 40 times as fast as a disk
EXTREMES = (
    0,
    1,
    2,
    7,
    31,
    255,
    256,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    1 << 62,
    1 << 63,
    (1 << 64) - 1,
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}  # fmt: skip

MODULES = {
    **{f"self_attn.{name}_proj": (rows, 32) for name, rows in (("q", 32), ("k", 16), ("v", 16), ("o", 32))},
    **{f"mlp.{name}_proj": (32, 32) for name in ("gate", "up", "down")},
}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
QUANTIZED: dict[str, tuple[Mapping[str, Any], Make]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 16}, gptq(group=16, sym=False, act_order=True)),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq(32)),
    "words": ({**COMPRESSED, "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}}}, words(sym=False)),
    "int8": (COMPRESSED, int8()),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [16, 32]}, fp8((16, 32), name="weight_scale_inv")),
}
WITH_FILES = (  # goldens of families that have GGUF files
    *("granite_hybrid", "granite_hybrid_moe", "falcon_h1", "nemotron_h", "nemotron_h_moe"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_next"),
    *("arcee", "cohere", "cohere2", "ernie4_5_moe", "glm4_moe", "hunyuan_v1_dense", "phi", "stablelm", "starcoder2"),
    *("granite_moe", "minicpm", "olmoe"),
    *("deepseek_v2", "deepseek_v3"),
)
FOLDERS_ONLY = ("gemma4", "gemma4_dense", "gemma4_moe", "glm4_moe_lite", "granite_swa", "olmo_hybrid")  # goldens
FAMILIES: dict[str, dict[str, Any]] = {  # family -> content of its files beyond Llama's
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 1},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "original_max_position_embeddings": 32,
        "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        "sliding_window": 16,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "query_pre_attn_scalar": 16,
        "head_dim": 16,
        "sliding_window": 16,
    },
    "granite": {"architectures": ["GraniteForCausalLM"], "embedding_multiplier": 6.0, "logits_scaling": 4.0},
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
        "full_attn_idxs": [1],
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "conv_bias": False,
        "block_ff_dim": 48,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    "lfm2_moe": {
        "architectures": ["Lfm2MoeForCausalLM"],
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "conv_bias": False,
        "moe_intermediate_size": 24,
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.5,
    },
}

TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(97, 102)), "▁", *"abcdefghijklmnopqrstuvw"]
VOCABULARY: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": [-float(rank) for rank in range(len(TOKENS))],
    "tokenizer.ggml.token_type": ("i32", [2, 3, 3, *[6] * 5, *[1] * 24]),
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": "{{ messages[0]['content'] }}",
}


@dataclass(frozen=True)
class Seed:
    """A valid model: the file that a case changes, the bytes of its header, and the path to open."""

    name: str
    file: Path
    header_bytes: int
    model: Path
    content: bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[""], metavar="PART")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if os.path.isdir(IN_MEMORY) else None) as folder:
        outcomes, breaches, peak, slowest_s = run(Path(folder), options.cases, options.seed, options.only)
    print(f"cases        {sum(outcomes.values()):,}")
    print(f"outcomes     {', '.join(f'{name} {count:,}' for name, count in outcomes.most_common())}")
    print(f"memory       at most {peak:,} bytes for a file of some KB ({TRACED}th cases)")
    print(f"slowest      {slowest_s * 1000:.1f} ms")
    print(f"breaches     {len(breaches)}")
    for breach in breaches:
        print(f"  {breach}")
    return 1 if breaches else 0


def run(folder: Path, cases: int, seed: int, only: Sequence[str] = ("",)) -> tuple[Counter[str], list[str], int, float]:
    """Return the outcomes by kind of file, the breaches, the largest peak of traced bytes and the longest time."""
    rng = Random(seed)
    seeds = [each for each in make_seeds(folder) if any(part in each.name for part in only)]
    outcomes = Counter[str]()
    breaches: list[str] = []
    peak = 0
    slowest_s = 0.0
    for number in range(cases):
        chosen = rng.choice(seeds)
        traced = number % TRACED == 0
        changed = mutated(chosen, rng)
        chosen.file.write_bytes(changed)
        if traced:
            tracemalloc.start()
        start = time.perf_counter()
        try:
            outcomes[f"{chosen.name}: {outcome(chosen.model)}"] += 1
        except Exception as error:  # anything but a ModelError is a breach
            breaches.append(f"case {number} of seed {seed}: {chosen.name}: {type(error).__name__}: {error}")
        slowest_s = max(slowest_s, time.perf_counter() - start)
        if traced:
            used = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            peak = max(peak, used)
            if used > MAX_PEAK_BASE + MAX_PEAK_PER_BYTE * len(changed):
                breaches.append(f"case {number} of seed {seed}: {chosen.name}: {used:,} bytes for {len(changed):,}")
        chosen.file.write_bytes(chosen.content)
        if len(breaches) >= REPORTED_BREACHES:
            break
    return outcomes, breaches, peak, slowest_s


def outcome(model: Path) -> str:
    """Open and pack a model, and read all of its metadata; return "loaded" or the name of the ModelError."""
    try:
        if model.suffix == ".gguf":
            dict(GGUFFile(model).metadata)
        pack_model(model, "auto")
        TextProcessor.load(model)
    except ModelError as error:
        return type(error).__name__
    return "loaded"


def make_seeds(folder: Path) -> list[Seed]:
    source = _make_model(folder / "source", CONFIG)
    about = {**describe(source), **VOCABULARY}
    seeds = []
    for kind in ("F32", "Q8_0", "Q4_0"):
        stored = stored_tensors(source, kind)
        seeds.append(_gguf_seed(write(folder / f"{kind}.gguf", {**about, "general.flags": [True]}, stored), stored))
    names = sorted(stored)
    for part, some in enumerate((names[:5], names[5:])):
        split = {"split.no": ("u16", part), "split.count": ("u16", 2), "split.tensors.count": ("i32", len(names))}
        path = folder / f"split-0000{part + 1}-of-00002.gguf"
        tensors = {name: stored[name] for name in some}
        seeds.append(_gguf_seed(write(path, {**(about if part == 0 else {}), **split}, tensors), tensors))
    for family, changed in FAMILIES.items():
        other = _make_model(folder / f"source-{family}", {**CONFIG, **changed})
        tensors = {**stored_tensors(other, "F32"), **rope_factors(other)}
        seeds.append(_gguf_seed(write(folder / f"{family}.gguf", {**describe(other), **VOCABULARY}, tensors), tensors))
    for family in ("lfm2", "lfm2_moe"):
        seeds.extend(_seeds_of_folder(folder / f"source-{family}", family))
    for family in (*WITH_FILES, *FOLDERS_ONLY):
        seeds.extend(_seeds_of_golden(folder, family))
    return [
        *seeds,
        *_seeds_of_folder(_copied_golden(folder, "gpt_oss_mxfp4"), "gpt-oss"),
        *_seeds_of_folder(shutil.copytree(source, folder / "safetensors"), "llama"),
        *(seed for name, how in QUANTIZED.items() for seed in _quantized_seeds(folder / name, *how)),
    ]


def _quantized_seeds(path: Path, config: Mapping[str, Any], make: Make) -> list[Seed]:
    """Return seeds of a quantized folder: its config.json, and its tensors with the order of groups and zero points."""
    folder_of(path, config, make, (), MODULES, **CONFIG)
    files = path / "config.json", path / "model.safetensors"
    return [Seed(f"{path.name} {file.stem}", file, file.stat().st_size, path, file.read_bytes()) for file in files]


def _make_model(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a folder with random weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    values = np.random.default_rng(1)
    tensors = {name: values.standard_normal(shape, np.float32) for name, shape in expected_tensors(read_spec(folder))}
    save_file(tensors, folder / "model.safetensors")
    return folder


def _copied_golden(folder: Path, family: str) -> Path:
    return shutil.copytree(GOLDENS / family, folder / f"golden-{family}", ignore=shutil.ignore_patterns("*.npz"))


def _seeds_of_golden(folder: Path, family: str) -> Iterator[Seed]:
    """Yield seeds of a family: its folder, and its GGUF file if Quire reads such files."""
    golden = _copied_golden(folder, family)
    yield from _seeds_of_folder(golden, family)
    if family not in WITH_FILES:
        return
    changed = folder / f"changed-{family}"
    shutil.copytree(golden, changed)
    config = json.loads((golden / "config.json").read_bytes())
    (changed / "config.json").write_text(json.dumps(config | CHANGED.get(family, {})))
    tensors = stored_tensors(changed, "F32")
    yield _gguf_seed(write(folder / f"{golden.name}.gguf", {**describe(changed), **VOCABULARY}, tensors), tensors)


def _seeds_of_folder(folder: Path, name: str) -> Iterator[Seed]:
    """Yield seeds of a folder's config.json and of the header of its tensors."""
    config = folder / "config.json"
    file = folder / "model.safetensors"
    length = struct.unpack("<Q", file.read_bytes()[:8])[0]
    yield Seed(f"config.json of {name}", config, config.stat().st_size, folder, config.read_bytes())
    yield Seed(f"safetensors of {name}", file, 8 + length, folder, file.read_bytes())


def _gguf_seed(path: Path, tensors: Mapping[str, Tensor]) -> Seed:
    content = path.read_bytes()
    data_bytes = sum(-(-len(tensor.data) // 32) * 32 for tensor in tensors.values())
    return Seed(path.stem, path, len(content) - data_bytes, path, content)


def mutated(seed: Seed, rng: Random) -> bytes:
    """Return the content of a seed with one to three changes to its header."""
    data = bytearray(seed.content)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice(CHANGES)(data, seed.header_bytes, rng)
    return bytes(data)


def _set_number(data: bytearray, size: int, rng: Random) -> None:
    width = rng.choice((1, 2, 4, 8))
    at = rng.randrange(size)
    old = int.from_bytes(data[at : at + width], "little")
    value = rng.choice((*EXTREMES, old + 1, old - 1, old * 2, old + 32)) % (1 << 8 * width)
    data[at : at + width] = value.to_bytes(width, "little")


def _set_digits(data: bytearray, size: int, rng: Random) -> None:
    """Replace a number written in decimal digits, as in JSON."""
    places = [at for at in range(min(size, len(data))) if 48 <= data[at] < 58]
    if places:
        at = rng.choice(places)
        new = rng.choice((b"0", b"-1", b"18446744073709551616", b"1e999", b"NaN", b"null", b"[]", b'"a"', b"true"))
        data[at : at + 1] = new


def _flip(data: bytearray, size: int, rng: Random) -> None:
    if data:
        data[rng.randrange(min(size, len(data)))] ^= 1 << rng.randrange(8)


def _truncate(data: bytearray, size: int, rng: Random) -> None:
    del data[rng.randrange(size if rng.random() < 0.8 else len(data) + 1) :]


def _remove(data: bytearray, size: int, rng: Random) -> None:
    at = rng.randrange(size)
    del data[at : at + rng.choice((1, 4, 8, rng.randrange(1, 200)))]


def _repeat(data: bytearray, size: int, rng: Random) -> None:
    at = rng.randrange(size)
    data[at:at] = data[at : at + rng.randrange(1, 200)]


def _exchange(data: bytearray, size: int, rng: Random) -> None:
    width = rng.choice((1, 4, 8, 24))
    first = rng.randrange(size)
    second = rng.randrange(size)
    one, other = data[first : first + width], data[second : second + width]
    if len(one) == len(other) == width:
        data[first : first + width] = other
        data[second : second + width] = one


CHANGES: tuple[Callable[[bytearray, int, Random], None], ...] = (
    _set_number, _set_number, _set_number, _set_number, _set_digits, _flip, _truncate, _remove, _repeat, _exchange,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
