"""Reading of config.json: each key's allowed values, and its default.

Every value has the right type and a size that a machine can hold; anything else raises UnsupportedModel naming the key.
Must not import families, which ask for their keys by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from os.path import isfile
from pathlib import Path
from typing import Any, Literal

from ...kernels.ops import RoutingRule
from ..common.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel
from .spec import DecoderSpec, Experts, Rope

GENERATION_FILE = "generation_config.json"
CONFIG_FILE = "config.json"

MAX_LAYERS = 1024
MAX_HEADS = 1024
MAX_WIDTH = 1 << 20  # largest hidden and intermediate size
MAX_EXPERTS = 1024  # QUIRE_MAX_EXPERTS of the kernels
MAX_VOCAB = 1 << 22
ROUTING_EPS = 1e-20  # epsilon of the sum of the chosen experts' scores
MAX_POSITIONS = 1 << 27
MAX_HEAD_DIM = 512  # largest head of a family but latent keys
MAX_GROUP = 64  # QUIRE_TILE of the kernels: the query heads of one KV head share a tile


class ConfigTable:
    """The object in config.json, or an object inside it.

    Messages begin with `source`. They name a key by its entry in `names`, or by itself after `where`.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str = "",
        source: str = CONFIG_FILE,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.values = values
        self.where = where
        self.source = source
        self.names = names or {}

    def __contains__(self, key: str) -> bool:
        """Return whether the key is present and not null."""
        return self.values.get(key) is not None

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigTable:
        """Return a table with `defaults` for absent keys, as in a config class; null stays null."""
        return ConfigTable({**defaults, **self.values}, self.where, self.source, self.names)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Return an integer in low..high; `default` if the key is absent or null, an error without a default."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.refused(key, f"an integer from {low} to {high}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a number above 0, within bounds that keep arithmetic with it finite in f32."""
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1e-12 <= value <= 1e12:
            raise self.refused(key, "a number from 1e-12 to 1e12")
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return a list of `count` numbers, each as `positive` allows."""
        values = self.values.get(key)
        if not isinstance(values, list) or len(values) != count:
            raise self.refused(key, f"a list of {count} numbers")
        elements = {f"{key}[{index}]": value for index, value in enumerate(values)}
        items = ConfigTable(elements, self.where, self.source)
        return tuple(items.positive(name) for name in items.values)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false; `default` if the key is absent or null."""
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.refused(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string; `default` if the key is absent or null, an error without a default."""
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self.refused(key, "a string")
        return value

    def table(self, key: str) -> ConfigTable:
        """Return the object under `key`; an empty one if the key is absent or null."""
        value = self._present(key, {})
        if not isinstance(value, dict):
            raise self.refused(key, "an object")
        return ConfigTable(value, f"{self.where}{key}.", self.source, self.names)

    def refused(self, key: str, allowed: str) -> UnsupportedModel:
        """Return the error to raise for the value under `key`."""
        absent = key not in self.values or (self.names and self.values[key] is None)  # only JSON has null
        got = "missing" if absent else json.dumps(self.values[key])[:80]
        full = f"{self.where}{key}"
        return UnsupportedModel(f"{self.source}: {self.names.get(full, full)} is {got}; it must be {allowed}")

    def _present(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value


def read_config(folder: str | Path) -> ConfigTable:
    """Read a folder's config.json. Raises ModelNotFound without one, CorruptCheckpoint if it is not a JSON object."""
    path = Path(folder) / CONFIG_FILE
    if not isfile(path):
        raise ModelNotFound(f"{folder} has no {CONFIG_FILE}; a Hugging Face model folder or a .gguf file is needed")
    return ConfigTable(read_object(path))


def generation_end_ids(folder: Path) -> frozenset[int]:
    """Return the end ids in a folder's generation_config.json: models that chat have the end of a message there only.

    None without this file. Other values are left out: the text processor refuses them. Raises CorruptCheckpoint.
    """
    path = folder / GENERATION_FILE
    ids = read_object(path).get("eos_token_id") if isfile(path) else None
    return frozenset(each for each in (ids if isinstance(ids, list) else [ids]) if type(each) is int)


def read_object(path: Path, key: str = "") -> dict[str, Any]:
    """Read the JSON object in a file, or with `key` the object under that key: empty if it is absent or null.

    Raises CorruptCheckpoint for any other content.
    """
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} cannot be read as JSON: {error}") from error
    if key and isinstance(values, dict):
        values = {} if values.get(key) is None else values[key]
    if not isinstance(values, dict):
        raise CorruptCheckpoint(f"{path} holds a JSON {type(values).__name__}, not an object")
    return values


