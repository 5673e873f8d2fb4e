"""The options of `quire loadtest`, with the names and defaults of `vllm bench serve`, and their checks.

The strings below the fields are the command line's help. Every check raises ConfigError.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from ...common.errors import ConfigError
from ...engine.validator import MAX_INPUTS
from ..checks import check_number
from ..traffic import MAX_LENGTH

DatasetName = Literal["random", "sharegpt", "custom", "prefix_repetition", "mooncake", "azure", "burstgpt"]
RampUp = Literal["linear", "exponential"]

SYNTHETIC = ("random", "prefix_repetition")  # datasets of random token ids, read from no file
TRACES = ("mooncake", "azure", "burstgpt")
FIXED_OUTPUT = ("random", *TRACES)  # datasets that prescribe the length of each answer, so EOS is ignored

COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"

MAX_REQUESTS = 1_000_000
MAX_RATE = 1e6  # requests per second
MAX_SECONDS = 1e7
MAX_VOCAB_SIZE = 10_000_000


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """The server under load."""

    backend: Literal["quire", "openai"] = "quire"
    "Protocol: Quire's own, or OpenAI's API over HTTP."
    base_url: str | None = None
    (
        "Address of the server: host:port, [v6]:port or unix:/path for quire, several with commas between them; "
        "http://HOST:PORT for openai. "
        "Default: start a server on the bundled model for the run; for openai http://127.0.0.1:8000."
    )
    host: str | None = None
    "Host, instead of --base-url. Default 127.0.0.1."
    port: int | None = None
    "Port, instead of --base-url. Default 7070, for openai 8000."
    endpoint: str = COMPLETIONS
    "For openai: /v1/completions or /v1/chat/completions."
    model: str | None = None
    "Name of the model. Default: the first that the server lists."
    token: str | None = None
    "API key. Default: QUIRE_TOKEN, for openai OPENAI_API_KEY, which process lists do not show."
    tls: bool = False
    "For quire: connect with TLS, to a server whose certificate the system trusts."
    tls_ca: Path | None = None
    "For quire: connect with TLS and trust the certificates in this PEM file."
    tokenizer: Path | None = None
    (
        "Folder with the model's tokenizer.json, to count the tokens of text and to make text of random tokens. "
        "Not needed for a Quire server, which tokenizes itself."
    )
    vocab_size: int | None = None
    "Random token ids are below this. Default: from the server or the tokenizer, else 1000."
    num_connections: int = 1
    (
        "For quire: connections, used in turn; at least one per server. "
        "For openai: connections opened before the run, best one per user."
    )
    task: Literal["generate", "embed"] = "generate"
    "What requests ask for. embed, for quire: vectors; throughput and output tokens then count texts."
    texts_per_request: int = 1
    "For embed: texts of a request; each is the request's prompt."
    deadline_ms: int | None = None
    "For quire: deadline of every request in milliseconds, from its arrival at the server."


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Sampling parameters, named as in both APIs. None: the server's default."""

    ignore_eos: bool = False
    "Generate to the full length. Always on for random prompts and recorded traces."
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None

    def given(self) -> dict[str, Any]:
        """Return the parameters that were set."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value is not False}


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """The requests of a load test."""

    dataset_name: DatasetName = "random"
    (
        "random or prefix_repetition (random tokens), sharegpt, custom (JSONL of prompts), or a recorded trace: "
        "mooncake, azure, burstgpt."
    )
    dataset_path: Path | None = None
    "File of the dataset."
    num_prompts: int | None = None
    "Number of requests. Default 1000, or as many as --duration allows."
    seed: int = 0
    "Seed of all random choices."
    disable_shuffle: bool = False
    "Keep the order of the file."
    no_oversample: bool = False
    "Stop at the end of a file instead of starting again."
    random_input_len: int = 1024
    "Tokens of a prompt, without its prefix."
    random_output_len: int = 128
    "Tokens of an answer."
    random_range_ratio: float = 0.0
    "Lengths vary from length * (1 - ratio) to length * (1 + ratio)."
    random_prefix_len: int = 0
    "Tokens that all prompts start with."
    prefix_repetition_prefix_len: int = 256
    "Tokens of a prefix that several prompts share."
    prefix_repetition_suffix_len: int = 256
    "Tokens after the prefix, different in each prompt."
    prefix_repetition_num_prefixes: int = 10
    "Number of different prefixes."
    prefix_repetition_output_len: int = 128
    "Tokens of an answer."
    sharegpt_output_len: int | None = None
    "Tokens of an answer. Default: as many as in the recorded answer."
    custom_output_len: int | None = None
    "Tokens of an answer. Default: the line's output_tokens, or 256."


@dataclass(frozen=True, kw_only=True)
class Pacing:
    """When requests are sent.

    Open loop: at `request_rate` or by the ramp, independent of the server's speed. Closed loop, with rate inf and a
    `max_concurrency`: this number of users, each of which sends its next request when the previous one has ended.
    """

    request_rate: float = math.inf
    "Requests per second; inf sends all at once, or with --max-concurrency whenever one has ended."
    burstiness: float = 1.0
    "Shape of the gamma distribution of intervals: 1 is Poisson, below 1 comes in bursts, inf is constant."
    max_concurrency: int | None = None
    "Maximum number of requests that run at once."
    ramp_up_strategy: RampUp | None = None
    "linear or exponential, from --ramp-up-start-rps to --ramp-up-end-rps over all requests."
    ramp_up_start_rps: float | None = None
    "Requests per second at the start."
    ramp_up_end_rps: float | None = None
    "Requests per second at the end."
    duration: float | None = None
    "Seconds after which no request is sent; running requests still finish."
    self_timed: bool | None = None
    "Send at the times of a recorded trace, rescaled to --request-rate. Default on for traces."
    num_warmups: int = 1
    "Requests sent before the measurement, one after another."

    @property
    def closed_loop(self) -> bool:
        return self.max_concurrency is not None and self.ramp_up_strategy is None and math.isinf(self.request_rate)


@dataclass(frozen=True, kw_only=True)
class ClientBehavior:
    """The behavior of clients, chosen at random for each request."""

    cancel_rate: float = 0.0
    "Share of requests, 0 to 1, that their client cancels at a random token of the answer."
    slow_reader_rate: float = 0.0
    "Share of requests, 0 to 1, whose client pauses after each chunk."
    slow_reader_ms: float = 100.0
    "Length of that pause in milliseconds."


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The requests of a load test, their times, and the behavior of clients."""

    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    pacing: Pacing = field(default_factory=Pacing)
    behavior: ClientBehavior = field(default_factory=ClientBehavior)


