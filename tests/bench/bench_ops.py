"""Benchmarks of one kind of op at a time: `make bench`, or pytest with this file's name; `-k attention` selects some.

Not part of `make test`. The figures hold for this machine and its default ISA level; compare two builds only within
one run.
"""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
from quire.kernels import Pool, Sampler, available_cpus, pick_level, supported_levels
from quire.kernels.sample import ADJUSTMENT, ROW
from quire.runtime.common.config import EngineConfig
from quire.runtime.tools.bench import measure_overhead
from quire.runtime.tools.bench.thread_sweep import least_op_seconds

from tests.kernels.encoder import VOCAB as ENCODER_VOCAB
from tests.kernels.encoder import Encoder

from .conftest import DELTA, MIXTURE

VOCAB = 151936
LEVELS = [level for level in supported_levels() if level not in ("scalar", "amx-twin")]


@pytest.mark.parametrize("rows", [1, 8, 32, 512])
@pytest.mark.parametrize("weights", ["q8", "q4", "q4_k", "q5_k", "q6_k", "q4_z", "bf16", "f32"])
def test_linear_layers(measure, one_op, weights, rows):
    bench = one_op("Linear", rows=rows, weights=weights)
    matrices = [op.weight for op in bench.ops]
    multiplied = sum(matrix.out_features * matrix.in_features for matrix in matrices)
    measure(bench, sum(matrix.nbytes for matrix in matrices), 2 * rows * multiplied)


@pytest.mark.parametrize("rows", [4, 8, 12, 16, 17, 20, 32, 64, 192])
@pytest.mark.parametrize("weights", ["q8", "q4", "bf16"])
@pytest.mark.parametrize("isa", LEVELS)
def test_linear_layers_of_levels(measure, one_op, isa, weights, rows):
    """Compare the levels, by the number of rows: tiles of AMX hold 16."""
    bench = one_op("Linear", rows=rows, weights=weights, isa=isa)
    matrices = [op.weight for op in bench.ops]
    multiplied = sum(matrix.out_features * matrix.in_features for matrix in matrices)
    measure(bench, sum(matrix.nbytes for matrix in matrices), 2 * rows * multiplied)


@pytest.mark.parametrize("kv", ["bf16", "int8"])
@pytest.mark.parametrize("isa", LEVELS)
def test_attention_prefills_at_levels(measure, one_op, isa, kv):
    rows = 512
    bench = one_op("Attention", rows=rows, context=3584, kv=kv, isa=isa)
    pairs = rows * 3584 + rows * (rows + 1) // 2
    measure(bench, num_ops=sum(4 * pairs * op.num_heads * op.head_dim for op in bench.ops))


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("weights", ["q8", "q4", "bf16"])
def test_experts(measure, one_op, weights, rows):
    bench = one_op("ExpertLinear", rows=rows, weights=weights, spec=MIXTURE)
    chosen = min(rows * MIXTURE.experts.top_k, MIXTURE.experts.num_experts)
    matrices = [op.weights[0] for op in bench.ops]
    multiplied = sum(matrix.out_features * matrix.in_features for matrix in matrices)
    measure(bench, chosen * sum(matrix.nbytes for matrix in matrices), 2 * rows * MIXTURE.experts.top_k * multiplied)


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("weights", ["q8", "bf16"])
def test_lm_head(measure, one_op, weights, rows):
    bench = one_op("Linear", users=rows, weights=weights, head=True)
    matrix = bench.ops[0].weight
    measure(bench, matrix.nbytes, 2 * rows * matrix.out_features * matrix.in_features)


@pytest.mark.parametrize(("users", "context"), [(1, 127), (32, 127), (1, 4095), (8, 2047)])
@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_attention_decodes(measure, one_op, kv, users, context):
    bench = one_op("Attention", users=users, context=context, kv=kv)
    measure(bench, users * (context + 1) * bench.layout.token_bytes)


@pytest.mark.parametrize("context", [0, 3584])
@pytest.mark.parametrize("kv", ["bf16", "int8"])
def test_attention_prefills(measure, one_op, kv, context):
    rows = 512
    pairs = rows * context + rows * (rows + 1) // 2
    bench = one_op("Attention", rows=rows, context=context, kv=kv)
    measure(bench, num_ops=sum(4 * pairs * op.num_heads * op.head_dim for op in bench.ops))


@pytest.mark.parametrize(("texts", "tokens"), [(1, 16), (1, 128), (1, 512), (40, 16)])
def test_texts(benchmark, texts, tokens):
    """Run two layers of the shape of BERT-base over texts, from token ids to vectors."""
    threads = available_cpus().threads
    shape = {"heads": 12, "kv_heads": 12, "head_dim": 64, "hidden": 768, "intermediate": 3072}
    encoder = Encoder(weights="q8", kv="int8", **shape, threads=threads)
    step = encoder.step(*[np.arange(tokens) % ENCODER_VOCAB] * texts)
    benchmark(encoder.program.run_texts, *step)
    benchmark.extra_info["texts/s"] = round(texts / benchmark.stats.stats.median)


@pytest.mark.parametrize("users", [1, 8, 32])
def test_recurrence_decodes(measure, one_op, users):
    bench = one_op("LinearRecurrence", users=users, spec=DELTA)
    measure(bench, sum(2 * users * op.state.num_heads * op.state.matrix_bytes * op.state.segments for op in bench.ops))


def test_recurrence_prefills(measure, one_op):
    bench = one_op("LinearRecurrence", rows=512, spec=DELTA)
    elements = sum(op.state.num_heads * op.state.key_dim * op.state.value_dim for op in bench.ops)
    measure(bench, num_ops=512 * 7 * elements)


@pytest.mark.parametrize("rows", [1, 512])
def test_embedding(measure, one_op, rows):
    measure(one_op("Embed", rows=rows))


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 50}, {"temperature": 1.0, "top_p": 0.95}],
    ids=["greedy", "plain", "top-k", "top-p"],
)
def test_sampling(benchmark, params, rows):
    logits = np.random.default_rng(1).standard_normal((rows, VOCAB)).astype(np.float32) * 3
    sampler = Sampler(VOCAB, VOCAB, rows, Pool(available_cpus().threads))
    wanted = np.zeros(rows, ROW)
    wanted["top_p"] = wanted["repetition_penalty"] = 1
    wanted["logprobs"] = -1
    for name, value in params.items():
        wanted[name] = value
    maxima = np.ascontiguousarray(logits.reshape(rows, VOCAB // 32, 32).max(axis=2))  # maxima by lm_head
    benchmark(sampler.sample, logits, maxima, wanted, np.zeros(0, ADJUSTMENT))
    benchmark.extra_info["GB/s"] = round(logits.nbytes / benchmark.stats.stats.median / 1e9, 1)


@pytest.mark.parametrize("threads", sorted({1, 2, available_cpus().threads}))
def test_least_op(benchmark, threads):
    """Note the least cost of an op of any size; the seconds are the duration of the measurement."""
    seconds = benchmark.pedantic(least_op_seconds, (threads, pick_level()), rounds=3)
    benchmark.extra_info["ns per op"] = round(seconds * 1e9)


def test_step_overhead(benchmark):
    """Note the overhead in microseconds per running sequence; the seconds are the time the measurement took."""
    overhead = benchmark.pedantic(measure_overhead, (EngineConfig(),), rounds=3)
    benchmark.extra_info |= {name: round(value, 1) for name, value in asdict(overhead).items()}