def build_spec(config: ConfigTable, family: str, rope: Rope) -> DecoderSpec:
    """Read the keys that all families share. All layers see all tokens and have the same `rope`.

    A family replaces the fields that differ.
    """
    hidden_size = config.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = config.integer("num_attention_heads", 1, MAX_HEADS)
    num_kv_heads = _num_kv_heads(config, num_heads)
    head_dim = read_head_dim(config)
    layers = num_layers(config)
    if not config.flag("is_causal", True):
        raise config.refused("is_causal", "absent or true: attention is causal")
    return DecoderSpec(
        family=family,
        vocab_size=config.integer("vocab_size", 1, MAX_VOCAB),
        hidden_size=hidden_size,
        num_layers=layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size", 1, MAX_WIDTH),
        norm_eps=config.positive("rms_norm_eps", 1e-6),
        attention_scale=head_dim**-0.5,
        ropes=(rope,) * layers,
        windows=(0,) * layers,
        tie_embeddings=config.flag("tie_word_embeddings", False),
        max_position_embeddings=config.integer("max_position_embeddings", 1, MAX_POSITIONS),
        eos_token_ids=_eos(config),
        activation=read_activation(config, "hidden_act", "silu"),
    )


def read_activation(config: ConfigTable, key: str, default: str | None = None) -> Literal["silu", "gelu_tanh"]:
    """Return the activation of the MLP's gate."""
    name = config.text(key, default)
    if name == "silu":
        return "silu"
    if name == "gelu_pytorch_tanh":
        return "gelu_tanh"
    raise config.refused(key, '"silu" or "gelu_pytorch_tanh"')


