"""Print the predictions of the cost model in `runtime/tools/simulation` for 2 to 128 threads, as tables, without
measuring."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from quire.kernels.ops import Linear
from quire.runtime.common.config import EngineConfig
from quire.runtime.model import DecoderSpec
from quire.runtime.model.runner import decide_capacity
from quire.runtime.model.spec import Rope
from quire.runtime.tools.simulation import given_roofline, roofline_cost
from quire.runtime.tools.simulation.cost import ROWS_IN_CACHE, RooflineCost, num_blocks
from quire.runtime.tools.simulation.prediction import step_seconds
from quire.runtime.tools.simulation.threads import THREAD_READ, busy_share, finish_seconds, start_seconds

SOCKET_READ = 250e9  # bytes per second: 8 channels of DDR5-4800 at 81 % of 307 GB/s
THREAD_INT8 = 465e9  # operations per second, measured on Zen 4
ROWS = 512  # rows of a prefill step
THREADS = (2, 8, 16, 32, 64, 96, 128)


def model(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, vocab: int, *, tied: bool
) -> DecoderSpec:
    return DecoderSpec(
        family="qwen3",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        norm_eps=1e-6,
        attention_scale=head_dim**-0.5,
        ropes=(Rope(1e6),) * layers,
        windows=(0,) * layers,
        qk_norm=True,
        tie_embeddings=tied,
        max_position_embeddings=8192,
        eos_token_ids=(0,),
    )


MODELS = {
    "Qwen2.5-0.5B": model(24, 896, 14, 2, 64, 4864, 151936, tied=True),
    "Qwen3-0.6B": model(28, 1024, 16, 8, 128, 3072, 151936, tied=True),
    "Llama-3.2-1B": model(16, 2048, 32, 8, 64, 8192, 128256, tied=True),
    "Qwen3-1.7B": model(28, 2048, 16, 8, 128, 6144, 151936, tied=True),
    "Qwen3-4B": model(36, 2560, 32, 8, 128, 9728, 151936, tied=True),
    "Qwen3-8B": model(36, 4096, 32, 8, 128, 12288, 151936, tied=False),
    "Llama-3.1-8B": model(32, 4096, 32, 8, 128, 14336, 128256, tied=False),
}


def main() -> None:
    print(*tables(), sep="\n\n")


def tables() -> Sequence[str]:
    """Return the tables, the busy share of each layer first."""
    return [blocks_table(), finer_table(), waiting_table(), speed_table(), engines_table()]


def blocks_table() -> str:
    """Return the blocks of each layer's ops, and the share of the threads that work in prefill."""
    header = ["model", "qkv", "o", "gate, up", "down", *(f"{threads} threads" for threads in THREADS[2:])]
    rows = []
    for name, spec in MODELS.items():
        layer = _layer(spec)
        shares = (_prefill_share(layer, threads) for threads in THREADS[2:])
        rows.append([name, *(str(num_blocks(op)) for op in layer), *map(_percent, shares)])
    return _table(header, rows)


def finer_table() -> str:
    """Return the gain of finer units of work for prefill on 64 and 128 threads."""
    choices = {"one group": (1, 1), "3 groups": (1, 3), "8 groups": (1, 8), "3 groups, blocks of 16": (2, 3)}
    header = ["model", *(f"{name}, {threads}" for name in choices for threads in (64, 128))]
    rows = [
        [name]
        + [
            _percent(_prefill_share(_layer(spec), t, finer, groups))
            for finer, groups in choices.values()
            for t in (64, 128)
        ]
        for name, spec in MODELS.items()
    ]
    return _table(header, rows)


def waiting_table() -> str:
    """Return the time of one user's decode step for waking threads and for waiting on each other."""
    header = ["threads", "wait after an op", "waking"]
    shown = {name: MODELS[name] for name in ("Qwen3-0.6B", "Qwen3-8B")}
    header += [f"{name}: waits of a step" for name in shown]
    rows = []
    for threads in THREADS:
        row = [str(threads), _micro(finish_seconds(threads)), _micro(start_seconds(threads))]
        for spec in shown.values():
            cost = _cost(spec, threads)
            row.append(f"{_micro(cost.step_s)}, {_percent(cost.step_s / _seconds(cost, 1, 128, 1))}")
        rows.append(row)
    return _table(header, rows)


def speed_table() -> str:
    """Return the tokens per second that the model predicts on one socket."""
    header = ["threads", "GB/s"]
    shown = {name: MODELS[name] for name in ("Qwen3-0.6B", "Qwen3-8B")}
    header += [f"{name}: {phase}" for name in shown for phase in ("1 user", "32 users", "prefill")]
    rows = []
    for threads in (1, *THREADS):
        row = [str(threads), f"{_read(threads) / 1e9:.0f}"]
        for spec in shown.values():
            cost = _cost(spec, threads)
            for users, first, count in ((1, 128, 1), (32, 128, 1), (1, 0, ROWS)):
                row.append(f"{users * count / _seconds(cost, users, first, count):,.0f}")
        rows.append(row)
    return _table(header, rows)


def engines_table() -> str:
    """Return the tokens per second of one socket of 64 cores whose threads and bandwidth several engines share."""
    header = ["engine processes", "threads of each"]
    shown = {name: MODELS[name] for name in ("Qwen3-0.6B", "Qwen3-8B")}
    header += [f"{name}: {phase}" for name in shown for phase in ("32 users", "prefill")]
    rows = []
    for engines in (1, 2, 4):
        row = [str(engines), str(64 // engines)]
        for spec in shown.values():
            cost = _cost(spec, 64 // engines, SOCKET_READ / engines)
            for users, first, count in ((32 // engines, 128, 1), (1, 0, ROWS)):
                row.append(f"{engines * users * count / _seconds(cost, users, first, count):,.0f}")
        rows.append(row)
    return _table(header, rows)


def _layer(spec: DecoderSpec) -> list[Linear]:
    """Return the four linear layers of one decoder layer."""
    config = EngineConfig(weights="q8", kv_cache_memory=1 << 30, threads=1)
    program = decide_capacity(config, spec).memory.program
    return [op for op in program.ops if isinstance(op, Linear)][:4]


def _prefill_share(
    layer: Iterable[Linear], threads: int, finer: int = 1, groups: int = -(-ROWS // ROWS_IN_CACHE)
) -> float:
    """Return the share of the threads that work, weighted by the time of each op."""
    sizes = [(op.weight.out_features * op.weight.in_features, num_blocks(op) * finer * groups) for op in layer]
    return sum(size for size, _ in sizes) / sum(size / busy_share(units, threads) for size, units in sizes)


def _read(threads: int) -> float:
    return min(SOCKET_READ, threads * THREAD_READ)


def _cost(spec: DecoderSpec, threads: int, read_bytes_per_s: float = SOCKET_READ) -> RooflineCost:
    config = EngineConfig(weights="q8", kv_cache_dtype="int8", kv_cache_memory=1 << 30, threads=threads)
    roofline = given_roofline(min(read_bytes_per_s, _read(threads)), threads * THREAD_INT8)
    return roofline_cost(spec, decide_capacity(config, spec), roofline)


def _seconds(cost: RooflineCost, users: int, first: int, rows: int) -> float:
    """Return the seconds of a step of `users` sequences with `rows` rows each, and from it to the next step."""
    return step_seconds(cost, [(first, rows, 1)] * users)


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} µs" if seconds < 1e-5 else f"{seconds * 1e6:,.0f} µs"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()
