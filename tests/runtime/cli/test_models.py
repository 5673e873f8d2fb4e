"""`quire show`: the facts in the headers of a model; `quire models`: supported features."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from quire.runtime.cli.main import run
from quire.runtime.model import BUNDLED_MODEL, FAMILIES

from tests.support.families import GOLDENS
from tests.support.gguf_files import convert, describe, encode, stored_tensors, write
from tests.support.heads import FAMILIES as HEAD_FAMILIES
from tests.support.heads import with_head
from tests.support.image_folder import write_image_folder


def rows(capsys: pytest.CaptureFixture[str], model: Path | None) -> dict[str, list[str]]:
    """Return the texts of each name in the table. The command fails exactly if the table names a problem."""
    status = run(["models"] if model is None else ["show", str(model)])
    out, errors = capsys.readouterr()
    found: dict[str, list[str]] = {}
    for line in out.splitlines():
        found.setdefault(line[:12].strip(), []).append(line[12:])
    refusal = f"quire: {model} cannot be served; each line `problem` says why\n"
    assert (status, errors) == ((2, refusal) if "problem" in found else (0, ""))
    return found


def test_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, BUNDLED_MODEL)
    assert found["model"] == ["demo_model"]
    assert found["family"] == ["qwen3"]
    assert found["context"] == ["2,048 tokens"]
    assert found["stored"] == ["BF16: 46 tensors, 8,001,024 B"]
    assert found["in memory"] == ["bf16 with --weights auto"]
    assert found["tokenizer"] == ["4,096 tokens"]
    assert found["template"] == ["yes"]
    assert "problem" not in found


def test_a_model_with_longrope(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, GOLDENS / "phi3")
    assert found["context"] == ["128 tokens"]
    assert found["LongRoPE"] == ["short factors up to --max-model-len 64; beyond it long ones, for short requests too"]


def test_a_quantized_gguf_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = rows(capsys, convert(BUNDLED_MODEL, tmp_path / "demo-Q4_0.gguf", "Q4_0"))
    assert found["model"] == ["demo-Q4_0"]
    assert found["shape"] == ["4 layers, hidden 256, 4 query / 2 KV heads of 64, vocabulary 4096"]
    assert [line.split(":")[0] for line in found["stored"]] == ["Q4_0", "F32"]
    assert found["in memory"] == ["q4 with --weights auto"]
    assert found["tokenizer"] == ["none: prompts must be token ids"]
    assert found["template"] == ["none: chats cannot be sent"]


def test_a_chat_template_that_cannot_be_used_is_no_problem_of_the_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(BUNDLED_MODEL, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text("{{ .Prompt }}")
    problem = (
        "this model's chat template cannot be used: the chat template is a Go template, as Ollama has, and not Jinja; "
        "--chat-template FILE replaces it"
    )
    assert rows(capsys, folder)["template"] == [f"none: chats cannot be sent; {problem}"]
    assert run(["plan", str(folder), "--kv-cache-memory", "1MiB"]) == 0
    assert capsys.readouterr().err.endswith(f"\nwarning: {problem}\n")


def test_a_file_for_images_beside_a_gguf_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    convert(BUNDLED_MODEL, tmp_path / "demo.gguf")
    (tmp_path / "mmproj-F16.gguf").touch()
    found = rows(capsys, tmp_path)
    assert found["model"] == ["demo"]
    assert found["images"] == ["mmproj-F16.gguf is not read; the model takes text only"]


def test_a_folder_with_a_vision_tower(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_image_folder(tmp_path)
    tower = "vision tower of 2 layers, hidden 48"
    assert rows(capsys, folder)["images"] == [f"{tower}, 45 tokens of an image"]
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"size": {"longest_edge": 192}}))
    assert rows(capsys, folder)["images"] == [
        f"{tower}, 90 tokens of 512 x 512 pixels, 63 tokens of 1920 x 1080 pixels"
    ]
    file.unlink()
    found = rows(capsys, folder)
    assert "images" not in found
    assert found["problem"] == [f"{folder} has no preprocessor_config.json, which says how images are prepared"]


def test_a_vision_tower_that_is_not_supported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlavaModel"], "vision_config": {"hidden_size": 8}}')
    assert rows(capsys, tmp_path)["images"] == ["its vision tower is not supported; the model takes text only"]


def test_a_model_with_states_names_their_size_and_its_limits(capsys: pytest.CaptureFixture[str]) -> None:
    states = "5,760 B per sequence beside its KV pages"
    assert rows(capsys, GOLDENS / "lfm2")["states"] == [states]
    assert "states" not in rows(capsys, BUNDLED_MODEL)


def add_tensor(path: Path, name: str) -> None:
    """Add a number to a file of safetensors."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    end = len(data) - 8 - length
    header[name] = {"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :] + bytes(4))


def test_tensors_that_predict_further_tokens(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = GOLDENS / "qwen3_5"
    shutil.copytree(folder, tmp_path / "mtp")
    add_tensor(tmp_path / "mtp" / "model.safetensors", "mtp.fc.weight")
    assert rows(capsys, tmp_path / "mtp")["not read"] == ["1 tensor that predicts further tokens (MTP)"]
    keys = {"qwen35.block_count": 4, "qwen35.nextn_predict_layers": 1}
    further = {"blk.3.attn_q.weight": encode(np.ones((8, 8), np.float32), "F32")}
    file = write(tmp_path / "a.gguf", describe(folder) | keys, stored_tensors(folder, "F32") | further)
    assert rows(capsys, file)["not read"] == ["1 tensor that predicts further tokens (MTP)"]
    assert not {"head", "not read"} & set(rows(capsys, folder))


@pytest.mark.parametrize("family", HEAD_FAMILIES)
def test_a_head_that_can_draft(capsys: pytest.CaptureFixture[str], tmp_path: Path, family: str) -> None:
    found = rows(capsys, with_head(family, tmp_path / family))
    assert found["head"] == ["19 tensors that predict further tokens (MTP), for --draft-model mtp"]
    assert "not read" not in found


def test_an_unsupported_model_still_shows_its_types(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    metadata = {**describe(BUNDLED_MODEL), "general.architecture": "gpt2"}
    found = rows(capsys, write(tmp_path / "a.gguf", metadata, stored_tensors(BUNDLED_MODEL, "F16")))
    assert [line.split(":")[0] for line in found["stored"]] == ["F16", "F32"]
    (problem,) = found["problem"]
    assert "general.architecture is 'gpt2'; it must be one of" in problem


def test_a_folder_without_weights_says_what_is_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(json.loads((BUNDLED_MODEL / "config.json").read_text())))
    found = rows(capsys, tmp_path)
    assert found["family"] == ["qwen3"]
    assert "has neither model.safetensors nor" in found["problem"][0]


def test_without_a_model_all_that_is_supported_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, None)
    assert len(found["family"]) == len(FAMILIES)
    assert "LlamaForCausalLM, in GGUF files llama" in found["family"]
    assert "in GGUF files bert, nomic-bert, modern-bert" in found["encoder"]
    assert found["safetensors"] == ["BF16, F16, F32"]
    assert found["quantized"] == ["gptq, awq, auto-round, compressed-tensors, fp8, fbgemm_fp8, modelopt"]
    assert found["GGUF"] == [
        "BF16, F16, F32, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K, MXFP4, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, "
        "IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0"
    ]
    assert found["tokenizer"] == [
        "tokenizer.json, in GGUF files gpt2, llama, gemma4, bert, t5; tokenizer.ggml.pre may be:"
    ]
    assert "default, llama-bpe," in found[""][0]


def test_no_model_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith(f"quire: {tmp_path / 'nowhere'} ")
