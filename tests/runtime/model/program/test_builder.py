"""The builder: the ops of a decoder in order, and regions that are not overwritten while they are still read."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.kernels.ops import (
    AddNorm,
    Attention,
    Combine,
    Convert,
    Dispatch,
    Embed,
    ExpertLinear,
    Gather,
    Linear,
    Normed,
    Op,
    Region,
    RouteRows,
    Routing,
    region_nbytes,
)
from quire.kernels.pack import PackedMatrix, packed_nbytes
from quire.runtime.model import pack_model
from quire.runtime.model.program import F32, ProgramBuilder, ProgramPlan
from quire.runtime.model.program.arena_layout import Lifetime

from tests.runtime.model.conftest import max_live_bytes

GOLDENS = Path(__file__).parents[3] / "goldens"


def compiled(family: str, weights: Any, max_tokens: int = 64, max_samples: int = 4) -> ProgramPlan:
    model = pack_model(GOLDENS / family, weights)
    return model.compile(max_positions=96, max_tokens=max_tokens, max_samples=max_samples)


def reads_and_writes(op: Op) -> tuple[list[Region], list[Region]]:
    match op:
        case Embed():
            return [], [op.out, *regions(op.normed)]
        case Attention():
            return [op.qkv], [op.out]
        case Linear():
            added_to = [op.out] if op.epilogue == "add" else []
            return [*regions(op.input), *added_to], [op.out, *regions(op.normed), *regions(op.maxima)]
        case Gather():
            return [op.input], [op.out, *regions(op.normed)]
        case Convert():
            return [op.input], [op.out]
        case AddNorm():
            return [op.input, op.out], [op.out, *regions(op.normed)]
        case RouteRows():
            return [op.logits], regions(op.routing)
        case Dispatch():
            return [*regions(op.input), op.routing.places], regions(op.out)
        case ExpertLinear():
            return [*regions(op.input), op.routing.groups], [op.out]
        case Combine():
            tables = [op.routing.places, op.routing.weights]
            return [op.input, *tables, op.out], [op.out, *regions(op.normed)]


def regions(value: Region | Normed | Routing | None) -> list[Region]:
    if isinstance(value, Normed):
        return [value.data, value.squares]
    if isinstance(value, Routing):
        return [value.weights, value.places, value.groups]
    return [] if value is None else [value]


def names(ops: list[Op]) -> list[str]:
    return [
        type(op).__name__
        + (f":{op.epilogue}" if isinstance(op, Linear | ExpertLinear) else "")
        + (", norm" if isinstance(op, Embed | Linear | Gather | AddNorm | Combine) and op.normed else "")
        for op in ops
    ]


def test_the_ops_of_a_decoder() -> None:
    block = ["Linear:store", "Attention", "Linear:add, norm", "Linear:swiglu", "Linear:add"]
    first, last = [*block[:-1], "Linear:add, norm"], block
    assert names(compiled("llama", "q8").ops) == ["Embed, norm", *first, *last, "Gather, norm", "Linear:store"]


def test_a_branch_is_normed_before_it_is_added() -> None:
    block = ["Linear:store", "Attention", "Linear:store", "AddNorm, norm", "Linear:geglu", "Linear:store"]
    layers = [*block, "AddNorm, norm"] * 3 + [*block, "AddNorm"]
    assert names(compiled("gemma2", "q8").ops) == ["Embed, norm", *layers, "Gather, norm", "Linear:store"]


def test_without_norms_before_them_layers_read_the_residual_stream() -> None:
    block = ["Convert", "Linear:store", "Attention", "Convert", "Linear:store", "AddNorm"]
    layer = [*block, "Convert", "Linear:swiglu", "Linear:store", "AddNorm"]  # 2 heads of 12
    assert names(compiled("olmo2", "q8").ops) == ["Embed", *layer, *layer, "Gather, norm", "Linear:store"]


def test_heads_that_do_not_fill_blocks_are_converted_by_an_op() -> None:
    assert names(compiled("qwen3", "q8").ops)[2:5] == ["Attention", "Convert", "Linear:add, norm"]  # 2 heads of 24


def test_the_ops_of_a_mixture_of_experts() -> None:
    attention = ["Linear:store", "Attention", "Convert", "Linear:add, norm"]
    experts = ["Linear:store", "RouteRows", "Dispatch", "ExpertLinear:swiglu", "ExpertLinear:store"]
    mlp = ["Linear:swiglu", "Linear:add, norm"]
    layers = [*attention, *experts, "Combine, norm", *attention, *mlp, *attention, *experts, "Combine"]
    assert names(compiled("qwen3_moe", "q8").ops) == ["Embed, norm", *layers, "Gather, norm", "Linear:store"]


def test_nothing_overwrites_the_groups_of_a_layer_until_the_end_of_the_step() -> None:
    """A worker that lost its core in a layer may read them much later."""
    plan = compiled("mixtral", "q8")
    kept = [value for value in plan.values if value.name == "expert groups"]
    assert len({value.region for value in kept}) == 2
    assert {value.last_op for value in kept} == {len(plan.ops)}


def test_f32_weights_need_no_conversion() -> None:
    assert not any(isinstance(op, Convert) for op in compiled("qwen3", "f32").ops)


@pytest.mark.parametrize("weights", ["bf16", "q8", "q4", "f32"])
def test_linears_read_the_dtype_of_their_weights(weights: Any) -> None:
    linears = [op for op in compiled("llama", weights).ops if isinstance(op, Linear)]
    read = "q8" if weights == "q4" else weights
    assert {regions(op.input)[0].dtype for op in linears} == {read}
    assert {(op.epilogue, op.out.dtype) for op in linears} == {("store", "f32"), ("add", "f32"), ("swiglu", read)}


def test_the_residual_stream_is_one_region_added_to_in_place() -> None:
    plan = compiled("llama", "q8")
    embed = plan.ops[0]
    assert isinstance(embed, Embed)
    added = {op.out for op in plan.ops if isinstance(op, Linear) and op.epilogue == "add"}
    assert added == {embed.out}


def test_only_sampled_rows_reach_the_head() -> None:
    plan = compiled("llama", "bf16", max_tokens=64, max_samples=4)
    gather, head = plan.ops[-2:]
    assert isinstance(gather, Gather)
    assert isinstance(head, Linear)
    assert gather.normed == head.input
    assert [gather.input.rows, gather.out.rows, *(r.rows for r in regions(head.input)), head.out.rows] == [64, *[4] * 4]
    assert plan.logits == head.out == Region(plan.logits.offset, 4, 320, "f32")


def test_windows_come_from_the_spec() -> None:
    qwen2 = [op for op in compiled("qwen2", "q8").ops if isinstance(op, Attention)]
    assert [op.window for op in qwen2] == [0, 20]


@pytest.mark.parametrize(("max_tokens", "max_samples"), [(1, 1), (33, 33), (64, 4), (512, 64)])
@pytest.mark.parametrize("weights", ["bf16", "q8", "q4", "f32"])
@pytest.mark.parametrize("family", ["mistral", "mixtral", "olmo2", "gemma3"])
def test_an_op_reads_what_an_earlier_op_wrote(family: str, weights: Any, max_tokens: int, max_samples: int) -> None:
    """For each byte, the op that wrote it last wrote exactly the region that is read."""
    plan = compiled(family, weights, max_tokens, max_samples)
    owner: dict[int, Region] = {}
    for op in plan.ops:
        inputs, outs = reads_and_writes(op)
        for region in inputs:
            assert {owner.get(block) for block in blocks(region)} == {region}, op
        for out in outs:
            others = [region for region in inputs + outs if region != out]
            assert not any(set(blocks(out)) & set(blocks(region)) for region in others)
            owner.update(dict.fromkeys(blocks(out), out))
    for region in (plan.logits, plan.maxima):
        assert {owner[block] for block in blocks(region)} == {region}


def blocks(region: Region) -> range:
    return range(region.offset // 64, (region.offset + region_nbytes(region.rows, region.columns, region.dtype)) // 64)


def packed(out_features: int, in_features: int) -> PackedMatrix:
    memory = np.zeros(packed_nbytes(out_features, in_features, "f32") + 64, np.uint8)
    return PackedMatrix(out_features, in_features, "f32", memory[-memory.ctypes.data % 64 :])


def test_the_logits_stay_readable_to_the_end() -> None:
    """Later ops do not overwrite the logits: here the logits come first, and a longer chain after them."""
    embedding = packed(64, 64)
    builder = ProgramBuilder(8, 8)
    other = builder.embed(embedding)
    result = builder.logits(other, embedding)
    for _ in range(3):
        other = builder.linear(other, embedding, None, "chain")
    plan = builder.build(result)
    (kept,) = [value for value in plan.values if value.region == plan.logits]
    (maxima,) = [value for value in plan.values if value.region == plan.maxima]
    assert [(value.first_op, value.last_op) for value in (kept, maxima)] == [(1, len(plan.ops))] * 2
    assert plan.arena_bytes == 3 * kept.region.nbytes + maxima.region.nbytes  # the logits, and two values of the chain


def test_the_last_op_that_wrote_the_residual_stream_writes_the_norm() -> None:
    builder = ProgramBuilder(8, 8)
    weight = np.ones(64, np.float32)
    square = packed(64, 64)
    x = builder.embed(square)
    y = builder.linear(builder.norm(x, weight, 1e-6, F32), square, None, "y")
    with pytest.raises(ValueError, match="already writes one"):
        builder.norm(x, weight, 1e-6, F32)
    with pytest.raises(ValueError, match="cannot write its norm"):
        builder.norm(y, weight, 1e-6, F32)
    builder.linear_add(y, square, None, x)
    normed = builder.norm(x, weight, 1e-6, F32)
    plan = builder.build(builder.logits(normed, square))
    assert names(plan.ops) == ["Embed, norm", "Linear:store", "Linear:add, norm", "Linear:store"]


@pytest.mark.parametrize("weights", ["bf16", "q8", "q4", "f32"])
def test_the_arena_is_little_larger_than_the_most_live_bytes(weights: Any) -> None:
    plan = compiled("llama", weights, max_tokens=512, max_samples=16)
    values = [Lifetime(value.region.nbytes, value.first_op, value.last_op) for value in plan.values]
    assert plan.arena_bytes <= 1.1 * max_live_bytes(values)
    assert plan.arena_bytes < sum(value.nbytes for value in values) / 2


def test_the_map_lists_every_value_by_offset() -> None:
    plan = compiled("qwen3", "q8")
    *lines, last = plan.describe().splitlines()
    offsets = [int(line.split()[0].replace(",", "")) for line in lines]
    assert all(low <= high for low, high in pairwise(offsets))
    assert sum(int(line.rsplit("x", 1)[1]) for line in lines) == len(plan.values)
    assert last.split() == [f"{plan.arena_bytes:,}", "end", "of", "arena,", "15", "ops"]
