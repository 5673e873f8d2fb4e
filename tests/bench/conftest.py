"""Programs of one kind of op in the shape of Qwen3-0.6B, with zero weights: speed depends on shapes, not on values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
from quire.kernels import PackedMatrix, Pool, Program, available_cpus, packed_nbytes
from quire.kernels.ops import Region, RoutingRule
from quire.pager import KVArena, map_memory
from quire.runtime.model.decoder import emit_decoder
from quire.runtime.model.packed_model import kv_layout
from quire.runtime.model.program import Logits, ProgramBuilder
from quire.runtime.model.rope import rotary_tables
from quire.runtime.model.spec import DecoderSpec, Experts, GatedDelta, Rope
from quire.runtime.model.states import lay_out_states
from quire.runtime.model.weights.decoder_weights import build_weights
from quire.runtime.model.weights.packing import MatrixPlan

LAYERS = 8  # enough that the weights do not fit into a cache, in any dtype
QWEN3 = DecoderSpec(
    family="qwen3",
    vocab_size=151936,
    hidden_size=1024,
    num_layers=LAYERS,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=3072,
    norm_eps=1e-6,
    attention_scale=128**-0.5,
    ropes=(Rope(1e6),) * LAYERS,
    windows=(0,) * LAYERS,
    qk_norm=True,
    tie_embeddings=True,
    max_position_embeddings=40960,
    eos_token_ids=(0,),
)


MIXTURE = replace(
    QWEN3,
    num_layers=1,  # one layer: 176 MB in q8
    ropes=QWEN3.ropes[:1],
    windows=QWEN3.windows[:1],
    experts=Experts(num_experts=32, top_k=4, intermediate_size=1792, rule=RoutingRule(normalized=True), layers=(True,)),
)


DELTA = replace(  # 18 recurrences as in Qwen3.5-0.8B: 1 MiB of f32 each for a sequence
    QWEN3,
    num_layers=19,
    ropes=QWEN3.ropes[:1] * 19,
    windows=(0,) * 19,
    delta=GatedDelta(
        num_key_heads=16,
        num_value_heads=16,
        key_dim=128,
        value_dim=128,
        taps=4,
        norm_eps=1e-6,
        layers=(*(True,) * 18, False),
    ),
)


class Zeros:
    """Implements `packing.WeightFactory`."""

    def matrix(self, plan: MatrixPlan) -> PackedMatrix:
        memory = map_memory(packed_nbytes(plan.out_features, plan.in_features, plan.dtype))
        return PackedMatrix(plan.out_features, plan.in_features, plan.dtype, memory)

    def vector(self, size: int, parts: object, offset: float = 0.0) -> np.ndarray:
        return np.zeros(size, np.float32)


@dataclass
class OneOp:
    """The ops of one kind of a decoder, bound to memory, for `users` with `rows` rows each after `context` tokens.

    `kind` is the op's class; `head` selects the lm_head instead of the layers' linears, `spec` a mixture of experts, of
    which all get as many rows. `run` executes one step of them. Memory that an op reads and no other op has written is
    zero.
    """

    kind: str
    users: int = 1
    rows: int = 1
    context: int = 0
    weights: str = "q8"
    kv: str = "bf16"
    head: bool = False
    spec: DecoderSpec = QWEN3
    isa: str | None = None
    ops: list = field(init=False)

    def __post_init__(self) -> None:
        self.pool = Pool(available_cpus().threads)
        spec = self.spec
        self.layout = kv_layout(spec, self.kv, 32)
        end = self.context + self.rows
        pages = self.layout.pages_for(end)
        builder = ProgramBuilder(self.users * self.rows, self.users)
        plan = builder.build(self._emit(builder))
        self.ops = [op for op in plan.ops if type(op).__name__ == self.kind]
        if self.kind == "Linear":
            self.ops = [op for op in self.ops if (op.maxima is not None) == self.head]
        self.arena = KVArena(self.layout, self.users * pages)
        self.program = Program(
            self.ops,
            plan.arena_bytes,
            self.arena.memory,
            self.layout,
            self.users * pages,
            self.pool,
            max_rows=self.users * self.rows,
            max_samples=self.users,
            max_sequences=self.users,
            vocab_size=spec.vocab_size,
            isa=self.isa,
        )
        # Pages never written share one physical page of zeros, which is read at another speed than separate pages.
        self.program.view(Region(0, plan.arena_bytes // 128, 32, "f32")).fill(0)
        if self.kind == "ExpertLinear":
            self._route()
        self.step = (
            np.arange(self.users * self.rows) % 8000,
            np.arange(self.users + 1) * self.rows,
            np.full(self.users, self.context),
            np.arange(self.users * pages),
            np.arange(self.users + 1) * pages,
            np.arange(self.users),
        )
        self.step = tuple(array.astype(np.int32) for array in self.step)

    def _route(self) -> None:
        """Divide the places of all rows evenly among the experts, instead of a router."""
        routing = self.ops[0].routing
        bounds = np.linspace(0, self.users * self.rows * routing.top_k, routing.num_experts + 1).astype(int)
        groups = [(expert, *ends) for expert, ends in enumerate(pairwise(bounds)) if ends[0] < ends[1]]
        table = self.program.view(routing.groups)
        table[0, 0] = len(groups)
        table[1 : 1 + len(groups), :3] = groups

    def _emit(self, builder: ProgramBuilder) -> Logits:
        spec = self.spec
        rotary = rotary_tables(spec.ropes, spec.head_dim, self.context + self.rows)
        weights = build_weights(spec, self.weights, Zeros())
        return emit_decoder(builder, spec, weights, rotary, lay_out_states(spec))

    def run(self) -> None:
        self.program.run(*self.step)
        if self.kind == "LinearRecurrence":
            self._advance()

    def _advance(self) -> None:
        """Let the next step begin after this one: a state is written when it gets further."""
        token_ids, row_start, first_position, _, _, samples = self.step
        pages = self.layout.pages_for(int(first_position[0]) + 2 * self.rows)
        page_ids, page_start = np.zeros(self.users * pages), np.arange(self.users + 1) * pages
        self.step = token_ids, row_start, first_position + self.rows, page_ids, page_start, samples
        self.step = tuple(array.astype(np.int32) for array in self.step)


@pytest.fixture
def one_op():
    return OneOp


@pytest.fixture
def measure(benchmark):
    """Return a function that times a step's ops, and notes GB/s or GOP/s of the median round."""

    def of(bench: OneOp, num_bytes: float = 0, num_ops: float = 0) -> None:
        benchmark(bench.run)
        for name, amount in (("GB/s", num_bytes), ("GOP/s", num_ops)):
            if amount:
                benchmark.extra_info[name] = round(amount / benchmark.stats.stats.median / 1e9, 1)

    return of


def pytest_terminal_summary(terminalreporter, config):
    """Print a table of the noted figures, which pytest-benchmark's own table leaves out."""
    session = getattr(config, "_benchmarksession", None)
    for bench in session.benchmarks if session else ():
        noted = "  ".join(f"{value:>8} {name}" for name, value in bench.extra_info.items())
        terminalreporter.write_line(f"{bench.name:<48}{bench.stats.median * 1000:>10.3f} ms  {noted}")
