"""`quire info`: print versions, the instruction set level and the number of threads, or measure the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ...kernels import supported_levels, unsupported_levels
from ...kernels.ops import BLOCK
from ..common.errors import ConfigError
from ..model.runner import cache_folder, describe_choices, kept_tunings, pick_cpus, pick_isa, pick_tune_mode
from ..model.weights.packing import GROUP, Q8_FORM
from .flags import InfoFlags, read_settings

MEASURE_HELP = (
    "Measure this machine's read bandwidth and arithmetic peaks at each ISA level and number of threads, print them "
    "and write them to this file: a machine profile, for `quire plan --profile` and `quire simulate --profile`."
)


def info(
    *, measure: Annotated[Path | None, Parameter(help=MEASURE_HELP)] = None, memory: InfoFlags | None = None
) -> None:
    """Print the instruction sets and threads of this machine. Raises ConfigError."""
    config = read_settings(None, memory).engine
    cpus = pick_cpus(config)
    isa = pick_isa(config)
    print(f"quire      {version('quire')}")
    print(f"python     {platform.python_version()}")
    print(f"machine    {platform.machine()}, {platform.system()} {platform.release()}")
    requested = config.isa or os.environ.get("QUIRE_ISA")
    reason = "requested by --isa or QUIRE_ISA; this machine has" if requested else "the best of"
    print(f"ISA        {isa}  ({reason} {', '.join(supported_levels())})")
    for level, obstacle in unsupported_levels().items():
        print(f"ISA        not {level}: {obstacle}")
    print(f"threads    {cpus.threads}  ({cpus.reason})")
    print(f"tune       {pick_tune_mode(config)}  (measured choices of functions: {cache_folder() or 'not kept'})")
    for tuning in kept_tunings():
        key = tuning.key
        print(f"tuned      {key.isa}, {key.threads} threads, {key.shape}: {describe_choices(tuning.choices)}")
    print(f"q8         form {Q8_FORM}: rotated, with a scale per {BLOCK * GROUP} weights, if quantized at load")
    print(f"model      {config.model or 'bundled demo'}")
    if config.embedding_model is not None:
        print(f"embedding  {config.embedding_model}")
    if measure is not None:
        print("\n".join(_measured(measure, isa, cpus.threads)))


def _measured(path: Path, isa: str, threads: int) -> Iterator[str]:
    """Measure this machine, write the profile and yield its figures. Raises ConfigError."""
    from ..tools.bench.profile import measure_profile, write_profile
    from ..tools.bench.roofline import DTYPES, PEAK_NAMES
    from .bench import show_progress

    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"`measure` {path} cannot be written: it is a folder, or its folder does not exist")
    profile = measure_profile(isa, threads, show_progress)
    show_progress("")
    write_profile(profile, path)
    levels = {each.isa: len(each.isa) for each in profile.rooflines}
    width = max(levels.values())
    peaks = "".join(f"{f'{PEAK_NAMES[dtype]} GOP/s':>14}" for dtype in DTYPES)
    yield f"\n{profile.machine}, written to {path}:"
    yield f"{'ISA':<{width}}{'threads':>9}{'read GB/s':>12}{peaks}"
    for each in profile.rooflines:
        rates = "".join(f"{each.peak_ops_per_s[dtype] / 1e9:>14,.0f}" for dtype in DTYPES)
        yield f"{each.isa:<{width}}{each.threads:>9}{each.read_bytes_per_s / 1e9:>12.1f}{rates}"
