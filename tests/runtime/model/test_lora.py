"""Adapters: logits beside PEFT for five families, the same bits whatever the neighbors' adapters are, and refusals."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire import LLM, ConfigError, InvalidRequest, ModelError, SamplingParams
from quire.kernels import supported_levels
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import CorruptCheckpoint
from quire.runtime.model import read_spec
from quire.runtime.model.lora import open_adapter
from quire.runtime.model.runner import ModelRunner, load_model
from safetensors.numpy import load_file, save_file

from tests.support.gguf_files import PERMUTED, convert, encode, stored_name, write

GOLDENS = Path(__file__).parents[2] / "goldens"
LORA = GOLDENS / "lora"
FAMILIES = ("llama", "qwen3", "gemma3", "phi3", "cohere")
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)

Load = Callable[..., ModelRunner]


@pytest.fixture
def load() -> Iterator[Load]:
    runners: list[ModelRunner] = []

    def make(family: str, **options: Any) -> ModelRunner:
        options = {
            "weights": "f32", "kv_cache_dtype": "f32", "max_model_len": 32, "max_num_seqs": 16,
            "max_num_batched_tokens": 64, "threads": 2,
            "tune": "off", "lora": {"a": str(LORA / family)}, **options,
        }  # fmt: skip
        config = EngineConfig(**{"model": str(GOLDENS / family), "kv_cache_memory": 4 << 20, **options})
        runners.append(load_model(config))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def golden(family: str) -> Any:
    return np.load(LORA / family / "golden.npz")


def logits(runner: ModelRunner, family: str, name: str = "a", chunk: int = 5) -> np.ndarray:
    """Return the logits of the golden tokens, computed in chunks, with an adapter or, without a name, none."""
    tokens = golden(family)["token_ids"].tolist()
    tables = [[group] for group in range(len(runner.capacity.layout.groups))]
    key = runner.adapter_keys[name] if name else ""
    pieces = [tokens[first : first + chunk] for first in range(0, len(tokens), chunk)]
    return np.concatenate(
        [
            runner.score(piece, index * chunk, tables, len(piece), adapter=key).copy()
            for index, piece in enumerate(pieces)
        ]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_peft_unmerged_and_merged(load, family):
    ours = logits(load(family), family)
    assert np.abs(ours - golden(family)["unmerged"]).max() < 2e-4
    assert np.abs(ours - golden(family)["merged"]).max() < 2e-4


@pytest.mark.parametrize("weights", ["bf16", "q8", "q4"])
def test_an_adapter_changes_quantized_models_as_much_as_the_model_itself_differs(load, weights):
    exact = load("qwen3")
    rounded = load("qwen3", weights=weights)
    error = np.abs(logits(rounded, "qwen3", "") - logits(exact, "qwen3", "")).max()
    assert np.abs(logits(rounded, "qwen3") - golden("qwen3")["merged"]).max() < 2 * error


@pytest.mark.parametrize("weights", ["f32", "q8"])
@pytest.mark.parametrize("level", supported_levels())
def test_every_level_number_of_threads_and_chunk_gives_the_same_bits(load, weights, level):
    options = {"weights": weights, "kv_cache_dtype": "int8"}
    expected = logits(load("gemma3", isa="scalar", threads=1, **options), "gemma3", chunk=12).tobytes()
    assert logits(load("gemma3", isa=level, threads=3, **options), "gemma3", chunk=1).tobytes() == expected


@pytest.mark.parametrize("weights", ["f32", "q8"])
def test_a_model_that_may_have_adapters_has_its_own_bits_without_one(load, weights):
    plain = load("phi3", weights=weights, lora={})
    assert logits(load("phi3", weights=weights), "phi3", "").tobytes() == logits(plain, "phi3", "").tobytes()


def test_requests_with_any_mix_of_adapters_have_the_tokens_of_each_alone(tmp_path):
    other = scaled(LORA / "qwen3", tmp_path / "other", -1)
    lora = {"a": str(LORA / "qwen3"), "b": str(other)}
    prompts = [[7, 9, 11, 13, 5], [7, 9, 11, 13, 5], [7, 9, 11, 13, 5], [20, 8]]
    names = ["a", "", "b", "a"]
    options: Any = {"kv_cache_memory": "4MiB", "weights": "q8", "lora": lora, "threads": 2}
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0)
    with LLM(GOLDENS / "qwen3", **options) as llm:
        alone = [
            llm.generate([prompt], params, lora=name)[0].outputs for prompt, name in zip(prompts, names, strict=True)
        ]
    with LLM(GOLDENS / "qwen3", **options) as llm:
        mixed = [output.outputs for output in llm.generate(prompts, params, lora=names)]
        again = [output.outputs for output in llm.generate(prompts, params, lora=names)]
    assert mixed == alone
    assert again == alone
    assert len({output[0].token_ids for output in alone[:3]}) == 3


def test_prompts_of_different_adapters_share_no_cached_pages():
    prompt = list(range(3, 59)) + list(range(3, 50))
    options: Any = {"kv_cache_memory": "4MiB", "lora": {"a": str(LORA / "llama")}}
    with LLM(GOLDENS / "llama", **options) as llm:
        cached = [llm.generate([prompt], GREEDY, lora=name)[0].usage.cached_tokens for name in ("a", "", "a", "")]
    assert cached == [0, 0, 96, 96]


def test_an_unknown_adapter_is_refused_with_the_names_of_the_others():
    options: Any = {"kv_cache_memory": "4MiB", "lora": {"a": str(LORA / "llama")}}
    with (
        LLM(GOLDENS / "llama", **options) as llm,
        pytest.raises(InvalidRequest, match=r"'b' is no loaded .*: a$"),
    ):
        llm.generate([[5]], GREEDY, lora="b")


def scaled(source: Path, target: Path, factor: float) -> Path:
    """Copy an adapter with B times a factor."""
    shutil.copytree(source, target)
    tensors = load_file(target / "adapter_model.safetensors")
    save_file(
        {name: values * np.float32(factor if "lora_B" in name else 1) for name, values in tensors.items()},
        target / "adapter_model.safetensors",
    )
    return target


# GGUF files


def as_gguf(family: str, path: Path, metadata: Mapping[str, Any] = {}) -> str:
    """Write a golden adapter as llama.cpp's converter does; `metadata` changes keys, None removes one."""
    spec = read_spec(GOLDENS / family)
    config = json.loads((LORA / family / "adapter_config.json").read_text())
    tensors = {}
    for name, values in load_file(LORA / family / "adapter_model.safetensors").items():
        module, _, matrix = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        if family in PERMUTED and matrix == "lora_B" and module.endswith(("q_proj", "k_proj")):
            halves = values.reshape(-1, 2, spec.head_dim // 2, values.shape[1])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        tensors[f"{stored_name(f'{module}.weight', spec)}.{matrix.lower()}"] = encode(values, "F32")
    alpha = config["lora_alpha"] * (config["r"] ** 0.5 if config["use_rslora"] else 1)  # GGUF has no such scales
    keys = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": float(alpha), **metadata}
    return str(write(path, {key: value for key, value in keys.items() if value is not None}, tensors))


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_logits_of_adapters_and_models_in_gguf_files_are_those_of_peft(load, tmp_path, family):
    model = convert(GOLDENS / family, tmp_path / "model.gguf")
    runner = load(family, model=str(model), lora={"a": as_gguf(family, tmp_path / "adapter.gguf")})
    assert np.abs(logits(runner, family) - golden(family)["merged"]).max() < 2e-4


def test_a_gguf_file_whose_alpha_is_0_has_no_scale(tmp_path):
    files = open_adapter(as_gguf("llama", tmp_path / "adapter.gguf", {"adapter.lora.alpha": 0.0}))
    assert {each.scale for each in files.matrices.values()} == {1.0}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.type": "model"}, "general.type is 'model'; it must be 'adapter'"),
        ({"adapter.type": None}, "adapter.type is missing"),
        ({"adapter.lora.alpha": -1.0}, r"adapter.lora.alpha is -1.0; it must be a number of at least 0"),
        ({"adapter.alora.invocation_tokens": [1, 2]}, "it must be absent: activated adapters are not read"),
    ],
)
def test_a_gguf_file_that_is_another_kind_of_adapter_is_refused_by_its_key(tmp_path, metadata, message):
    path = as_gguf("llama", tmp_path / "adapter.gguf", metadata)
    with pytest.raises(ModelError, match=message):
        open_adapter(path)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("blk.0.attn_q.weight.lora_a", np.ones((4, 64)), "tensor blk.0.attn_q.weight.lora_b is not in"),
        ("blk.0.attn_norm.weight", np.ones(64), "blk.0.attn_norm.weight is neither lora_a nor lora_b"),
        ("blk.0.attn_q.weight.lora_a", np.ones((4, 64, 2)), r"is F32 \[4, 64, 2\]; it must be a matrix of"),
        ("blk.0.attn_q.weight.lora_a", np.full((4, 64), np.nan), "has numbers that are not finite"),
    ],
)
def test_tensors_of_a_gguf_file_that_are_no_pair_are_refused_by_name(tmp_path, name, values, message):
    metadata = {"general.type": "adapter", "adapter.type": "lora"}
    path = write(tmp_path / "a.gguf", metadata, {name: encode(values.astype(np.float32), "F32")})
    with pytest.raises(ModelError, match=message):
        open_adapter(path)


