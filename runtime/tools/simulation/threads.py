"""The cost of more threads in a step: waking, waiting for the end of an op, and idle threads.

Two threads were measured (tests/bench/LOG.md); more are computed from published times for moving a cache line between
two cores (github.com/nviennot/core-to-core-latency). Sockets are one constant apart: a line crosses them in 108-197 ns.
docs/many-cores.md has the resulting settings; tests/bench/many_cores.py prints tables of the model.

Not counted: the counter from which threads take units of attention (one moved cache line per unit); items that a second
thread computes again in case the first thread has lost its core; threads that fall asleep in the middle of a step,
after about 30 us without work; the sampler; other processes.
"""

from __future__ import annotations

THREAD_READ = 18e9  # bytes per second that one thread reads on its own: 16-20 measured on Zen 4
LINE_S = 50e-9  # a cache line moves to another core of the socket: 46-51 ns on Ice Lake and Graviton 3
SHARED_LINE_S = 10e-9  # per line or reader, if several lines or readers overlap
WAKE_S = 1.6e-6  # per sleeping thread; measured with up to 127 on Zen 4, virtualized
FIRST_WAKE_S = 13e-6  # time until one sleeping thread has run and arrived; measured likewise


def busy_share(units: int, threads: int) -> float:
    """Return the share of the threads that work, on average, until the last of `units` equal units is computed."""
    return units / (threads * -(-units // threads))


def finish_seconds(threads: int) -> float:
    """Return the seconds from the last unit of an op to the next op, if all threads finish at once.

    Each thread looks for remaining units; then the threads count in turns, and read that the op is finished.
    """
    return 0.0 if threads == 1 else threads * LINE_S + 2 * (threads - 1) * SHARED_LINE_S


def start_seconds(threads: int) -> float:
    """Return the mean seconds until a thread works in a step.

    Between steps threads sleep; one thread wakes them all.
    """
    return 0.0 if threads == 1 else FIRST_WAKE_S + (threads - 1) / 2 * WAKE_S
