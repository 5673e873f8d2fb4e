"""Hyper-parameters in the metadata of GGUF files, read into a `DecoderSpec` by the readers of config.json.

A family's `GGUFFormat` maps metadata keys to keys of config.json, and has the names of tensors. Must not
import families.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..common.errors import UnsupportedModel
from .config_json import MAX_EXPERTS, MAX_HEADS, MAX_LAYERS, ConfigTable, num_layers, read_head_dim
from .gguf_rope import LONG_ROPE, LONG_ROPE_SCALE, ROPE_FREQS, has_long_rope, rope_scaling, with_divisors
from .spec import DecoderSpec, TensorNames
from .weights import Checkpoint
from .weights.gguf import GGUFFile, Metadata
from .weights.gguf_checkpoint import GGUFCheckpoint
from .weights.paired_rows import PairedRows, neighboring_pairs
from .weights.tensors import check_tensors

RMS_EPS, LAYER_NORM_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
# Keys of config.json, and the metadata keys with the same values, after "<architecture>.".
KEYS: dict[str, str] = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "rms_norm_eps": RMS_EPS,
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "rope_scaling.rope_type": "rope.scaling.type",
    "rope_scaling.factor": "rope.scaling.factor",
    "rope_scaling.original_max_position_embeddings": "rope.scaling.original_context_length",
    "rope_scaling.attention_factor": "rope.scaling.yarn_attn_factor",
    "rope_scaling.beta_fast": "rope.scaling.yarn_beta_fast",
    "rope_scaling.beta_slow": "rope.scaling.yarn_beta_slow",
}
# The same for families with LayerNorm.
LAYER_NORM_KEYS = {key: suffix for key, suffix in KEYS.items() if suffix != RMS_EPS} | {
    "layer_norm_eps": LAYER_NORM_EPS
}
PER_LAYER = (  # keys with one value, or one for each layer
    "attention.head_count",
    "attention.head_count_kv",
    "feed_forward_length",
    "expert_feed_forward_length",
    "expert_used_count",
)
EXPERT_KEYS = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}

GGUF_NAMES = TensorNames(
    embedding="token_embd",
    layer="blk.{}.",
    input_norm="attn_norm",
    qkv=("attn_q", "attn_k", "attn_v"),
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    o="attn_output",
    latent_q="attn_q",
    latent_q_a="attn_q_a",
    latent_q_norm="attn_q_a_norm",
    latent_q_b="attn_q_b",
    latent_kv_a="attn_kv_a_mqa",
    latent_norm="attn_kv_a_norm",
    latent_kv_b="attn_kv_b",
    latent_k_b="attn_k_b",
    latent_v_b="attn_v_b",
    conv_shape=(),
    mamba_in="ssm_in",
    mamba_conv="ssm_conv1d",
    mamba_a="ssm_a",
    mamba_time_bias="ssm_dt.bias",
    mamba_skip="ssm_d",
    mamba_norm="ssm_norm",
    mamba_out="ssm_out",
    of_llama_cpp=True,
    attention_post_norm="post_attention_norm",
    layer_scale="layer_output_scale.weight",
    layer_table="per_layer_token_embd",
    layer_projection="per_layer_model_proj",
    layer_norm="per_layer_proj_norm",
    layer_gate="inp_gate",
    layer_out="proj",
    layer_post_norm="post_norm",
    beside_norm="pre_ffw_norm_2",
    beside_post_norm="post_ffw_norm_2",
    beside_mlp_post_norm="post_ffw_norm_1",
    router_scale="ffn_gate_inp.scale",
    expert_scales="ffn_down_exps.scale",
    mlp_norm="ffn_norm",
    gate_up=("ffn_gate", "ffn_up"),
    down="ffn_down",
    mlp_post_norm="post_ffw_norm",
    router="ffn_gate_inp",
    choice_bias="exp_probs_b.bias",
    expert_gate_up=("ffn_gate_exps", "ffn_up_exps"),
    expert_down="ffn_down_exps",
    shared_gate_up=("ffn_gate_shexp", "ffn_up_shexp"),
    shared_down="ffn_down_shexp",
    shared_gate="ffn_gate_inp_shexp",
    shared_gate_shape=(),
    final_norm="output_norm",
    lm_head="output",
)
FUSED_QKV = "attn_qkv"  # instead of three tensors
FUSED_EXPERTS = "ffn_gate_up_exps"  # instead of two tensors
NEXT_TOKENS = "nextn_predict_layers"  # the number of layers after the decoder's, which predict further tokens
GATING = "expert_gating_func"  # the scores of routers; each family that reads the key has a default of its own
SIGMOID = 2  # the value of GATING for routers with sigmoids
QUANTIZATION_VERSION = "general.quantization_version"
QUANTIZATION = 2  # the version of GGML's block formats
POOLING_TYPE = "pooling_type"
RANK = 4  # the pooling of models that score
SCORING_LAYER = "cls.output"  # the last layer of a model that scores
EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")

NO_TOKEN = (-1, 0xFFFFFFFF)  # ids that converters write for a token that the model does not have

# Keys that families may ignore only while they have one of these values, which change nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.sliding_window": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    GATING: (0, 1),  # 1: softmax
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.dimension_sections": (),
    "rope.scaling.alpha": (0,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}


@dataclass(frozen=True, slots=True)
class GGUFFormat:
    """The form of a family's GGUF files: metadata keys, and names of tensors."""

    architecture: str  # general.architecture
    keys: Mapping[str, str] = field(default_factory=lambda: KEYS)
    names: TensorNames = GGUF_NAMES
    neighboring_pairs: bool = False  # a rotated pair is two neighboring rows of q and k, not rows half a head apart
    experts: bool = False  # True: this family, among several with the same architecture, has experts
    latent: bool = False  # heads are those of latent attention: their sizes are in keys of the family's own
    divides_full_layers: bool = False  # divisors of frequencies are those of layers without a window alone
    rotates: bool = True  # False: heads are never rotated, and the size of their rotated part has no effect
    bare: tuple[str, ...] = ()  # names of a layer's weights that files have without .weight
    marker: str = ""  # key, not 0, in the files of this family alone, among several with the same architecture
    marked_by: int = 0  # value of the marker in these files; 0: any value but 0
    derive: Callable[[ConfigTable], Mapping[str, Any]] = lambda config: {}  # keys of config.json that files do not have
    tiles_value_heads: bool = False  # value heads of gated delta nets are sorted by their number within a key head

    def open(self, file: GGUFFile, read: Callable[[ConfigTable], DecoderSpec]) -> tuple[DecoderSpec, Checkpoint]:
        """Return the spec and the tensors; `read` is the reader of config.json. Raises ModelError."""
        used = {*self.keys.values(), *([LONG_ROPE_SCALE] if has_long_rope(file) else [])}
        check_neutral(file.metadata, self.architecture, NEUTRAL, used)
        for name in self._bare_names(file):
            file.tensors[f"{name}.weight"] = file.tensors.pop(name)
        if self.experts:
            file.metadata.integer(f"{self.architecture}.expert_count", 1, MAX_EXPERTS)
        names = self._names(file)
        spec = with_divisors(read(self._config(file, names)), file, self.divides_full_layers)
        spec = replace(spec, names=names, norm_offset=0.0)  # the converter adds the offset to the norms
        if self.tiles_value_heads and spec.delta is not None:
            delta = replace(spec.delta, tiled=spec.delta.num_key_heads < spec.delta.num_value_heads)
            spec = replace(spec, delta=delta)
        checkpoint = GGUFCheckpoint(file)
        factors = {ROPE_FREQS, *(LONG_ROPE.values() if has_long_rope(file) else ())}
        unread = unread_layers(file, spec.names)
        used_tensors = check_tensors(spec, checkpoint) | factors | _tensors_of_readers(spec) | _head(file.metadata)
        if unused := {name for name in file.tensors.keys() - used_tensors if not name.startswith(unread)}:
            raise UnsupportedModel(f"{file.path} has tensor {min(unused)}, which {self.architecture} does not use")
        if quantized := checkpoint.quantized():
            file.metadata.integer(QUANTIZATION_VERSION, QUANTIZATION, QUANTIZATION, QUANTIZATION)
        tensors = PairedRows(checkpoint, neighboring_pairs(spec)) if self.neighboring_pairs else checkpoint
        return replace(spec, quantized=quantized), tensors

    def is_marked(self, metadata: Metadata) -> bool:
        """Return whether a file has the mark of this family, among several with the same architecture."""
        value = metadata.get(f"{self.architecture}.{self.marker}") if self.marker else None
        return value == self.marked_by if self.marked_by else bool(value)

    def _bare_names(self, file: GGUFFile) -> list[str]:
        return [name for name in file.tensors if name.startswith("blk.") and name.split(".", 2)[-1] in self.bare]

    def _names(self, file: GGUFFile) -> TensorNames:
        """Return the names of the tensors. In files of any family, q, k and v may be one tensor, as gate and up."""
        names = self.names
        first = names.layer.format(0)
        if FUSED_QKV not in names.delta_qkv and f"{first}{FUSED_QKV}.weight" in file.tensors:
            names = replace(names, qkv=(FUSED_QKV,))
        if f"{FUSED_EXPERTS}.weight" in {name.split(".", 2)[-1] for name in file.tensors}:
            names = replace(names, expert_gate_up=(FUSED_EXPERTS,))
        return names

    def _config(self, file: GGUFFile, names: TensorNames) -> ConfigTable:
        """Return the metadata in the form of config.json.

        A key that is absent is null, so that the defaults of the family's config class do not apply.
        """
        metadata = file.metadata
        keys = {key: f"{self.architecture}.{suffix}" for key, suffix in self.keys.items()}
        found = {key: self._value(metadata, suffix) for key, suffix in self.keys.items()}
        scaling = {
            key.partition(".")[2]: value
            for key, value in found.items()
            if key.startswith("rope_scaling.") and value is not None
        }
        values: dict[str, Any] = {
            **found,
            **_found_in_tensors(file, names),
            "rope_scaling": rope_scaling(file, self.architecture, scaling),
            "eos_token_id": [metadata[key] for key in EOS_KEYS if metadata.get(key, -1) not in NO_TOKEN],
        }
        keys |= {"vocab_size": f"the number of rows of {names.embedding}.weight", "eos_token_id": EOS_KEYS[0]}
        if has_long_rope(file):
            keys["rope_scaling.attention_factor"] = f"{self.architecture}.{LONG_ROPE_SCALE}"
        config = ConfigTable(values, source=str(file.path), names=keys)
        head_dim = self._head_dim(config, metadata)
        if "partial_rotary_factor" in self.keys:
            values["partial_rotary_factor"] = self._rotated(metadata, head_dim)
        return ConfigTable({**values, **self.derive(config)}, source=str(file.path), names=keys)

    def _value(self, metadata: Metadata, suffix: str) -> Any:
        """Return a value; None where the key is absent or has a value without effect."""
        value = metadata.get(f"{self.architecture}.{suffix}")
        if suffix in PER_LAYER and isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        return None if suffix != GATING and value in NEUTRAL.get(suffix, ()) else value

    def _head_dim(self, config: ConfigTable, metadata: Metadata) -> int:
        """Return the size of a head.

        Raises UnsupportedModel for metadata that the keys of config.json cannot express: heads of different sizes, or a
        partial rotation that the family does not have.
        """
        eps = next(key for key, suffix in self.keys.items() if suffix in (RMS_EPS, LAYER_NORM_EPS))
        if eps not in config:
            raise config.refused(eps, "a number from 1e-12 to 1e12")
        head_dim = read_head_dim(config)
        if self.latent:
            return head_dim
        whole = [] if "partial_rotary_factor" in self.keys or not self.rotates else ["rope.dimension_count"]
        for suffix in ("attention.value_length", *whole):
            key = f"{self.architecture}.{suffix}"
            if metadata.get(key, head_dim) != head_dim:
                raise metadata.refused(key, f"{head_dim}, the size of a head")
        return head_dim

    def _rotated(self, metadata: Metadata, head_dim: int) -> float:
        """Return the part of each head that is rotated."""
        key = f"{self.architecture}.{self.keys['partial_rotary_factor']}"
        rotated = metadata.integer(key, 2, head_dim, head_dim)
        if rotated % 2:
            raise metadata.refused(key, "even")
        return 1.0 if rotated == head_dim else (rotated + 0.5) / head_dim  # the reader rounds the product down