# While steps run


def test_an_adapter_takes_the_place_of_another_and_returns_with_the_same_bits(load, tmp_path):
    other = str(scaled(LORA / "qwen3", tmp_path / "other", -1))
    runner = load("qwen3", lora={"a": str(LORA / "qwen3")}, max_loras=1)
    adapters = runner.adapters
    assert adapters is not None
    nbytes = adapters.nbytes
    before = logits(runner, "qwen3").tobytes()
    key, packed = adapters.pack("b", other)
    assert packed is not None
    with pytest.raises(ConfigError, match="b is one adapter more than the 1 that were planned"):
        adapters.put(key, packed, [runner.adapter_keys["a"]])
    assert logits(runner, "qwen3").tobytes() == before
    assert adapters.put(key, packed, [], [runner.adapter_keys["a"]]) == [runner.adapter_keys["a"]]
    assert (runner.adapter_keys["a"] in adapters, key in adapters) == (False, True)
    adapters.remove(key)
    assert (adapters.nbytes, adapters.load("a", str(LORA / "qwen3"))) == (0, runner.adapter_keys["a"])
    assert (adapters.nbytes, logits(runner, "qwen3").tobytes()) == (nbytes, before)
    assert adapters.pack("a", str(LORA / "qwen3")) == (runner.adapter_keys["a"], None)


