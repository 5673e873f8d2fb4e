"""A machine profile: the rooflines of a machine by ISA level and number of threads, measured once and kept in a file.

`quire info --measure` writes the file; `quire plan` and `quire simulate` predict speeds from it, on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from ....kernels import available_cpus, supported_levels
from ....kernels.cpus import processor_name
from ....kernels.ops import DType
from ...common.config import EngineConfig
from ...common.errors import ConfigError
from .roofline import DTYPES, Roofline, RooflineMeter
from .thread_sweep import parse_thread_counts

FORMAT = "quire machine profile"
PROFILE_VERSION = 1
MAX_PROFILE_BYTES = 1 << 20
RUNS = 5  # per level and number of threads; the best counts, because other processes only ever lower a rate
TEST_LEVELS = ("amx-twin",)  # engines never choose them

Rate = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
ThreadCount = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class MeasuredRoofline(msgspec.Struct, frozen=True, kw_only=True):
    """The roofline at one ISA level and number of threads."""

    isa: str
    threads: ThreadCount
    read_bytes_per_s: Rate
    peak_ops_per_s: dict[DType, Rate]  # q8: int8

    def __post_init__(self) -> None:
        if missing := [dtype for dtype in DTYPES if dtype not in self.peak_ops_per_s]:
            raise ValueError(f"Object has no peak for {', '.join(missing)}")


class MachineProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Rooflines, and the ISA level and number of threads that an engine on this machine chooses."""

    format: str
    version: int
    machine: str  # the processor's name
    isa: str
    threads: ThreadCount
    rooflines: tuple[MeasuredRoofline, ...]

    def configure(self, config: EngineConfig) -> tuple[EngineConfig, Roofline]:
        """Return `config` with a number of threads, by default this machine's, and the roofline for it.

        Between two measured numbers of threads the roofline is interpolated. Raises ConfigError for a level or a number
        of threads that the profile does not cover.
        """
        isa = config.isa or self.isa
        threads = config.threads or self.threads
        measured = sorted((each for each in self.rooflines if each.isa == isa), key=lambda each: each.threads)
        if not measured:
            levels = ", ".join(dict.fromkeys(each.isa for each in self.rooflines))
            raise ConfigError(f"isa must be one that the machine profile has, {levels or 'none'}, not {isa}")
        fewest = measured[0].threads
        most = measured[-1].threads
        if not fewest <= threads <= most:
            raise ConfigError(f"threads must be between {fewest} and {most}, as in the machine profile, not {threads}")
        return msgspec.structs.replace(config, threads=threads), _interpolate(measured, threads)


def _interpolate(measured: Sequence[MeasuredRoofline], threads: int) -> Roofline:
    counts = [each.threads for each in measured]

    def at(rates: Sequence[float]) -> float:
        return float(np.interp(threads, counts, rates))

    return Roofline(
        at([each.read_bytes_per_s for each in measured]),
        {dtype: at([each.peak_ops_per_s[dtype] for each in measured]) for dtype in DTYPES},
    )


def measure_profile(isa: str, threads: int, report: Callable[[str], None]) -> MachineProfile:
    """Measure each ISA level on 1, 2, 4 and so on threads up to the CPUs, some three seconds each.

    `isa` and `threads` are the choices of an engine on this machine. Calls `report` with the name of each measurement.
    Raises ConfigError if there is too little memory.
    """
    rooflines = []
    for level in supported_levels():
        for count in parse_thread_counts((), available_cpus().threads) if level not in TEST_LEVELS else ():
            report(f"{level}, {count} threads")
            meter = RooflineMeter(count, level)
            rooflines.append(_best(level, count, [meter.measure() for _ in range(RUNS)]))
    return MachineProfile(
        format=FORMAT,
        version=PROFILE_VERSION,
        machine=processor_name(),
        isa=isa,
        threads=threads,
        rooflines=tuple(rooflines),
    )


def _best(isa: str, threads: int, runs: Sequence[Roofline]) -> MeasuredRoofline:
    return MeasuredRoofline(
        isa=isa,
        threads=threads,
        read_bytes_per_s=max(run.read_bytes_per_s for run in runs),
        peak_ops_per_s={dtype: max(run.peak_ops_per_s[dtype] for run in runs) for dtype in DTYPES},
    )


def write_profile(profile: MachineProfile, path: Path) -> None:
    """Write a profile as JSON. Raises ConfigError."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"`measure` {path} cannot be written: {error.strerror}") from error


def read_profile(path: Path) -> MachineProfile:
    """Read a profile. Raises ConfigError for a file that is not a profile of this version."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_PROFILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"`profile` {path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_PROFILE_BYTES:
        raise ConfigError(f"`profile` {path} is not a machine profile: it has more than {MAX_PROFILE_BYTES:,} bytes")
    try:
        profile = msgspec.json.decode(content, type=MachineProfile)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"`profile` {path} is not a machine profile: {error}; {_ADVICE}") from error
    if (profile.format, profile.version) != (FORMAT, PROFILE_VERSION):
        raise ConfigError(f"`profile` {path} is {profile.format!r}, version {profile.version}; {_ADVICE}")
    return profile


_ADVICE = f"`quire info --measure FILE` writes a {FORMAT!r}, version {PROFILE_VERSION}"
