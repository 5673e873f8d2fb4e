"""`quire plan`: print the memory that serving a model takes, from its config.json or the header of its GGUF file."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from ...pager import KVLayout
from ..common.settings import Settings
from ..engine import has_tokenizer
from ..model import describe_sizes, model_path, read_spec, weights_text
from ..model.runner import Capacity, decide_capacity, free_memory_bytes
from ..model.spec import DecoderSpec
from ..server import SERVER_PROCESS_BYTES, MemoryLimits
from .flags import LimitFlags, MemoryFlags, ModelFolder, settings_from

GRAMMAR_TOKEN_BYTES = 400  # measured: of the tables for structured output, per token
TOKEN_BYTES = 750  # measured: of a tokenizer, per token of vocabularies of 4,000 to 150,000


def plan(
    model: ModelFolder = None,
    /,
    *,
    sizes: Annotated[bool, Parameter(help="Print the KV cache sizes of known models instead.")] = False,
    arena: Annotated[bool, Parameter(help="Add the map of the step arena.")] = False,
    memory: MemoryFlags | None = None,
    limits: LimitFlags | None = None,
) -> None:
    """Print the memory map; compare it with this machine on standard error. Raises ModelError or ConfigError."""
    if sizes:
        print(describe_sizes())
        return
    settings = settings_from(model, memory, limits)
    spec = read_spec(model_path(settings.engine.model))
    capacity = decide_capacity(settings.engine, spec)
    print(plan_text(settings, spec, capacity, arena))
    server_bytes = sum(server_start_bytes(settings, spec).values()) + MemoryLimits(settings.server).total_bytes
    print(comparison(capacity.memory.total_bytes + server_bytes, free_memory_bytes()), file=sys.stderr)


def server_start_bytes(settings: Settings, spec: DecoderSpec) -> dict[str, int]:
    """Return estimates for the API server process at start, without what it shares with engine processes.

    The last one is for an engine process, which has a tokenizer of its own beside the tables of its vocabulary.
    """
    tokens = spec.vocab_size if has_tokenizer(model_path(settings.engine.model)) else 0
    return {
        "Python libraries": SERVER_PROCESS_BYTES,
        "tokenizer": tokens * TOKEN_BYTES,
        "structured output": tokens * (TOKEN_BYTES + GRAMMAR_TOKEN_BYTES),
    }


def comparison(total_bytes: int, available_bytes: int) -> str:
    """Return a line that compares a plan with the memory that this machine has available, cgroup limit included."""
    machine = f"{total_bytes:,} B in all, this machine has {available_bytes:,} B available"
    if total_bytes <= available_bytes:
        return f"It fits: {machine}."
    return f"It does not fit: {machine}, {total_bytes - available_bytes:,} B less."


def plan_text(settings: Settings, spec: DecoderSpec, capacity: Capacity, arena: bool) -> str:
    """Return the memory map of serving with `settings`, with that of the step arena if `arena` is set."""
    config = settings.engine
    layout = capacity.layout
    lines = [
        f"{spec.family}: {spec.num_layers} layers, hidden {spec.hidden_size}, {spec.num_heads} query / "
        f"{spec.num_kv_heads} KV heads of {spec.head_dim}, vocabulary {spec.vocab_size}",
        *_experts(spec),
        f"weights {weights_text(spec, config.weights)}, KV {layout.dtype}: {layout.token_bytes:,} B per token, "
        f"{layout.page_bytes:,} B per page of {layout.page_size} tokens",
        *_windows(layout),
        f"{_pool(capacity)}; at most {config.max_num_seqs} sequences, "
        f"{capacity.max_model_len:,} tokens each; {config.max_num_batched_tokens} tokens per step",
        "",
        capacity.memory.describe(),
        "",
        "API server process at start, and structured output in the engine process:",
        *(f"{name:<18}{size:>18,} B  estimate" for name, size in server_start_bytes(settings, spec).items()),
        "",
        "for clients, in the API server process:",
        MemoryLimits(settings.server).describe(),
    ]
    if arena:
        lines += ["", "step arena, by offset:", capacity.memory.program.describe()]
    return "\n".join(lines)


def _experts(spec: DecoderSpec) -> list[str]:
    """Return a line about layers with experts, none if there are no such layers."""
    if spec.experts is None:
        return []
    experts = spec.experts
    return [
        f"{_count(sum(experts.layers), 'layer')} of {experts.num_experts} experts with an MLP of "
        f"{experts.intermediate_size}, {experts.top_k} per token"
    ]


def _windows(layout: KVLayout) -> list[str]:
    """Return a line about layers with sliding windows, none if there are no such layers."""
    if not any(layout.group_windows):
        return []
    groups = [f"{len(g.layers)} {f'of window {g.window}' if g.window else 'full'}" for g in layout.groups]
    counts = _count(len(groups), "layer group"), _count(layout.page_layers, "layer")
    return [f"{counts[0]}: {', '.join(groups)}; {counts[1]} per page"]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def _pool(capacity: Capacity) -> str:
    layout = capacity.layout
    if not any(layout.group_windows):
        return f"{capacity.num_pages * layout.page_size:,} tokens in the pool"
    most = layout.pages_for(capacity.max_model_len)
    return f"{capacity.num_pages:,} pages in the pool, a sequence takes up to {most:,} of them"
