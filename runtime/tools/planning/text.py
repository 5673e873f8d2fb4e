"""A serving plan as text: at most 100 columns wide, one screen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...common.memory import MemoryLimit
from ...model import weights_text
from ...model.rope import short_context
from ...model.spec import DecoderSpec
from ..simulation import Speed
from .alternatives import Alternative
from .kv_sizes import human
from .serving_plan import ServingPlan, WindowLayers


def comparison(total_bytes: int, available_bytes: int, limit: MemoryLimit | None = None) -> str:
    """Return a line that compares a plan with the memory available here, and names the deciding limit."""
    machine = f"{total_bytes:,} B in all, this machine has {available_bytes:,} B available"
    reason = "" if limit is None else f"; the limit is {limit}"
    if total_bytes <= available_bytes:
        return f"It fits: {machine}{reason}."
    return f"It does not fit: {machine}, {total_bytes - available_bytes:,} B less{reason}."


def kv_heads_text(spec: DecoderSpec) -> str:
    """Return the number and size of the KV heads of each kind of layers, and the layers that store none."""
    if spec.latent is not None:
        return f"latents of {spec.latent.rank} + {spec.latent.rope_dim}"
    kinds = sorted({spec.kv_heads_of(layer) for layer in spec.kv_layers}) or [(spec.num_kv_heads, spec.head_dim)]
    text = f"{kinds[0][0]} KV heads of {kinds[0][1]}" + "".join(f" and {count} of {size}" for count, size in kinds[1:])
    readers = sum(spec.attention_layers) - len(spec.kv_layers)
    return f"{text}, {readers} layers read those of others" if readers else text


def plan_text(plan: ServingPlan, arena: bool) -> str:
    """Return the memory map, with the map of the step arena if `arena` is set, then the tables of alternatives."""
    config = plan.settings.engine
    spec = plan.spec
    capacity = plan.capacity
    layout = capacity.layout
    lines = [
        f"{spec.family}: {spec.num_layers} layers, hidden {spec.hidden_size}, {spec.num_heads} query / "
        f"{kv_heads_text(spec)}, vocabulary {spec.vocab_size}",
        *_experts(spec),
        f"weights {weights_text(spec, config.weights)}, KV {layout.dtype}: {layout.token_bytes:,} B per token, "
        f"{layout.page_bytes:,} B per page of {layout.page_size} tokens",
        *_layer_groups(plan),
        *_states(plan),
        f"{_pool(plan)}; at most {config.max_num_seqs} sequences, "
        f"{capacity.max_model_len:,} tokens each; {config.max_num_batched_tokens} tokens per step",
        *_long_rope(plan),
        "",
        capacity.memory.describe(),
        "",
        "API server process at start:",
        *(f"{name:<18}{size:>18,} B  estimate" for name, size in plan.server_bytes.items()),
        "",
        "for clients, in the API server process:",
        plan.clients.describe(),
        "",
        "for structured output, in the engine process, and in processes that try grammars:",
        *(
            f"{name:<18}{size:>18,} B  {kind}"
            for (name, size), kind in zip(plan.structured_bytes.items(), ("estimate", *("at most",) * 2), strict=True)
        ),
    ]
    if arena:
        lines += ["", "step arena, by offset:", capacity.memory.program.describe()]
    return "\n".join([*lines, "", *_sequences_table(plan), *_speed_table(plan)])


def _experts(spec: DecoderSpec) -> list[str]:
    """Return a line about layers with experts, none if there are no such layers."""
    if spec.experts is None:
        return []
    experts = spec.experts
    return [
        f"{_count(sum(experts.layers), 'layer')} of {experts.num_experts} experts with an MLP of "
        f"{experts.intermediate_size}, {experts.top_k} per token"
    ]


def _layer_groups(plan: ServingPlan) -> list[str]:
    """Return a line about layers with sliding windows, none if there are no such layers."""
    layout = plan.capacity.layout
    if not any(layout.group_windows):
        return []
    counts = _count(len(layout.groups), "layer group"), _count(layout.page_layers, "layer")
    return [f"{counts[0]}, {counts[1]} per page; {'; '.join(map(_window, plan.kv_layers))}"]


def _states(plan: ServingPlan) -> list[str]:
    """Return a line about the states of sequences, none for a model without states."""
    capacity = plan.capacity
    if not capacity.state_layout.nbytes:
        return []
    size = f"states of {capacity.state_layout.nbytes:,} B each; the prefix cache"
    if capacity.num_cached_states:
        interval = f"in a long prompt one every {capacity.state_interval:,} tokens"
        return [f"{size} keeps {capacity.num_cached_states:,}, {interval}"]
    problem = capacity.prefix_cache_problem(plan.settings.engine)
    return [f"{size} is off" + (f": {problem}" if problem else "")]


def _long_rope(plan: ServingPlan) -> list[str]:
    """Return a line about LongRoPE's factors, none for a model that has no factors for short and for long contexts."""
    short = short_context(plan.spec.ropes)
    if short is None:
        return []
    if plan.rope_factors == "short":
        return [f"LongRoPE: short factors; a --max-model-len above {short} takes the long ones for all requests"]
    return [f"LongRoPE: long factors, for short requests too; --max-model-len {short} takes the short ones"]