def check_neutral(
    metadata: Metadata, architecture: str, neutral: Mapping[str, tuple[object, ...]], used: Collection[str] = ()
) -> None:
    """Refuse a key that no reader has `used` and whose value is not `neutral`. Raises UnsupportedModel."""
    for suffix, allowed in neutral.items():
        key = f"{architecture}.{suffix}"
        if suffix not in used and key in metadata and metadata[key] not in allowed:
            raise metadata.refused(key, f"absent{''.join(f' or {value}' for value in allowed)}")


def unread_layers(file: GGUFFile, names: TensorNames = GGUF_NAMES) -> tuple[str, ...]:
    """Return the beginnings of the names of tensors that predict further tokens: those of the last layers."""
    architecture = file.metadata.text("general.architecture")
    count = file.metadata.integer(f"{architecture}.{NEXT_TOKENS}", 0, MAX_LAYERS, 0)
    end = file.metadata.integer(f"{architecture}.block_count", 0, MAX_LAYERS, 0)
    return tuple(names.layer.format(layer) for layer in range(max(end - count, 0), end))


def read_kv_heads(config: ConfigTable) -> tuple[int, tuple[bool, ...]]:
    """Return the number of KV heads, and whether each layer has attention: those without it have 0."""
    heads = config.values["num_key_value_heads"]
    layers = num_layers(config)
    each = heads if isinstance(heads, list) else [heads] * layers
    if len(each) != layers or any(type(count) is not int or not 0 <= count <= MAX_HEADS for count in each):
        raise config.refused("num_key_value_heads", f"a number, or one for each of {layers} layers")
    if len(set(each) - {0}) != 1:
        raise config.refused("num_key_value_heads", "the same number in all layers with attention, 0 in the others")
    return max(each), tuple(count > 0 for count in each)