def length_bounds(length: int, ratio: float, least: int) -> tuple[int, int]:
    """Return the least and the greatest length, both inclusive as in vLLM."""
    return max(least, math.floor(length * (1 - ratio))), max(least, math.ceil(length * (1 + ratio)))


def check_target(options: TargetOptions) -> None:
    if options.base_url is not None and (options.host is not None or options.port is not None):
        raise ConfigError("base_url names the whole address: leave out `host` and `port`")
    if options.backend == "quire" and options.base_url is not None and "://" in options.base_url:
        raise ConfigError(
            f"base_url: {options.base_url!r} is not allowed; write host:port, [v6]:port or unix:/path, or use "
            "`backend` openai for an http URL"
        )
    if options.backend != "quire" and options.deadline_ms is not None:
        raise ConfigError("deadline_ms is for `backend` quire: OpenAI's API has no deadlines")
    if options.backend != "quire" and (options.tls or options.tls_ca):
        raise ConfigError("tls is for `backend` quire: write https:// before the address of another")
    if options.backend != "quire" and options.task != "generate":
        raise ConfigError("task embed is for `backend` quire")
    if options.texts_per_request != 1 and options.task != "embed":
        raise ConfigError("texts_per_request is for `task` embed")
    check_number("texts_per_request", options.texts_per_request, 1, MAX_INPUTS)
    check_number("port", options.port, 1, 65535)
    check_number("deadline_ms", options.deadline_ms, 1, 1e9)
    check_number("num_connections", options.num_connections, 1, 4096)
    check_number("vocab_size", options.vocab_size, 1, MAX_VOCAB_SIZE)


def check_load(options: LoadOptions) -> None:
    check_dataset(options.dataset)
    check_pacing(options.pacing)
    check_number("cancel_rate", options.behavior.cancel_rate, 0, 1)
    check_number("slow_reader_rate", options.behavior.slow_reader_rate, 0, 1)
    check_number("slow_reader_ms", options.behavior.slow_reader_ms, 1, 1e6)
    if options.pacing.self_timed is not None and options.dataset.dataset_name not in TRACES:
        raise ConfigError(f"self_timed is for recorded traces: {', '.join(TRACES)}")
    if options.pacing.self_timed and options.pacing.ramp_up_strategy is not None:
        raise ConfigError("self_timed and ramp_up_strategy each say when requests are sent: leave out one")


def check_dataset(options: DatasetOptions) -> None:
    name = options.dataset_name
    path = options.dataset_path
    if name in SYNTHETIC and path is not None:
        raise ConfigError(f"dataset_path: dataset_name {name} is synthetic and reads no file")
    if name not in SYNTHETIC and path is None:
        raise ConfigError(f"dataset_name {name} needs dataset_path FILE")
    check_number("seed", options.seed, 0, 2**63)
    check_number("num_prompts", options.num_prompts, 1, MAX_REQUESTS)
    for field_name, least in (
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
        check_number(field_name, getattr(options, field_name), least, MAX_LENGTH)
    if not 0 <= options.random_range_ratio < 1:
        raise ConfigError(f"random_range_ratio must be from 0 to below 1, not {options.random_range_ratio:g}")
    if options.random_prefix_len + length_bounds(options.random_input_len, options.random_range_ratio, 0)[0] < 1:
        raise ConfigError("random_input_len, random_range_ratio and random_prefix_len allow for empty prompts")


def check_pacing(pacing: Pacing) -> None:
    if not math.isinf(pacing.request_rate) or pacing.request_rate < 0:
        check_number("request_rate", pacing.request_rate, 1e-6, MAX_RATE)
    if not math.isinf(pacing.burstiness) or pacing.burstiness < 0:
        check_number("burstiness", pacing.burstiness, 1e-3, 1e3)
    check_number("max_concurrency", pacing.max_concurrency, 1, 100_000)
    check_number("num_warmups", pacing.num_warmups, 0, 100_000)
    check_number("duration", pacing.duration, 1e-3, MAX_SECONDS)
    start, end = pacing.ramp_up_start_rps, pacing.ramp_up_end_rps
    if pacing.ramp_up_strategy is None:
        if start is not None or end is not None:
            raise ConfigError("ramp_up_start_rps and ramp_up_end_rps need ramp_up_strategy linear or exponential")
        return
    if start is None or end is None:
        raise ConfigError("ramp_up_strategy needs both ramp_up_start_rps and ramp_up_end_rps")
    if not math.isinf(pacing.request_rate):
        raise ConfigError("ramp_up_strategy sets the rate: leave out request_rate")
    check_number("ramp_up_start_rps", start, 1e-6, MAX_RATE)
    check_number("ramp_up_end_rps", end, start, MAX_RATE)
