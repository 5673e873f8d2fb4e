"""The options of an engine, as a frozen struct with one field per option; `server_config.py` has the server options.

A field is the only definition of its option: its name, type, range, unit and help text make the command line flag, the
QUIRE_* variable, the key of a TOML file, the keyword argument of `LLM` and the row in docs/reference/options.md. Names
are vLLM's where vLLM has the option, llama.cpp's for CPU matters. `settings.py` reads the values.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal, TypedDict

import msgspec

from .images import MAX_IMAGES
from .options import Count, option

WeightDtype = Literal["auto", "bf16", "q8", "q4", "f32"]
KVCacheDtype = Literal["bf16", "f16", "f32", "int8"]
StateDtype = Literal["f32", "bf16"]
PageSize = Literal[16, 32, 64]
TuneMode = Literal["off", "auto", "full"]
ToolCallParser = Literal[
    "auto", "none", "hermes", "hermes_list", "qwen3_coder", "seed_oss", "glm45", "gemma4", "hunyuan_a13b",
    "cohere_command3", "llama3_json", "mistral", "mistral_list", "phi4_mini_json", "deepseek_v3", "deepseek_v31",
    "granite", "nemotron_json", "lfm2", "olmo3", "openai",
]  # fmt: skip
SchedulingPolicy = Literal["fcfs", "priority", "fair"]

CountOrZero = Annotated[int, msgspec.Meta(ge=0)]
MTP = "mtp"  # value of draft_model for the model's own head
MAX_DRAFT_TOKENS = 16  # draft tokens of one sequence in a step, without forced tokens
DraftTokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_DRAFT_TOKENS)]
Adapters = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Rank = Annotated[int, msgspec.Meta(ge=1, le=256)]
Images = Annotated[int, msgspec.Meta(ge=1, le=MAX_IMAGES)]
Pixels = Annotated[int, msgspec.Meta(ge=1, le=178_956_970)]  # Pillow's limit
Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]

MEMORY = "Model and memory"
SCHEDULING = "Scheduling"
_memory = partial(option, MEMORY)
_scheduling = partial(option, SCHEDULING)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of an engine. None means that the engine chooses the value at start and prints it."""

    model: Annotated[
        str | None,
        _memory(
            "The model: a folder in Hugging Face's format, a GGUF file, or a name on Hugging Face.",
            unit="path",
            default="the bundled model",
        ),
    ] = None
    embedding_model: Annotated[
        str | None,
        _memory(
            "A second model, which embeds or scores texts beside the model that generates: a folder, or "
            "`demo_embedding`, the bundled embedding model.",
            unit="path",
            default="none; a model that is an encoder itself is served alone",
        ),
    ] = None
    weights: Annotated[
        WeightDtype,
        _memory(
            "Data type of the weights. auto: as in the file if it is quantized, else bf16. q8 and q4 quantize while "
            "loading."
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[KVCacheDtype, _memory("Data type of the KV cache.")] = "bf16"
    state_dtype: Annotated[
        StateDtype,
        _memory(
            "Data type of the matrices in the states of sequences. bf16: half the memory; they are rounded after every "
            "token."
        ),
    ] = "f32"
    page_size: Annotated[PageSize, _memory("Tokens per page of the KV cache.", unit="tokens", alias="block_size")] = 32
    max_model_len: Annotated[
        Count | None,
        _memory("Longest prompt and output together.", unit="tokens", default="what the model and the KV cache allow"),
    ] = None
    max_num_seqs: Annotated[Count, _memory("Sequences that run at the same time.", unit="sequences")] = 64
    max_num_batched_tokens: Annotated[Count, _memory("Tokens computed in one step.", unit="tokens")] = 512
    kv_cache_memory: Annotated[
        Count | None,
        _memory(
            "Size of the KV cache, the states of sequences included.",
            unit="bytes",
            default="what max_num_seqs sequences need, at most kv_cache_share of the free memory",
        ),
    ] = None
    kv_cache_share: Annotated[
        Share, _memory("Maximum share of the memory free at start for the KV cache if its size is not set.")
    ] = 0.4
    state_cache_memory: Annotated[
        CountOrZero | None,
        _memory(
            "States that the prefix cache keeps, for models with states; a prompt continues from one. Part of the KV "
            "cache; 0 switches the prefix cache of such a model off.",
            unit="bytes",
            default="4 states for each of max_num_seqs sequences, at most a quarter of the KV cache",
        ),
    ] = None
    state_interval: Annotated[
        Count | None,
        _memory(
            "Tokens of a long prompt between two states that the prefix cache keeps, rounded up to whole pages.",
            unit="tokens",
            default="tokens of the KV cache over states of the prefix cache, at least 512",
        ),
    ] = None
    image_cache_memory: Annotated[
        CountOrZero,
        _memory(
            "Rows of images that a vision tower has computed, kept for reuse; the cache always holds the last image.",
            unit="bytes",
        ),
    ] = 256 << 20
    max_image_tokens: Annotated[
        Count,
        _memory(
            "Tokens of an image, for models that take images of any size; larger images are made smaller. The vision "
            "tower's buffers are for such an image.",
            unit="tokens",
        ),
    ] = 4096
    threads: Annotated[
        Count | None,
        _memory("Threads that compute.", unit="threads", default="what CPU affinity and cgroup quota allow"),
    ] = None
    enable_prefix_caching: Annotated[
        bool, _memory("Reuse the KV cache, and states, of prompts that begin with the same tokens.")
    ] = True
    isa: Annotated[
        str | None,
        _memory(
            "Instruction set level; `quire info` lists the levels of this machine.",
            unit="level",
            default="the best one",
            is_of_machine=True,
        ),
    ] = None
    tune: Annotated[
        TuneMode | None,
        _memory(
            "Whether the engine times linear layers and attention at start, and lets the code of lower levels run them "
            "where that is faster; the bits stay the same. auto: for about 0.2 s, once per processor, build and shape "
            "of the model; full: at each start, for longer; off: the level's own code.",
            default="auto",
            is_of_machine=True,
        ),
    ] = None

    lora: Annotated[
        dict[str, str],
        _memory(
            "Adapters (LoRA) by name, each a folder as PEFT writes it, such as a=adapters/a,b=adapters/b. A request "
            "for the model of this name is computed with the adapter.",
            unit="path",
            default="none",
        ),
    ] = {}
    max_loras: Annotated[
        Adapters | None,
        _memory(
            "Adapters in memory at the same time. With it, adapters are loaded and unloaded while the server runs, and "
            "one that no request uses leaves the memory when another needs its place.",
            unit="adapters",
            default="the adapters of `lora`",
        ),
    ] = None
    max_lora_rank: Annotated[Rank, _memory("Largest rank of an adapter.")] = 64
    lora_memory: Annotated[
        Count | None,
        _memory(
            "Memory for adapters.",
            unit="bytes",
            default="what the adapters take if each changes all layers with the largest rank",
        ),
    ] = None

    kv_events: Annotated[
        str | None,
        _memory(
            "ZeroMQ endpoint that publishes which pages the prefix cache has, such as tcp://*:5557. Each further "
            "engine process takes the next port.",
            unit="endpoint",
            default="not published",
        ),
    ] = None
    kv_events_replay: Annotated[
        str | None,
        _memory(
            "ZeroMQ endpoint that sends earlier events again, such as tcp://*:5657.",
            unit="endpoint",
            default="not sent again",
        ),
    ] = None
    kv_events_topic: Annotated[str, _memory("Topic of the events of kv_events.", unit="text")] = ""

    tool_call_parser: Annotated[
        ToolCallParser,
        _memory(
            "How the model writes tool calls: the name of a family. auto: as its chat template says, or else as the "
            "prompt describes; none: it writes none."
        ),
    ] = "auto"
    chat_template: Annotated[
        str | None,
        _memory(
            "A file with the chat template, in Jinja, instead of the model's own.",
            unit="path",
            default="the model's own",
        ),
    ] = None
    system_prompt: Annotated[
        str | None,
        _memory("System message of chats that have none.", unit="text", default="none"),
    ] = None
    default_sampling: Annotated[
        dict[str, float],
        _memory(
            "Sampling parameters of HTTP requests that leave them out, before the model's recommendation: temperature, "
            "top_k, top_p, min_p and repetition_penalty, such as temperature=0.7,top_k=20.",
            default="the model's recommendation",
        ),
    ] = {}
    special_tokens_in_content: Annotated[
        bool,
        _memory(
            "Encode the names of special tokens in the content of chats as these tokens, which end messages and begin "
            "others. By default they are text, and only the chat template writes special tokens."
        ),
    ] = False
    open_tool_arguments: Annotated[
        bool,
        _memory(
            "Let calls have arguments that the schema of a tool neither declares nor forbids. By default objects that "
            "declare properties have only these: small models add others, and do not end."
        ),
    ] = False
    max_images_per_request: Annotated[Images, _memory("Images of one request.", unit="images")] = 16
    max_image_pixels: Annotated[
        Pixels,
        _memory(
            "Pixels of an image before it is resized. One image at a time is decoded, which takes about 16 bytes per "
            "pixel.",
            unit="pixels",
        ),
    ] = 1 << 25
    max_image_memory: Annotated[
        Count,
        _memory("Resized images of queued and running requests together; further ones are refused.", unit="bytes"),
    ] = 1 << 30

    max_num_waiting: Annotated[Count, _scheduling("Maximum number of requests in the queue.", unit="requests")] = 1024
    max_num_waiting_per_tenant: Annotated[
        Count | None,
        _scheduling("Maximum number of requests of one tenant in the queue.", unit="requests", default="no limit"),
    ] = None
    scheduling_policy: Annotated[
        SchedulingPolicy,
        _scheduling(
            "Which request is admitted next: fcfs by arrival, priority by priority and waiting time, fair from the "
            "tenant that was served least."
        ),
    ] = "fcfs"
    tenant_weights: Annotated[
        dict[str, Positive],
        _scheduling("Shares of tenants under the fair policy, such as a=2,b=0.5.", default="1 for every tenant"),
    ] = {}
    max_kv_share_per_tenant: Annotated[
        Share | None,
        _scheduling(
            "Maximum share of the KV pages that one tenant's requests, and its pins, hold.", default="no limit"
        ),
    ] = None
    itl_target_ms: Annotated[
        Positive | None,
        _scheduling(
            "Target for the time between two tokens of a stream. Steps take less prefill, and only as many sequences "
            "run as can decode in that time.",
            unit="ms",
            default="no target, the highest throughput",
        ),
    ] = None
    num_speculative_tokens: Annotated[
        DraftTokens,
        _scheduling(
            "Maximum number of draft tokens per sequence and step, found in earlier text or proposed by draft_model; "
            "the output stays the same. 0: none.",
            unit="tokens",
        ),
    ] = 0
    draft_model: Annotated[
        str | None,
        _scheduling(
            "A small model with the same vocabulary, which proposes draft tokens: a folder, or a GGUF file; or `mtp`: "
            "the head of the model that predicts further tokens. It takes a part of the KV cache.",
            unit="path",
            default="no draft model",
        ),
    ] = None
    kv_spill_size: Annotated[
        CountOrZero,
        _scheduling(
            "Disk space for the KV pages and states of preempted requests. 0: they are recomputed.", unit="bytes"
        ),
    ] = 0
    kv_spill_dir: Annotated[
        str | None,
        _scheduling("Folder of the spill file.", unit="folder", default="the system's folder for temporary files"),
    ] = None


class EngineOptions(TypedDict, total=False):
    """The keyword arguments of `LLM`: the fields of EngineConfig besides `model`, with sizes also as text.

    A test keeps both lists equal.
    """

    weights: WeightDtype | Literal["bfloat16", "float32"]
    kv_cache_dtype: KVCacheDtype | Literal["bfloat16", "float16", "float32"]
    state_dtype: StateDtype | Literal["bfloat16", "float32"]
    page_size: PageSize
    block_size: PageSize
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory: int | str | None
    state_cache_memory: int | str | None
    state_interval: int | None
    kv_cache_share: float
    image_cache_memory: int | str
    max_image_tokens: int
    threads: int | None
    enable_prefix_caching: bool
    lora: dict[str, str]
    max_loras: int | None
    max_lora_rank: int
    lora_memory: int | str | None
    kv_events: str | None
    kv_events_replay: str | None
    kv_events_topic: str
    tool_call_parser: ToolCallParser
    chat_template: str | None
    system_prompt: str | None
    default_sampling: dict[str, float]
    special_tokens_in_content: bool
    open_tool_arguments: bool
    max_images_per_request: int
    max_image_pixels: int
    max_image_memory: int | str
    isa: str | None
    tune: TuneMode | None
    embedding_model: str | None
    max_num_waiting: int
    max_num_waiting_per_tenant: int | None
    scheduling_policy: SchedulingPolicy
    tenant_weights: dict[str, float]
    max_kv_share_per_tenant: float | None
    itl_target_ms: float | None
    num_speculative_tokens: int
    draft_model: str | None
    kv_spill_size: int | str
    kv_spill_dir: str | None