def _found_in_tensors(file: GGUFFile, names: TensorNames) -> dict[str, Any]:
    """Return the keys of config.json that follow from the tensors, and the size of the vocabulary."""
    suffixes = {name.split(".", 2)[-1] for name in file.tensors}  # names without layers
    keys, values = (f".{name}.weight" for name in (names.qkv * 3)[1:3])
    embedding = file.tensors.get(f"{names.embedding}.weight")
    return {
        "attention_bias": f"{names.qkv[0]}.bias" in suffixes,
        "attention_k_eq_v": any(
            name.endswith(keys) and f"{name.removesuffix(keys)}{values}" not in file.tensors for name in file.tensors
        ),
        "mlp_bias": f"{names.gate_up[0]}.bias" in suffixes,
        "mlp_norm": f"{names.mlp_norm}.weight" in suffixes,
        "qk_norm": f"{names.q_norm}.weight" in suffixes,
        "mamba_conv_bias": f"{names.mamba_conv}.bias" in suffixes,
        "mamba_rms_norm": f"{names.mamba_norm}.weight" in suffixes,
        "tie_word_embeddings": f"{names.lm_head}.weight" not in file.tensors,
        "vocab_size": None if embedding is None else embedding.shape[0],
    }


def _tensors_of_readers(spec: DecoderSpec) -> set[str]:
    """Return the keys and values of layers that read another layer's: files may have them without use."""
    kinds = ("weight", "bias") if spec.qkv_bias else ("weight",)
    names = [f"{spec.names.k_norm}.weight", *(f"{name}.{kind}" for name in spec.names.qkv[1:] for kind in kinds)]
    readers = [layer for layer in range(spec.num_layers) if not spec.stores_kv(layer)]
    return {f"{spec.names.layer.format(layer)}{name}" for layer in readers for name in names}


def _head(metadata: Metadata) -> set[str]:
    """Return the tensor that scores texts, which only the reader of encoders uses."""
    kind = metadata.get(f"{metadata.text('general.architecture')}.{POOLING_TYPE}")
    return {f"{SCORING_LAYER}.weight"} if kind == RANK else set()
