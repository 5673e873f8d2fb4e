"""`quire info`: print versions, the instruction set level and the number of threads."""

from __future__ import annotations

import platform
from importlib.metadata import version

from ...kernels import supported_levels, unsupported_levels
from ..model.runner import pick_cpus, pick_isa
from .flags import MemoryFlags, settings_from


def info(*, memory: MemoryFlags | None = None) -> None:
    """Print what this machine offers. Raises ConfigError."""
    config = settings_from(None, memory).engine
    cpus, isa = pick_cpus(config), pick_isa(config)
    print(f"quire      {version('quire')}")
    print(f"python     {platform.python_version()}")
    print(f"machine    {platform.machine()}, {platform.system()} {platform.release()}")
    reason = "requested by --isa or QUIRE_ISA; this machine has" if config.isa else "the best of"
    print(f"ISA        {isa}  ({reason} {', '.join(supported_levels())})")
    for level, obstacle in unsupported_levels().items():
        print(f"ISA        not {level}: {obstacle}")
    print(f"threads    {cpus.threads}  ({cpus.reason})")
    print(f"model      {config.model or 'bundled demo'}")