def read_head_dim(config: ConfigTable) -> int:
    """Return the elements of a head: `head_dim`, or hidden_size / num_attention_heads if it is absent or null."""
    hidden_size = config.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = config.integer("num_attention_heads", 1, MAX_HEADS)
    if "head_dim" not in config and hidden_size % num_heads:
        raise config.refused("hidden_size", f"a multiple of num_attention_heads ({num_heads}) where head_dim is absent")
    head_dim = config.integer("head_dim", 2, MAX_HEAD_DIM, hidden_size // num_heads)
    if head_dim % 2:
        raise config.refused("head_dim", f"even, because rotary embedding turns pairs (here it is {head_dim})")
    return head_dim


def read_experts(
    config: ConfigTable, number_key: str, size_key: str, *, normalized: bool, layers: tuple[bool, ...] | None = None
) -> Experts:
    """Read a mixture of experts: the keys of their number and size differ between families. Default: in all layers."""
    num_experts = config.integer(number_key, 1, MAX_EXPERTS)
    return Experts(
        num_experts=num_experts,
        top_k=config.integer("num_experts_per_tok", 1, num_experts),
        intermediate_size=config.integer(size_key, 1, MAX_WIDTH),
        rule=RoutingRule(normalized=normalized),
        layers=layers or (True,) * num_layers(config),
    )


def read_experts_in_groups(config: ConfigTable, layers: tuple[bool, ...]) -> Experts:
    """Read experts that sigmoids and a bias choose within groups of experts, by DeepSeek's keys."""
    normalized = config.flag("norm_topk_prob", True)
    experts = read_experts(config, "n_routed_experts", "moe_intermediate_size", normalized=normalized, layers=layers)
    groups = config.integer("n_group", 1, MAX_EXPERTS)
    if experts.num_experts % groups or (groups > 1 and experts.num_experts < 2 * groups):
        raise config.refused("n_group", f"1, or groups of 2 or more of the {experts.num_experts} experts, all as large")
    kept = config.integer("topk_group", 1, groups)
    if kept * (experts.num_experts // groups) < experts.top_k:
        raise config.refused("topk_group", f"such that the groups have {experts.top_k} experts or more")
    rule = RoutingRule(
        normalized=normalized,
        sigmoid=True,
        groups=groups,
        kept_groups=kept,
        eps=ROUTING_EPS,
        scale=config.positive("routed_scaling_factor", 1.0),
    )
    return replace(experts, rule=rule, choice_bias=True)


def shared_experts_size(config: ConfigTable, key: str, low: int, experts: Experts) -> int:
    """Return the columns of the experts that compute every token, of which `key` has the number, at least `low`."""
    size = experts.intermediate_size * config.integer(key, low, MAX_EXPERTS)
    if size > MAX_WIDTH:
        raise config.refused(key, f"such that shared experts have at most {MAX_WIDTH} columns")
    return size


def layers_after(config: ConfigTable, key: str) -> tuple[bool, ...]:
    """Return which layers have experts: all but the first ones, of which `key` has the number."""
    num_dense = config.integer(key, 0, MAX_LAYERS)
    return tuple(layer >= num_dense for layer in range(num_layers(config)))


def num_layers(config: ConfigTable) -> int:
    """Return the number of layers."""
    return config.integer("num_hidden_layers", 1, MAX_LAYERS)


def sliding_window(config: ConfigTable) -> int:
    """Return the tokens that a sliding layer sees; 0 if the key is absent or null."""
    return config.integer("sliding_window", 1, MAX_POSITIONS) if "sliding_window" in config else 0


def qwen_windows(config: ConfigTable) -> tuple[int, ...]:
    """Return Qwen's windows: with `use_sliding_window`, those of `layer_types`, or all from `max_window_layers` on."""
    layers = num_layers(config)
    window = sliding_window(config) if config.flag("use_sliding_window", False) else 0
    if "layer_types" in config:
        return windows_by_type(config, layers, window)
    first = config.integer("max_window_layers", 0, 1 << 30, 28)
    return tuple(window if layer >= first else 0 for layer in range(layers))


def sliding_layers(config: ConfigTable, layers: int, full_every: int) -> list[bool]:
    """Return whether each layer slides, by `sliding_window_pattern`: a list of flags, or all but every N-th; 0: all."""
    pattern = config.values["sliding_window_pattern"]
    if isinstance(pattern, list):
        if len(pattern) != layers or any(flag not in (0, 1) for flag in pattern):
            raise config.refused("sliding_window_pattern", f"an integer, or a list of {layers} flags")
        return [bool(flag) for flag in pattern]
    every = config.integer("sliding_window_pattern", 0, 1 << 30, full_every)
    return [not every or (layer + 1) % every != 0 for layer in range(layers)]


def windows_by_type(config: ConfigTable, layers: int, window: int) -> tuple[int, ...]:
    """Return the windows of `layer_types`, where sliding layers see `window` tokens; 0: the family has none."""
    types = config.values["layer_types"]
    sizes = {"full_attention": 0, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != layers or not all(isinstance(t, str) and t in sizes for t in types):
        raise config.refused("layer_types", f"{layers} times full_attention or sliding_attention")
    if "sliding_attention" in types and not window:
        raise config.refused(
            "use_sliding_window", "true, with a sliding_window, because layer_types has sliding_attention"
        )
    return tuple(sizes[kind] for kind in types)


def _num_kv_heads(config: ConfigTable, num_heads: int) -> int:
    num_kv_heads = config.integer("num_key_value_heads", 1, MAX_HEADS, num_heads)
    if num_heads % num_kv_heads or num_heads // num_kv_heads > MAX_GROUP:
        raise config.refused(
            "num_key_value_heads", f"a divisor of num_attention_heads ({num_heads}), at most {MAX_GROUP} times smaller"
        )
    return num_kv_heads


def _eos(config: ConfigTable) -> tuple[int, ...]:
    """Return the end-of-sequence ids; chat models may have several."""
    if "eos_token_id" not in config:
        return ()
    ids = config.values["eos_token_id"]
    if not isinstance(ids, list):
        return (config.integer("eos_token_id", 0, MAX_VOCAB),)
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= MAX_VOCAB for i in ids):
        raise config.refused("eos_token_id", "a token id or a list of token ids")
    return tuple(ids)
