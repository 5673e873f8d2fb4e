"""The arithmetic of a model: functions from buffers to buffers, independent of requests, policies and sockets.

A model is a list of ops (`ops`) over packed weights (`pack`). `Program` binds the list to memory and runs a step in one
call on the threads of a `Pool`. `Sampler` turns logits into tokens.
"""

from .cpus import CpuBudget, available_cpus
from .isa import pick_level, supported_levels, unsupported_levels
from .pack import PackedMatrix, packed_nbytes
from .pool import Pool
from .program import Program, scratch_nbytes
from .roofline import peak_ops_per_s, read_bytes_per_s
from .sample import Sampler, sampler_nbytes

__all__ = [
    "CpuBudget",
    "PackedMatrix",
    "Pool",
    "Program",
    "Sampler",
    "available_cpus",
    "packed_nbytes",
    "peak_ops_per_s",
    "pick_level",
    "read_bytes_per_s",
    "sampler_nbytes",
    "scratch_nbytes",
    "supported_levels",
    "unsupported_levels",
]
