"""Tuned functions of loaded programs, kept in the user's cache folder by processor, build and shape of the model.

A file that is damaged, of another machine or not readable is measured anew, and a folder that cannot be written is left
alone: the choice of functions changes speed alone, never bits.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from ....kernels import CpuBudget, Program
from ....kernels import isa as compiled
from ....kernels.cpus import processor_id
from ....kernels.ops import Op
from ...common.config import TuneMode
from .tuning import Choices, Effort, Trial, describe_op, fastest_functions, function_names, layers_of, rivals_of

FILE_FORMAT = 1
MAX_FILE_BYTES = 1 << 16
MAX_KEPT_FILES = 256  # files of the folder: each build and each shape adds one
TUNE_EFFORTS = {"auto": Effort(rounds=5, seconds=0.2), "full": Effort(rounds=25, seconds=20.0)}


class TuningKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The properties of a machine, a build and a program that decide which functions are fastest."""

    processor: str
    build: str  # digest of the compiled functions
    isa: str
    rivals: tuple[str, ...]
    threads: int
    shape: str  # dtype of the KV cache, and ops of a layer

    @property
    def file_name(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:24] + ".json"


class Tuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The functions of other levels that a program runs, as a file keeps them."""

    format: int
    key: TuningKey
    choices: dict[str, str]  # name of a function -> level


class Tunable(Protocol):
    """The attributes of a runner's capacity that tuning reads."""

    @property
    def cpus(self) -> CpuBudget: ...
    @property
    def isa(self) -> str: ...
    @property
    def tune(self) -> TuneMode: ...


def tune(program: Program, ops: Sequence[Op], kv_dtype: str, trials: Sequence[Trial], capacity: Tunable) -> Choices:
    """Let a program run its fastest functions, kept or measured now; return the functions of other levels."""
    isa = capacity.isa
    names = {name for trial in trials for name in function_names(ops, kv_dtype, trial).values()}
    if capacity.tune == "off" or not names or not rivals_of(isa):
        return {}
    key = TuningKey(processor_id(), build_id(), isa, rivals_of(isa), capacity.cpus.threads, _shape(ops, kv_dtype))
    choices = _kept_choices(key) if capacity.tune == "auto" else None
    if choices is None:
        choices = fastest_functions(program, ops, kv_dtype, trials, isa, TUNE_EFFORTS[capacity.tune])
        _keep(Tuning(FILE_FORMAT, key, choices))
    program.choose(choices)
    return choices


def kept_tunings() -> Iterator[Tuning]:
    """Yield the tunings of this processor and build that the cache folder has."""
    folder = cache_folder()
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("*.json")) if folder is not None else ():
            tuning = _read(path)
            if tuning is not None and (tuning.key.processor, tuning.key.build) == (processor_id(), build_id()):
                yield tuning


def describe_choices(choices: Choices) -> str:
    """Return a line that names the functions of other levels."""
    if not choices:
        return "functions of other levels: none"
    return "functions of other levels: " + ", ".join(f"{name} by {level}" for name, level in choices.items())


def cache_folder() -> Path | None:
    """Return the folder of tunings; None if the user has neither a cache folder nor a home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # The XDG specification ignores relative paths.
        base = os.path.expanduser("~/.cache")
    return Path(base) / "quire" / "tuning" if os.path.isabs(base) else None


@functools.cache
def build_id() -> str:
    """Return a digest of the compiled functions."""
    return hashlib.sha256(Path(compiled.__file__).read_bytes()).hexdigest()[:16]


def _shape(ops: Sequence[Op], kv_dtype: str) -> str:
    first, end = layers_of(ops)[0]
    return f"KV {kv_dtype}: " + ", ".join(map(describe_op, ops[first:end]))


def _kept_choices(key: TuningKey) -> Choices | None:
    folder = cache_folder()
    tuning = None if folder is None else _read(folder / key.file_name)
    return tuning.choices if tuning is not None and tuning.key == key else None


def _read(path: Path) -> Tuning | None:
    """Return a tuning, or None if the file has none that this machine can run."""
    try:
        tuning = msgspec.json.decode(_regular_file(path), type=Tuning)
    except (OSError, ValueError, RecursionError):
        return None
    known = set(compiled.EQUAL_FUNCTIONS)
    if tuning.format != FILE_FORMAT or not tuning.choices.keys() <= known:
        return None
    return tuning if set(tuning.choices.values()) <= set(rivals_of(tuning.key.isa)) else None


def _regular_file(path: Path) -> bytes:
    """Return the content of a small regular file. Raises OSError or ValueError."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("not a file")
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError("too large")
    return content


def _keep(tuning: Tuning) -> None:
    """Write a tuning in one step, so that no process reads a part of it. Do nothing where the folder is read-only."""
    folder = cache_folder()
    if folder is None:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".writing-")
        try:
            with open(handle, "wb") as file:
                file.write(msgspec.json.encode(tuning))
            os.replace(name, folder / tuning.key.file_name)
        except OSError:
            os.unlink(name)
            raise
        oldest_first = sorted(folder.glob("*.json"), key=lambda path: path.lstat().st_mtime)
        for path in oldest_first[:-MAX_KEPT_FILES]:
            path.unlink()
