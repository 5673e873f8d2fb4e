"""A converter of the goldens of encoders to GGUF files, with the names and vocabularies of llama.cpp's converter."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
from quire.runtime.model.weights.safetensors import SafetensorsCheckpoint

from tests.support.gguf_files import encode, widened, write
from tests.support.gguf_metadata import CONTROL, NORMAL, UNKNOWN

Arrays = Mapping[str, npt.NDArray[Any]]
STORED = {  # names on Hugging Face, without the layer -> names in GGUF files
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "emb_ln": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "norm1": "attn_output_norm",
    "mlp.fc11": "ffn_up",
    "mlp.fc12": "ffn_gate",
    "mlp.fc2": "ffn_down",
    "norm2": "layer_output_norm",
    "embeddings.tok_embeddings": "token_embd",
    "embeddings.norm": "token_embd_norm",
    "final_norm": "output_norm",
    "attn_norm": "attn_norm",
    "attn.Wo": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.Wi": "ffn_up",
    "mlp.Wo": "ffn_down",
    "head.dense": "cls",
    "head.norm": "cls.norm",
    "classifier": "cls.output",
    "classifier.dense": "cls",
    "classifier.out_proj": "cls.output",
}
POOLINGS = {"mean": 1, "cls": 2, "lasttoken": 3}


def convert_encoder(folder: Path, path: Path, metadata: Mapping[str, Any] = {}) -> Path:
    """Write a folder of a BERT or a relative of it as a GGUF file in f32; `metadata` adds and replaces keys.

    A file with byte pairs has no vocabulary.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = {"nomic_bert": "nomic-bert", "modernbert": "modern-bert"}.get(config["model_type"], "bert")
    first_position = config["pad_token_id"] + 1 if config["model_type"].endswith("roberta") else 0
    keys = {
        "general.architecture": architecture,
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.attention.head_count": config["num_attention_heads"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.context_length": config["max_position_embeddings"] - first_position,
        f"{architecture}.attention.layer_norm_epsilon": float(config.get("layer_norm_eps", 1e-5)),
        f"{architecture}.attention.causal": False,
        "tokenizer.ggml.token_type_count": config.get("type_vocab_size", 1),
        **_vocabulary(json.loads((folder / "tokenizer.json").read_text())),
    }
    if theta := config.get("rope_parameters", {}).get("rope_theta"):
        keys[f"{architecture}.rope.freq_base"] = float(theta)
    if architecture == "modern-bert":
        ropes = config["rope_parameters"]
        keys["modern-bert.rope.freq_base"] = float(ropes["full_attention"]["rope_theta"])
        keys["modern-bert.rope.freq_base_swa"] = float(ropes["sliding_attention"]["rope_theta"])
        keys["modern-bert.attention.sliding_window"] = config["local_attention"]
        keys["modern-bert.rope.scaling.type"] = "none"
    pooling = folder / "1_Pooling" / "config.json"
    if pooling.is_file():
        keys[f"{architecture}.pooling_type"] = POOLINGS[json.loads(pooling.read_text())["pooling_mode"]]
    tensors = {name: encode(values, "F32") for name, values in _arrays(folder, first_position).items()}
    return write(path, {**keys, **metadata}, tensors)


def _arrays(folder: Path, first_position: int) -> Arrays:
    """Return the tensors under the converter's names; it drops BERT's pooler."""
    checkpoint = SafetensorsCheckpoint(folder)
    arrays = {}
    for name in checkpoint.names():
        bare = re.sub(r"^(roberta|model)\.", "", name).replace(".gamma", ".weight").replace(".beta", ".bias")
        named = re.fullmatch(r"(?:(?:encoder\.)?layers?\.(\d+)\.)?(.+)(\.weight|\.bias)", bare)
        assert named is not None
        if named[2] == "pooler.dense":
            continue
        prefix = "" if named[1] is None else f"blk.{named[1]}."
        values = widened(checkpoint.tensor(name))
        first = first_position if "position_embeddings" in name else 0
        arrays[f"{prefix}{STORED[named[2]]}{named[3]}"] = values[first:]
    return arrays


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of WordPiece or Unigram, and of the special tokens' roles."""
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"] if token["special"]}
    model = tokenizer["model"]
    if model["type"] == "BPE":
        return {}
    if model["type"] == "WordPiece":
        return word_piece_metadata(model["vocab"], special)
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [text for text, _ in model["vocab"]],
        "tokenizer.ggml.scores": [float(score) for _, score in model["vocab"]],
        "tokenizer.ggml.token_type": [
            UNKNOWN if text == "<unk>" else CONTROL if text in special else NORMAL for text, _ in model["vocab"]
        ],
        "tokenizer.ggml.bos_token_id": special["<s>"],
        "tokenizer.ggml.eos_token_id": special["</s>"],
        "tokenizer.ggml.unknown_token_id": special["<unk>"],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }


def word_piece_metadata(vocabulary: Mapping[str, int], special: Mapping[str, int]) -> dict[str, Any]:
    """Return the metadata of a vocabulary of BERT, where pieces that do not begin a word have two number signs."""
    texts = sorted(vocabulary, key=lambda text: vocabulary[text])
    tokens = [text if text in special else text[2:] if text.startswith("##") else f"▁{text}" for text in texts]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if text in special else NORMAL for text in texts],
        "tokenizer.ggml.bos_token_id": special["[CLS]"],
        "tokenizer.ggml.cls_token_id": special["[CLS]"],
        "tokenizer.ggml.seperator_token_id": special["[SEP]"],
        "tokenizer.ggml.unknown_token_id": special["[UNK]"],
        "tokenizer.ggml.padding_token_id": special["[PAD]"],
    }
