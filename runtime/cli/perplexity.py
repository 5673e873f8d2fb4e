"""`quire perplexity`: measure how well a model predicts a text, and compare its predictions with another model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..common.config import EngineConfig, KVCacheDtype, StateDtype, WeightDtype
from ..common.errors import ConfigError
from ..engine.text import Tokenizer
from ..model import DecoderSpec, model_path, read_spec, weights_text
from ..model.encoder import is_encoder
from ..model.runner import load_model
from ..tools.perplexity import (
    Divergence,
    Perplexity,
    Windows,
    measure_divergence,
    measure_perplexity,
    plan_windows,
    scoring_config,
)
from .flags import Json, ScoringFlags, refuse_flags, settings_from, warn_of_ignored
from .interrupts import leaving_at_once
from .model_files import model_files

SET_BY_WINDOWS = ("max_model_len", "max_num_seqs", "kv_cache_memory")  # see `scoring_config`


def perplexity(
    model: Annotated[str, Parameter(help="The model.")],
    text: Annotated[Path, Parameter(help="File of text in UTF-8.")],
    /,
    *,
    context: Annotated[int, Parameter(help="Tokens per window; the second half of each is scored.")] = 512,
    stride: Annotated[
        int | None,
        Parameter(help="Begin a window of --context + N/2 tokens every N tokens, and score the last N of each."),
    ] = None,
    windows: Annotated[int | None, Parameter(help="Score only the first N windows. Default: all.")] = None,
    compare_with: Annotated[str | None, Parameter(help="Compare with this model: KL divergence, top token.")] = None,
    compare_weights: Annotated[
        WeightDtype | None, Parameter(help="Data type of that model's weights. Default: auto.")
    ] = None,
    compare_kv_cache_dtype: Annotated[
        KVCacheDtype | None, Parameter(help="Data type of that model's KV cache. Default: that of --kv-cache-dtype.")
    ] = None,
    compare_state_dtype: Annotated[
        StateDtype | None, Parameter(help="Data type of that model's states. Default: that of --state-dtype.")
    ] = None,
    json: Json = False,
    memory: ScoringFlags | None = None,
) -> None:
    """Measure and print. Raises ConfigError, ModelError or GenerationFailed."""
    refuse_flags("perplexity", SET_BY_WINDOWS, "windows", memory)
    for flag, value in (
        ("--compare-weights", compare_weights),
        ("--compare-kv-cache-dtype", compare_kv_cache_dtype),
        ("--compare-state-dtype", compare_state_dtype),
    ):
        if value is not None and compare_with is None:
            raise ConfigError(f"{flag} needs --compare-with")
    config = settings_from(model, memory).engine
    compare_with = compare_with and model_files(compare_with)
    warn_of_ignored("perplexity", config, SET_BY_WINDOWS)
    base = msgspec.structs.replace(
        config,
        model=compare_with,
        weights=compare_weights or EngineConfig().weights,
        kv_cache_dtype=compare_kv_cache_dtype or config.kv_cache_dtype,
        state_dtype=compare_state_dtype or config.state_dtype,
    )
    configs = [config] if compare_with is None else [config, base]
    specs = [_spec(each) for each in configs]
    if len({spec.vocab_size for spec in specs}) > 1:
        sizes = " and ".join(f"{spec.vocab_size:,}" for spec in specs)
        raise ConfigError(f"--compare-with must have the same vocabulary; the models have {sizes} tokens")
    token_ids, bos = _tokens(model_path(config.model), text)
    plan = plan_windows(len(token_ids), context, stride, windows)
    sized = [scoring_config(each, spec, plan) for each, spec in zip(configs, specs, strict=True)]
    measured = _measure(sized, token_ids, plan, bos)
    about = {"model": config.model, "weights": _weights(config), "kv_cache_dtype": config.kv_cache_dtype}
    if compare_with is not None:
        about |= {"base": base.model, "base_weights": _weights(base), "base_kv_cache_dtype": base.kv_cache_dtype}
    if json:
        counts = {"windows": len(plan.starts), "window_tokens": plan.length, "scored_tokens": plan.scored_tokens}
        print(dumps({**about, **counts, **measured.as_dict()}, indent=1))
    else:
        _print(about, plan, measured)


def _tokens(model: Path, text: Path) -> tuple[Sequence[int], int | None]:
    """Return the ids of the text, and the begin token that the tokenizer puts before them, if it has one."""
    try:
        content = text.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{text} is not a readable file of text in UTF-8: {error}") from error
    tokenizer = Tokenizer(model)
    bos = tokenizer.bos_token_id
    token_ids = tokenizer.encode(content, add_special_tokens=False)
    return token_ids if bos is None else [bos, *token_ids], bos


def _measure(
    configs: Sequence[EngineConfig], token_ids: Sequence[int], windows: Windows, bos: int | None
) -> Perplexity | Divergence:
    """Load one model, or a model and its base, and score all windows; show the progress."""
    with ExitStack() as stack:
        with leaving_at_once():
            runners = [stack.enter_context(closing(load_model(config))) for config in configs]
        on_window = stack.enter_context(_progress(windows, len(runners) > 1))
        if len(runners) == 1:
            return measure_perplexity(runners[0], token_ids, windows, bos, on_window)
        return measure_divergence(runners[0], runners[1], token_ids, windows, bos, on_window)


def _spec(config: EngineConfig) -> DecoderSpec:
    path = model_path(config.model)
    if is_encoder(path):
        raise ConfigError(f"{path} is an encoder, which predicts no tokens")
    return read_spec(path)


def _weights(config: EngineConfig) -> str:
    return weights_text(_spec(config), config.weights)


@contextmanager
def _progress(windows: Windows, compares: bool) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on standard error if that is a terminal; yield the function to call after each window."""
    console = Console(stderr=True)
    name = "mean KL" if compares else "perplexity"
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(name, total=len(windows.starts))
        yield lambda value: progress.update(task, advance=1, description=f"{name} {value:.4f}")


def _print(about: dict[str, Any], windows: Windows, measured: Perplexity | Divergence) -> None:
    print(
        f"{about['model']}: weights {about['weights']}, KV {about['kv_cache_dtype']}; {windows.scored_tokens:,} tokens "
        f"scored in {len(windows.starts)} window{'s' if len(windows.starts) > 1 else ''} of {windows.length}"
    )
    if isinstance(measured, Perplexity):
        print(f"PPL = {measured.value:.4f} +/- {measured.error:.5f}")
        return
    figures = measured.as_dict()
    print(f"compared with {about['base']}: weights {about['base_weights']}, KV {about['base_kv_cache_dtype']}\n")
    for name, value, error in (
        ("PPL", figures["perplexity"], figures["perplexity_error"]),
        ("PPL of the base", figures["base_perplexity"], figures["base_perplexity_error"]),
        ("ln(PPL / PPL of the base)", figures["log_perplexity_ratio"], figures["log_perplexity_ratio_error"]),
        ("mean KL divergence", figures["mean_kl"], figures["mean_kl_error"]),
    ):
        print(f"{name:<26}{value:>12.6f} +/- {error:.6f}")
    print(f"{'maximum':<26}{figures['max_kl']:>12.6f}")
    for name, value in figures["kl_percentiles"].items():
        print(f"{'median' if name == '50' else f'{name} %':<26}{value:>12.6f}")
    print(f"{'minimum':<26}{figures['min_kl']:>12.6f}")
    print(f"{'RMS change of p':<26}{figures['rms_delta_p']:>12.3%}")
    print(f"{'same top token':<26}{figures['same_top']:>12.3%} +/- {figures['same_top_error']:.3%}")