def test_more_adapters_at_the_start_than_places_are_refused(load):
    with pytest.raises(ConfigError, match="max_loras is 1, and lora names 2 adapters; raise max_loras"):
        load("qwen3", lora={"a": str(LORA / "qwen3"), "b": str(LORA / "qwen3")}, max_loras=1)


# Files


def changed(folder: Path, **keys: Any) -> Path:
    """Return a copy of llama's adapter with other keys in its configuration; None removes a key."""
    target = folder / "adapter"
    shutil.copytree(LORA / "llama", target)
    config = json.loads((target / "adapter_config.json").read_text()) | keys
    (target / "adapter_config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; it must be 'LORA'"),
        ({"use_dora": True}, "use_dora is True; it must be False or None"),
        ({"bias": "all"}, "bias is 'all'; it must be 'none'"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changes the weights"),
        ({"r": 257}, "r is 257; a rank must be 1 to 256"),
        ({"lora_alpha": 0}, "lora_alpha is 0; an alpha must be a positive number"),
        (
            {"rank_pattern": {"(a+)+$": 4}},
            r"rank_pattern has the pattern '\(a\+\)\+\$'; a pattern must be a module's name",
        ),
        ({"rank_pattern": {"q_proj": 3}}, r"q_proj are \[4, \d+\] and \[\d+, 4\], which is not the rank 3"),
        ({"alpha_pattern": []}, None),
    ],
)
def test_an_adapter_that_is_more_than_low_rank_matrices_is_refused_by_its_key(load, tmp_path, keys, message):
    path = str(changed(tmp_path, **keys))
    if message is None:
        assert logits(load("llama", lora={"a": path}), "llama").shape[0] == 12
        return
    with pytest.raises(ModelError, match=message):
        load("llama", lora={"a": path})


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", (4, 8), "embed_tokens.lora_embedding_A is not lora_A"),
        ("base_model.model.lm_head.lora_A.weight", (4, 64), "has only lora_A of lm_head"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", (4, 31), "the layer has 64 inputs"),
        (
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
            (4,),
            "it must be a matrix of BF16, F16, F32",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(load, tmp_path, name, shape, message):
    path = scaled(LORA / "llama", tmp_path / "adapter", 1)
    tensors = load_file(path / "adapter_model.safetensors") | {name: np.ones(shape, np.float32)}
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=message):
        load("llama", lora={"a": str(path)})


def test_an_adapter_of_the_embedding_is_refused_with_the_layers_that_are_allowed(load, tmp_path):
    path = scaled(LORA / "llama", tmp_path / "adapter", 1)
    both = {f"base_model.model.lm_head.lora_{each}.weight": np.ones((4, 4), np.float32) for each in "AB"}
    save_file(load_file(path / "adapter_model.safetensors") | both, path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"changes lm_head; for this model an adapter may change .*down_proj"):
        load("llama", lora={"a": str(path)})


def test_files_that_are_missing_or_broken_are_named(load, tmp_path):
    with pytest.raises(ModelError, match="is no folder with an adapter_config"):
        load("llama", lora={"a": str(tmp_path)})
    shutil.copy(LORA / "llama" / "adapter_config.json", tmp_path)
    with pytest.raises(ModelError, match="has no adapter_model"):
        load("llama", lora={"a": str(tmp_path)})
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(ModelError, match="is not a whole safetensors file"):
        load("llama", lora={"a": str(tmp_path)})


@pytest.mark.parametrize("name", ["a" * 300, f"{'a' * 300}.gguf", "pipe.gguf"])
def test_paths_that_cannot_be_read_are_refused_without_waiting(tmp_path, name):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CorruptCheckpoint, match=r"cannot be read: File name too long|is not a file"):
        open_adapter(tmp_path / name)


def test_ranks_and_memory_have_limits(load):
    with pytest.raises(ModelError, match="has rank 20; max_lora_rank is 16"):
        load("gemma3", max_lora_rank=16)
    with pytest.raises(ConfigError, match=r"a takes [0-9,]+ bytes, .* lora_memory is 1,000 bytes"):
        load("llama", lora_memory=1000)


def test_the_plan_holds_the_adapters(load):
    runner = load("gemma3", max_lora_rank=20)
    assert runner.adapters is not None
    assert 0 < runner.adapters.nbytes <= runner.capacity.memory.lora_bytes
