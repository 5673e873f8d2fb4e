"""A writer of checkpoints that generate a given script: real models in which each token decides the next one.

The embeddings are random signs, attention and MLP add nothing, and the output layer maps each token's embedding to the
token after it. A script's text is cut into pieces that occur once, each of which is an entry of the vocabulary. A piece
consists of whole words and quoted texts: where a grammar leaves no choice, it prescribes the tokens, too.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from quire.runtime.engine.text.tokenizer import _BYTE_OF_CHARACTER

HIDDEN = 256
END = "<|end_of_script|>"
ATOM = re.compile(r'"(?:[^"\\]|\\.)*"|</?[^<>\s]*>|\n?```(?:json)?|\w+|.', re.DOTALL)
CHARACTER_OF_BYTE = {byte: character for character, byte in _BYTE_OF_CHARACTER.items()}


def write_scripted_model(
    folder: Path,
    scripts: Mapping[str, str],
    *,
    template: str,
    special: Sequence[str] = (),
    added: Sequence[str] = (),
    whole: Sequence[str] = (),
    context: int = 2048,
) -> Path:
    """Write a checkpoint whose output after a prompt that ends with a key of `scripts` is the script.

    `special` are the names of special tokens, each of which may occur once in all scripts; the keys and `added` are
    tokens that are ordinary text, and so are `whole`, which the scripts write as tokens, each once. `context`
    is the most tokens of a prompt and its output.
    """
    names = [END, *special]
    added = [*added, *whole]
    added += [key for key in scripts if key not in (*special, *added)]
    vocabulary = {CHARACTER_OF_BYTE[byte]: byte for byte in range(256)}
    for name in (*names, *added):
        vocabulary[name] = len(vocabulary)
    following: dict[int, int] = {}
    for key, text in scripts.items():
        before = vocabulary[key]
        for piece in [*_pieces(text, (*special, *whole), vocabulary), END]:
            token = vocabulary.setdefault(piece, len(vocabulary))
            assert before not in following, f"{piece!r} follows a token that another one follows"
            following[before] = token
            before = token
    folder.mkdir(parents=True, exist_ok=True)
    _write_texts(folder, vocabulary, names, added, template, context)
    _write_weights(folder, _weights(len(vocabulary), following))
    return folder


def _pieces(text: str, special: Sequence[str], vocabulary: Mapping[str, int]) -> list[str]:
    """Return special tokens, and pieces of text that the vocabulary lacks, as it writes them."""
    pieces: list[str] = []
    while text:
        name = next((each for each in special if text.startswith(each)), None)
        if name is not None:
            pieces.append(name)
            text = text[len(name) :]
            continue
        end = min((place for each in special if (place := text.find(each)) >= 0), default=len(text))
        for atom in ATOM.finditer(text, 0, end):
            piece = "".join(CHARACTER_OF_BYTE[byte] for byte in text[: atom.end()].encode())
            if piece not in vocabulary and piece not in pieces:
                break
        else:
            piece = pieces.pop() + piece
        pieces.append(piece)
        text = text[atom.end() :]
    return pieces


def _write_texts(
    folder: Path,
    vocabulary: Mapping[str, int],
    names: Sequence[str],
    added: Sequence[str],
    template: str,
    context: int,
) -> None:
    form = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [
            {"id": vocabulary[name], "content": name, "special": name in names, **form} for name in (*names, *added)
        ],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary),
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 64,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "eos_token_id": vocabulary[END],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": template}), "utf-8")


def _weights(num_tokens: int, following: Mapping[int, int]) -> dict[str, npt.NDArray[np.float32]]:
    signs = np.random.default_rng(3).choice(np.array([-1, 1], np.float32), (num_tokens, HIDDEN))
    output = np.zeros((num_tokens, HIDDEN), np.float32)
    for token, after in following.items():
        output[after] += signs[token]
    layer = "model.layers.0."
    shapes = {"q": (64, HIDDEN), "k": (64, HIDDEN), "v": (64, HIDDEN), "o": (HIDDEN, 64)}
    weights: dict[str, npt.NDArray[np.float32]] = {
        f"{layer}self_attn.{name}_proj.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()
    }
    shapes = {"gate": (64, HIDDEN), "up": (64, HIDDEN), "down": (HIDDEN, 64)}
    weights |= {f"{layer}mlp.{name}_proj.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    norms = (f"{layer}input_layernorm", f"{layer}post_attention_layernorm", "model.norm")
    weights |= {f"{name}.weight": np.ones(HIDDEN, np.float32) for name in norms}
    return {**weights, "model.embed_tokens.weight": signs, "lm_head.weight": output}


def _write_weights(folder: Path, weights: Mapping[str, npt.NDArray[np.float32]]) -> None:
    header = {}
    parts = []
    offset = 0
    for name, values in weights.items():
        part = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()  # bf16: all values are small integers
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [offset, offset + len(part)]}
        parts.append(part)
        offset += len(part)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(parts))
