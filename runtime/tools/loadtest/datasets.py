"""Which requests are sent: flags of `vllm bench serve`, its defaults, and the datasets they name.

It must not know when requests are sent or to whom. One invariant: the same options give the same requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Literal

from ...common.errors import ConfigError
from ..traffic import MAX_LENGTH, Arrival, check_number, read_azure, read_burstgpt, read_mooncake
from .drawn import RandomTokens, length_bounds, prefix_repetition_requests, random_requests
from .request import Request
from .texts import CountTokens, custom_requests, sharegpt_requests

DatasetName = Literal["random", "sharegpt", "custom", "prefix_repetition", "mooncake", "azure", "burstgpt"]
TRACES = {"mooncake": read_mooncake, "azure": read_azure, "burstgpt": read_burstgpt}
DRAWN = ("random", "prefix_repetition")
PRESCRIBED = ("random", *TRACES)  # how long the output is to be, whatever the model would say
MAX_REQUESTS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    dataset_name: DatasetName = "random"
    """random or prefix_repetition (drawn tokens), sharegpt, custom (JSONL of prompts), or a recorded trace: mooncake,
    azure, burstgpt."""
    dataset_path: Path | None = None
    "Its file."
    num_prompts: int | None = None
    "Requests to send. Default 1000, or what --duration takes."
    seed: int = 0
    "Of everything that is drawn."
    disable_shuffle: bool = False
    "Keep the order of the file."
    no_oversample: bool = False
    "End where a file ends instead of starting again."
    random_input_len: int = 1024
    "Tokens of a prompt, without its prefix."
    random_output_len: int = 128
    "Tokens of an answer."
    random_range_ratio: float = 0.0
    "Lengths are drawn from length * (1 - ratio) to length * (1 + ratio)."
    random_prefix_len: int = 0
    "Tokens that all prompts begin with."
    prefix_repetition_prefix_len: int = 256
    "Tokens of a prefix that several prompts share."
    prefix_repetition_suffix_len: int = 256
    "Tokens after it that are a prompt's own."
    prefix_repetition_num_prefixes: int = 10
    "Different prefixes."
    prefix_repetition_output_len: int = 128
    "Tokens of an answer."
    sharegpt_output_len: int | None = None
    "Tokens of an answer. Default: as many as the recorded one."
    custom_output_len: int | None = None
    "Tokens of an answer. Default: what the line says, or 256."


def check_dataset(options: DatasetOptions) -> None:
    """Raises ConfigError."""
    name, path = options.dataset_name, options.dataset_path
    if name in DRAWN and path is not None:
        raise ConfigError(f"--dataset-path: --dataset-name {name} is drawn and reads no file")
    if name not in DRAWN and path is None:
        raise ConfigError(f"--dataset-name {name} needs --dataset-path FILE")
    check_number("--seed", options.seed, 0, 2**63)
    check_number("--num-prompts", options.num_prompts, 1, MAX_REQUESTS)
    for field, least in (
        ("random_input_len", 0),
        ("random_output_len", 1),
        ("random_prefix_len", 0),
        ("prefix_repetition_prefix_len", 0),
        ("prefix_repetition_suffix_len", 1),
        ("prefix_repetition_num_prefixes", 1),
        ("prefix_repetition_output_len", 1),
        ("sharegpt_output_len", 1),
        ("custom_output_len", 1),
    ):
        check_number(f"--{field.replace('_', '-')}", getattr(options, field), least, MAX_LENGTH)
    if not 0 <= options.random_range_ratio < 1:
        raise ConfigError(f"--random-range-ratio must be from 0 to below 1, not {options.random_range_ratio:g}")
    if options.random_prefix_len + length_bounds(options.random_input_len, options.random_range_ratio, 0)[0] < 1:
        raise ConfigError("--random-input-len, --random-range-ratio and --random-prefix-len allow for empty prompts")


def read_trace(options: DatasetOptions, limit: int | None) -> list[Arrival]:
    """The first `limit` requests of a recorded trace, from time 0 on. Raises ConfigError."""
    return TRACES[options.dataset_name](_path(options), min(limit or MAX_REQUESTS, MAX_REQUESTS))


def dataset_requests(
    options: DatasetOptions, tokens: RandomTokens, count_tokens: CountTokens | None = None, limit: int | None = None
) -> Iterator[Request]:
    """The requests of a dataset without times, without end unless `no_oversample`; of a file, `limit` different ones.

    Raises ConfigError for a file that is not what it should be, and where ShareGPT's answers must be counted in tokens
    and there is nothing to do it.
    """
    if options.dataset_name == "random":
        return random_requests(
            tokens,
            input_len=options.random_input_len,
            output_len=options.random_output_len,
            range_ratio=options.random_range_ratio,
            prefix_len=options.random_prefix_len,
        )
    if options.dataset_name == "prefix_repetition":
        return prefix_repetition_requests(
            tokens,
            prefix_len=options.prefix_repetition_prefix_len,
            suffix_len=options.prefix_repetition_suffix_len,
            num_prefixes=options.prefix_repetition_num_prefixes,
            output_len=options.prefix_repetition_output_len,
            shuffle=not options.disable_shuffle,
        )
    shuffle = None if options.disable_shuffle else Random(options.seed)
    if options.dataset_name == "sharegpt":
        read = sharegpt_requests(_path(options), options.sharegpt_output_len, count_tokens, shuffle)
    else:
        read = custom_requests(_path(options), options.custom_output_len, count_tokens, shuffle)
    requests = list(islice(read, limit))
    if not requests:
        raise ConfigError(f"{options.dataset_path} has no requests that can be used")
    return iter(requests) if options.no_oversample else cycle(requests)


def _path(options: DatasetOptions) -> Path:
    assert options.dataset_path is not None, "check_dataset has seen to it"
    return options.dataset_path
