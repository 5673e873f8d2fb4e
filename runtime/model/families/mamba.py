"""The keys of Mamba-2 mixers, and of layers of several kinds, that families share."""

from __future__ import annotations

from math import inf
from typing import Any

from ..config_json import MAX_HEADS, MAX_WIDTH, ConfigTable, num_layers
from ..spec import Mamba

MAX_TAPS = 16  # QUIRE_MAX_TAPS of the kernels
MAX_STATE = 256  # QUIRE_MAX_KEY of the kernels
MAX_INNER = 1 << 18  # columns of all heads
MAX_TIME = 1e12  # highest lower limit of a time step
INFINITY = {"__float__": "Infinity"}  # the form of transformers 5
LAYER_KINDS = {  # transformers 4 and 5
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
}
MAMBA_DEFAULTS: dict[str, Any] = {  # defaults of the config classes of Granite 4 and Falcon-H1
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
MAMBA_KEYS = {  # keys of config.json, and of the metadata of GGUF files
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_ssm": "ssm.inner_size",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
}


def read_mamba(config: ConfigTable, layers: tuple[bool, ...]) -> Mamba:
    """Read the mixers of `layers` from the keys of Granite 4 and Falcon-H1."""
    if config.text("hidden_act", "silu") != "silu":
        raise config.refused("hidden_act", '"silu", which follows the convolution')
    num_heads = config.integer("mamba_n_heads", 1, MAX_HEADS)
    inner = _inner_size(config)
    if inner % num_heads:
        key = "mamba_d_ssm" if "mamba_d_ssm" in config else "mamba_n_heads"
        raise config.refused(key, f"such that mamba_n_heads ({num_heads}) divides the {inner} columns of all heads")
    head_dim = inner // num_heads
    if config.values.get("mamba_d_head") not in (None, "auto", head_dim):
        raise config.refused("mamba_d_head", f"{head_dim}, the {inner} columns of all heads / mamba_n_heads, or auto")
    num_groups = config.integer("mamba_n_groups", 1, num_heads)
    if num_heads % num_groups:
        raise config.refused("mamba_n_groups", f"a divisor of mamba_n_heads ({num_heads})")
    return Mamba(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_size=config.integer("mamba_d_state", 1, MAX_STATE),
        taps=config.integer("mamba_d_conv", 1, MAX_TAPS),
        layers=layers,
        conv_bias=config.flag("mamba_conv_bias", True),
        in_bias=config.flag("mamba_proj_bias", False),
        out_bias=config.flag("mamba_proj_bias", False),
        time_limits=read_time_limits(config, "time_step_limit"),
    )


def read_time_limits(config: ConfigTable, key: str) -> tuple[float, float]:
    """Return the lowest and the highest time step; no limits if the key is absent or null."""
    limits = config.values.get(key)
    if limits is None:
        return 0.0, inf
    if isinstance(limits, list):
        limits = [inf if each == INFINITY else each for each in limits]
    numbers = isinstance(limits, list) and all(type(each) in (int, float) for each in limits)
    if not numbers or len(limits) != 2 or not 0 <= limits[0] <= min(limits[1], MAX_TIME):
        raise config.refused(key, "a list of two numbers that are not negative, the lower one first")
    return float(limits[0]), float(min(limits[1], inf))


def layer_kinds(config: ConfigTable, key: str) -> tuple[str, ...]:
    """Return for each layer mamba or attention; at least one has attention."""
    layers = num_layers(config)
    kinds: Any = config.values.get(key)
    known = isinstance(kinds, list) and all(isinstance(kind, str) and kind in LAYER_KINDS for kind in kinds)
    if not known or len(kinds) != layers:
        raise config.refused(key, f"{layers} times {', '.join(LAYER_KINDS)}")
    found = tuple(LAYER_KINDS[kind] for kind in kinds)
    if "attention" not in found:
        raise config.refused(key, "attention for one layer or more")
    return found


def _inner_size(config: ConfigTable) -> int:
    """Return the columns of all heads: `mamba_d_ssm`, or hidden_size * mamba_expand without it."""
    if "mamba_d_ssm" in config:
        return config.integer("mamba_d_ssm", 1, MAX_INNER)
    inner = config.integer("hidden_size", 1, MAX_WIDTH) * config.integer("mamba_expand", 1, MAX_WIDTH)
    if inner > MAX_INNER:
        raise config.refused("mamba_expand", f"such that all heads have at most {MAX_INNER} columns")
    return inner
