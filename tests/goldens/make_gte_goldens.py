"""Write the golden encoders of GTE, whose code transformers does not have: the model is written down here, in torch.

usage: make_gte_goldens.py [OUT_DIR]    OUT_DIR defaults to encoders/ beside this file

The folders have the files that Alibaba publishes, with random weights, and golden.json is as make_encoder_goldens.py
writes it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from make_encoder_goldens import PAIRS, SEED, TEXTS, UNIGRAM, WORD_PIECE, unigram, word_piece
from safetensors.torch import save_file
from torch.nn.functional import gelu, layer_norm, linear, normalize, scaled_dot_product_attention

SHARED: dict[str, Any] = {
    "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 72,
    "max_position_embeddings": 300, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False, "logn_attention_scale": False, "pack_qkv": True, "position_embedding_type": "rope",
    "hidden_dropout_prob": 0.1, "classifier_dropout": None, "unpad_inputs": False,
    "use_memory_efficient_attention": False, "torch_dtype": "bfloat16",
}  # fmt: skip
POOLING = {"word_embedding_dimension": 40, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}

Tensors = dict[str, torch.Tensor]


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "encoders"
    base = {"architectures": ["NewModel"], "model_type": "new", "type_vocab_size": 0, "rope_theta": 500000}
    base |= {"rope_scaling": {"factor": 2.0, "type": "ntk"}}  # gte-base-en-v1.5
    folder = out / "gte"
    words = word_piece()
    config, tensors = write_model(folder, base, words, WORD_PIECE, "")
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    write(
        folder / "modules.json",
        [{"path": path, "type": f"sentence_transformers.models.{kinds[path]}"} for path in kinds],
    )
    write(folder / "1_Pooling" / "config.json", POOLING)
    write(folder / "sentence_bert_config.json", {"max_seq_length": 280, "do_lower_case": False})
    write_golden(folder, words, TEXTS, lambda ids, types: normalize(rows(config, tensors, ids, types)[0], dim=0))

    scores = {"architectures": ["NewForSequenceClassification"], "model_type": "new", "type_vocab_size": 1}
    scores |= {"rope_theta": 20000, "rope_scaling": {"factor": 8.0, "type": "ntk"}, "num_labels": 3}  # multilingual
    folder = out / "gte_scores"
    pieces = unigram()
    config, tensors = write_model(folder, scores, pieces, UNIGRAM, "new.")

    def score(ids: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        first = rows(config, {key.removeprefix("new."): value for key, value in tensors.items()}, ids, types)[0]
        pooled = linear(first, tensors["new.pooler.dense.weight"], tensors["new.pooler.dense.bias"]).tanh()
        return linear(pooled, tensors["classifier.weight"], tensors["classifier.bias"])

    write_golden(folder, pieces, PAIRS, score)


def rows(config: dict[str, Any], tensors: Tensors, ids: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
    """Return the rows of a text, [tokens, hidden]."""
    heads = config["num_attention_heads"]
    hidden = config["hidden_size"]
    dim = hidden // heads
    factor = config["rope_scaling"]["factor"]
    frequencies = 1.0 / (config["rope_theta"] * factor) ** (torch.arange(0, dim, 2).float() / dim) / factor ** (2 / dim)
    angles = torch.outer(torch.arange(len(ids)).float(), frequencies).repeat(1, 2)

    def rotated(x: torch.Tensor) -> torch.Tensor:  # [heads, tokens, dim]
        halves = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1)
        return x * angles.cos() + halves * angles.sin()

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return layer_norm(x, (hidden,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], config["layer_norm_eps"])

    def projected(x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    x = tensors["embeddings.word_embeddings.weight"][ids]
    if config["type_vocab_size"]:
        x = x + tensors["embeddings.token_type_embeddings.weight"][types]
    x = normed(x, "embeddings.LayerNorm")
    for layer in (f"encoder.layer.{index}" for index in range(config["num_hidden_layers"])):
        qkv = projected(x, f"{layer}.attention.qkv_proj").view(len(ids), 3, heads, dim)
        q, k, v = qkv.permute(1, 2, 0, 3)
        attended = scaled_dot_product_attention(rotated(q)[None], rotated(k)[None], v[None])[0]
        x = x + projected(attended.transpose(0, 1).reshape(len(ids), hidden), f"{layer}.attention.o_proj")
        x = normed(x, f"{layer}.attn_ln")
        up, gate = projected(x, f"{layer}.mlp.up_gate_proj").chunk(2, dim=-1)
        x = normed(x + projected(gelu(gate) * up, f"{layer}.mlp.down_proj"), f"{layer}.mlp_ln")
    return x


def shapes(config: dict[str, Any], prefix: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a checkpoint has."""
    hidden = config["hidden_size"]
    intermediate = config["intermediate_size"]
    types = config["type_vocab_size"]
    found: dict[str, tuple[int, ...]] = {f"{prefix}embeddings.word_embeddings.weight": (config["vocab_size"], hidden)}
    if types:
        found[f"{prefix}embeddings.token_type_embeddings.weight"] = (types, hidden)
    linears = {}
    norms = [f"{prefix}embeddings.LayerNorm"]
    for layer in (f"{prefix}encoder.layer.{index}." for index in range(config["num_hidden_layers"])):
        linears[f"{layer}attention.qkv_proj"] = (3 * hidden, hidden)
        linears[f"{layer}attention.o_proj"] = (hidden, hidden)
        linears[f"{layer}mlp.down_proj"] = (hidden, intermediate)
        found[f"{layer}mlp.up_gate_proj.weight"] = (2 * intermediate, hidden)
        norms += [f"{layer}attn_ln", f"{layer}mlp_ln"]
    if "num_labels" in config:
        linears[f"{prefix}pooler.dense"] = (hidden, hidden)
        linears["classifier"] = (config["num_labels"], hidden)
    for name in norms:
        found[f"{name}.weight"] = found[f"{name}.bias"] = (hidden,)
    for name, shape in linears.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return found


def write_model(
    folder: Path, own: dict[str, Any], fast: Any, special: dict[str, Any], prefix: str
) -> tuple[dict[str, Any], Tensors]:
    """Write a folder with random weights; return its config and its tensors in f32."""
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(SEED)
    config = {**SHARED, **own, "vocab_size": fast.get_vocab_size(), "pad_token_id": 0}
    tensors = {}
    for name, shape in shapes(config, prefix).items():
        is_norm = name.endswith(("_ln.weight", "LayerNorm.weight"))
        scale = 0.2 if len(shape) == 1 or "embedding" in name else 0.9 * shape[-1] ** -0.5
        tensors[name] = (torch.randn(shape) * scale + is_norm).bfloat16()
    transformers.PreTrainedTokenizerFast(tokenizer_object=fast, **special).save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write(folder / "config.json", config)
    return config, {name: value.float() for name, value in tensors.items()}


def write_golden(folder: Path, fast: Any, inputs: list[Any], compute: Any) -> None:
    encodings = fast.encode_batch([tuple(each) if isinstance(each, list) else each for each in inputs])
    values = [compute(torch.tensor(each.ids), torch.tensor(each.type_ids)).tolist() for each in encodings]
    ids = [each.ids for each in encodings]
    types = [each.type_ids for each in encodings]
    golden = {"texts": inputs, "prompt": None, "token_ids": ids, "type_ids": types, "values": values}
    (folder / "golden.json").write_text(json.dumps(golden, ensure_ascii=False) + "\n")


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
