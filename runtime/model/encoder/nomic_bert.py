"""NomicBERT, of nomic-embed-text 1 and 1.5: BERT with rotary embeddings, gated SiLU and no biases.

Its config.json comes from transformers 5, or from the model's own code, with GPT-2's names.
"""

from __future__ import annotations

import json
from dataclasses import replace

from ..config_json import ConfigTable
from ..config_rope import read_rope
from .bert import MAX_TYPES
from .family import EncoderFamily, build_bert_spec, read_named
from .spec import BertSpec, EncoderNames, MlpActivation

OWN_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
    "rope_theta": "rotary_emb_base",
}
OWN_VALUES = {  # key that could change the model -> its only supported value and default
    "prenorm": False, "parallel_block": False, "causal": False, "rotary_emb_interleaved": False,
    "rotary_emb_fraction": 1.0, "use_rms_norm": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": None,
    "qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
}  # fmt: skip
ACTIVATIONS: dict[str, MlpActivation] = {"silu": "silu", "swiglu": "silu"}
NAMES = EncoderNames(
    embedding_norm="emb_ln",
    layer="encoder.layers.{}.",
    qkv=("attn.Wqkv",),
    o="attn.out_proj",
    attention_norm="norm1",
    up=("mlp.fc12", "mlp.fc11"),
    down="mlp.fc2",
    mlp_norm="norm2",
)


def read_nomic_bert(config: ConfigTable) -> BertSpec:
    """Read a `NomicBertModel`."""
    for key, value in OWN_VALUES.items():
        if key in config and config.values[key] != value:
            raise config.refused(key, f"{json.dumps(value)} or absent")
    renamed = {key: config.values[own] for key, own in OWN_NAMES.items() if config.values.get(own) is not None}
    names = {**config.names, **_shown(config)}
    config = ConfigTable({"rope_theta": 1000.0, **renamed, **config.values}, source=config.source, names=names)
    activation = read_named(config, "hidden_act", ACTIVATIONS, "silu")
    return replace(
        build_bert_spec(config, "nomic_bert", activation, read_rope(config)),
        gated=True,
        num_types=config.integer("type_vocab_size", 1, MAX_TYPES, 2),
        qkv_bias=False,
        o_bias=False,
        up_bias=False,
        down_bias=False,
        names=NAMES,
    )


def _shown(config: ConfigTable) -> dict[str, str]:
    """Return the names of keys in messages: the keys that config.json has."""
    return {key: own for key, own in OWN_NAMES.items() if key not in config.values and own in config.values}


NOMIC_BERT = EncoderFamily("NomicBert", ("nomic_bert",), read_nomic_bert)
