"""`quire plan`: print the memory that serving a model takes, from its config.json or the header of its GGUF file."""

from __future__ import annotations

import sys
from json import dumps
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ..common.errors import ConfigError
from ..common.memory import deciding_limit, free_memory_bytes
from ..common.settings import Settings
from ..engine.facade import NO_TEMPLATE
from ..engine.text_processor import load_template
from ..model import model_path
from ..model.encoder import is_encoder
from ..tools.planning import (
    EncoderPlan,
    PlanTarget,
    ServingPlan,
    comparison,
    plan_encoder,
    plan_serving,
    plan_text,
    plot_memory,
)
from ..tools.planning.kv_sizes import describe_sizes
from ..tools.plotting import check_plot
from .flags import DraftFlags, Json, LimitFlags, MemoryFlags, ModelFolder, read_settings
from .model_files import with_model_headers


def plan(
    model: ModelFolder = None,
    /,
    *,
    sizes: Annotated[bool, Parameter(help="Print the KV cache sizes of known models instead.")] = False,
    arena: Annotated[bool, Parameter(help="Add the map of the step arena.")] = False,
    plot: Annotated[Path | None, Parameter(help="Draw the memory map in this file.")] = None,
    json: Json = False,
    target: Annotated[PlanTarget | None, Parameter(name="*", group="Machine")] = None,
    memory: MemoryFlags | None = None,
    drafts: DraftFlags | None = None,
    limits: LimitFlags | None = None,
) -> None:
    """Print the plan; compare it with this machine on standard error.

    Raises ModelError, ConfigError or MissingDependency.
    """
    if sizes:
        if model or arena or plot or json or target or memory or drafts or limits:
            raise ConfigError("sizes cannot be given with a model or another flag: its table is the same for all")
        print(describe_sizes())
        return
    if arena and json:
        raise ConfigError("arena cannot be given with --json")
    if plot is not None:
        check_plot(plot)
    with with_model_headers(read_settings(model, memory, drafts, limits)) as settings:
        _print_plan(settings, target or PlanTarget(), arena=arena, plot=plot, json=json)


def _print_plan(settings: Settings, target: PlanTarget, *, arena: bool, plot: Path | None, json: bool) -> None:
    if settings.engine.model is not None and is_encoder(model_path(settings.engine.model)):
        encoder = plan_encoder(settings, target)
        planned: EncoderPlan | ServingPlan = encoder
        text = encoder.text(arena)
    else:
        serving = plan_serving(settings, target)
        planned = serving
        text = plan_text(serving, arena)
    if plot is not None:
        plot_memory(planned.parts, planned.title, plot)
    print(dumps(planned.as_dict(), indent=1) if json else text)
    print(comparison(planned.total_bytes, free_memory_bytes(), deciding_limit()), file=sys.stderr)
    _, problem = load_template(model_path(settings.engine.model), settings.engine.chat_template)
    if problem not in ("", NO_TEMPLATE):
        print(f"warning: {problem}", file=sys.stderr)