def _window(layers: WindowLayers) -> str:
    size = f"{layers.token_bytes:,} B per token"
    if layers.max_tokens is None:
        return f"{layers.num_layers} full: {size}"
    return f"{layers.num_layers} of window {layers.window}: {size}, up to {layers.max_tokens:,} tokens"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number > 1 else ''}"


def _pool(plan: ServingPlan) -> str:
    layout = plan.capacity.layout
    capacity = plan.capacity
    if not any(layout.group_windows):
        return f"{capacity.num_pages * layout.page_size:,} tokens in the pool"
    most = layout.pages_for(capacity.max_model_len)
    return f"{capacity.num_pages:,} pages in the pool, a sequence takes up to {most:,} of them"


def _sequences_table(plan: ServingPlan) -> Iterator[str]:
    """Yield the table of the number of sequences with each alternative."""
    yield "in the same memory: sequences of N tokens that the pool holds at once"
    header = ("weights", "KV", "size", "KV pool", "B/token", *(f"{length:,}" for length in plan.lengths))
    rows = [
        (
            *_dtypes(each),
            human(each.weights_bytes),
            human(each.kv_bytes),
            f"{each.capacity.layout.token_bytes:,}",
            *(f"{each.sequences(length):,}" for length in plan.lengths),
        )
        for each in plan.alternatives
    ]
    yield from _table(header, rows)


def _speed_table(plan: ServingPlan) -> Iterator[str]:
    """Yield the table of predicted speeds, if there is a machine profile."""
    if plan.roofline is None:
        return
    read, peak = plan.roofline.read_bytes_per_s / 1e9, plan.roofline.peak_ops_per_s["q8"] / 1e9
    threads = _count(plan.capacity.cpus.threads, "thread")
    yield ""
    yield f"predicted on {threads} ({read:,.1f} GB/s, {peak:,.0f} int8 GOP/s), by users x prompt tokens:"
    yield "seconds until all users have their first token; tokens/s of all users while they decode"
    header = ("weights", "KV", *(cell for shape in plan.shapes for cell in (f"{shape} s", "tok/s")))
    rows = [
        (*_dtypes(each), *(cell for speed in speeds for cell in _speed(speed)))
        for each, speeds in zip(plan.alternatives, plan.speeds, strict=True)
    ]
    yield from _table(header, rows)


def _speed(speed: Speed | None) -> tuple[str, str]:
    if speed is None:
        return "–", "–"
    seconds = speed.first_token_s
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}", f"{speed.tokens_per_s:,.1f}"


def _dtypes(each: Alternative) -> tuple[str, str]:
    return each.weights, each.capacity.layout.dtype


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield lines whose first two columns are aligned left, the others right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True)]
        cells += [cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=True)]
        yield "  ".join(cells)
