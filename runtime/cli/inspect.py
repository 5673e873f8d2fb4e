"""`quire plan` and `quire info`: what serving would take, and what this machine offers. Nothing is loaded."""

from __future__ import annotations

import platform
from importlib.metadata import version

from ...kernels import supported_levels
from ...pager import KVLayout
from ..common.config import EngineConfig
from ..common.settings import Settings
from ..model import model_folder, read_spec
from ..model.runner import Capacity, decide_capacity, pick_cpus, pick_isa


def plan_text(config: EngineConfig, arena: bool) -> str:
    """The memory map of serving with `config`, from config.json alone."""
    spec = read_spec(model_folder(config.model))
    capacity = decide_capacity(config, spec)
    layout = capacity.layout
    lines = [
        f"{spec.family}: {spec.num_layers} layers, hidden {spec.hidden_size}, {spec.num_heads} query / "
        f"{spec.num_kv_heads} KV heads of {spec.head_dim}, vocabulary {spec.vocab_size}",
        f"weights {config.weights}, KV {layout.dtype}: {layout.token_bytes:,} B per token, "
        f"{layout.page_bytes:,} B per page of {layout.page_size} tokens",
        *_windows(layout),
        f"{_pool(capacity)}; at most {config.max_num_seqs} sequences, "
        f"{capacity.max_model_len:,} tokens each; {config.max_num_batched_tokens} tokens per step",
        "",
        capacity.memory.describe(),
    ]
    if arena:
        lines += ["", "step arena, by offset:", capacity.memory.program.describe()]
    return "\n".join(lines)


def _windows(layout: KVLayout) -> list[str]:
    """One line where any layer slides."""
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


def info_text(settings: Settings) -> str:
    cpus = pick_cpus(settings.engine)
    return "\n".join(
        [
            f"quire      {version('quire')}",
            f"python     {platform.python_version()}",
            f"machine    {platform.machine()}, {platform.system()} {platform.release()}",
            f"ISA        {pick_isa(settings.engine)}  (this machine has {', '.join(supported_levels())})",
            f"threads    {cpus.threads}  ({cpus.reason})",
            f"model      {settings.engine.model or 'bundled demo'}",
        ]
    )
