"""The table of KV cache sizes and the memory plan, in exact bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quire.kernels import scratch_nbytes
from quire.kernels.ops import Attention, padded
from quire.pager import KVArena
from quire.runtime.model import kv_layout, pack_model, plan_memory, read_spec
from quire.runtime.model.rope import rotary_tables
from quire.runtime.tools.planning.kv_sizes import KNOWN_SHAPES, describe_sizes, human

from tests.support.families import FAMILIES, GOLDENS

GIB = 1 << 30
MIB = 1 << 20
SHAPES = {shape.name: shape for shape in KNOWN_SHAPES}


@pytest.mark.parametrize(
    ("name", "tokens", "f32", "bf16"),
    [
        ("Qwen3-0.6B", 1_024, 234_881_024, 117_440_512),
        ("Llama-3-8B", 8_192, 2 * GIB, 1 * GIB),
        ("Llama-3-70B", 8_192, 5 * GIB, 5 * GIB // 2),
        ("Llama-3-405B", 131_072, 126 * GIB, 63 * GIB),
        ("Qwen2.5-7B", 4_096, 448 * MIB, 224 * MIB),
        ("Gemma-3-4B", 4_096, 392 * MIB, 196 * MIB),  # 5 full layers, 29 hold 1,024 tokens
        ("Gemma-4-E2B", 4_096, 60 * MIB, 30 * MIB),  # 3 full layers of 512 elements, 12 hold 512 tokens of 256
        ("DeepSeek-V2-Lite", 4_096, 27 * 576 * 4 * 4_096, 27 * 576 * 2 * 4_096),
        ("Mistral-7B-v0.1", 8_192, 1 * GIB, 512 * MIB),  # every layer holds 4,096 tokens
    ],
)
def test_known_sizes(name: str, tokens: int, f32: int, bf16: int) -> None:
    shape = SHAPES[name]
    assert (shape.num_tokens, shape.kv_bytes("f32"), shape.kv_bytes("bf16")) == (tokens, f32, bf16)
    assert shape.kv_bytes("f16") == bf16


@pytest.mark.parametrize(
    ("size", "text"),
    [(3 * MIB // 2, "1.5 MiB"), (224 * MIB, "224 MiB"), (1_022 * MIB, "1,022 MiB"), (2 * GIB, "2.0 GiB")],
)
def test_sizes_for_people_have_no_exponent(size: int, text: str) -> None:
    assert human(size) == text


def test_the_table_prints_every_model_with_exact_bytes() -> None:
    header, *rows = describe_sizes().splitlines()
    assert header.split() == ["model", "tokens", "f32,", "bytes", "f16", "and", "bf16,", "bytes"]
    assert len(rows) == len(KNOWN_SHAPES) + sum(bool(shape.windows) for shape in KNOWN_SHAPES)
    assert "Qwen3-0.6B           1,024         234,881,024    224 MiB         117,440,512    112 MiB" in rows
    assert any(row.startswith("Llama-3-8B") and "2.0 GiB" in row and "1.0 GiB" in row for row in rows)
    gemma = next(i for i, row in enumerate(rows) if row.startswith("Gemma-3-4B"))
    assert rows[gemma].endswith("196 MiB")
    assert rows[gemma + 1].startswith("  were all full")
    assert rows[gemma + 1].endswith("1,140,850,688    1.1 GiB         570,425,344    544 MiB")
    assert any(row.startswith("Llama-3-405B") and "126 GiB" in row and "63 GiB" in row for row in rows)


def test_the_bundled_model_in_the_table_has_its_real_size() -> None:
    shape = SHAPES["Quire demo (4 M)"]
    layout = kv_layout(pack_model(None, "q8").spec, "bf16", 32)
    assert shape.kv_bytes("bf16") == layout.sequence_bytes(shape.num_tokens)


@pytest.mark.parametrize("kv_dtype", ["f32", "int8"])
@pytest.mark.parametrize("weights", ["f32", "q8", "q4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_equals_what_loading_and_compiling_allocate(family: str, weights: Any, kv_dtype: Any) -> None:
    model = pack_model(GOLDENS / family, weights)
    compiled = model.compile(max_positions=100, max_tokens=48, max_samples=8)
    layout = kv_layout(model.spec, kv_dtype, 32)
    plan = plan_memory(
        read_spec(GOLDENS / family),
        weights=weights,
        kv_dtype=kv_dtype,
        page_size=32,
        num_pages=10,
        max_positions=100,
        max_tokens=48,
        max_samples=8,
        workers=2,
    )
    arena = KVArena(layout, 10)
    tables = {id(table): table for table in rotary_tables(model.spec.ropes, model.spec.head_dim, 100)}
    vocab = padded(model.spec.vocab_size)
    assert plan.kv_bytes == arena.memory.nbytes
    assert plan.arena_bytes == compiled.arena_bytes
    assert plan.program.values == compiled.values
    assert plan.logits_bytes == compiled.logits.nbytes == 8 * vocab * 4
    tables |= {id(op.query_scales): op.query_scales for op in compiled.ops if isinstance(op, Attention)}
    assert plan.rotary_bytes == sum(table.nbytes for table in tables.values() if table is not None)
    assert plan.scratch_bytes == scratch_nbytes(2, compiled.ops)
    assert plan.sampling_bytes == 2 * vocab * (4 + 8) + 8 * (4 + 4 + 32 * 8)
    step_bytes = plan.arena_bytes + plan.rotary_bytes + plan.scratch_bytes + plan.sampling_bytes
    assert plan.total_bytes == plan.weights_bytes + plan.kv_bytes + step_bytes + plan.process_bytes
    assert f"total {plan.total_bytes:>30,} B" in plan.describe()
    arena.close()


def test_a_plan_needs_no_weights_and_no_memory(tmp_path: Path, goldens: Path) -> None:
    """Llama 3 405B's shape, in a folder without a single tensor."""
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 16384, "num_hidden_layers": 126,'
        '"num_attention_heads": 128, "num_key_value_heads": 8, "intermediate_size": 53248,'
        '"max_position_embeddings": 131072}'
    )
    plan = plan_memory(
        read_spec(tmp_path),
        weights="bf16",
        kv_dtype="bf16",
        page_size=32,
        num_pages=4096,
        max_positions=131072,
        max_tokens=512,
        max_samples=64,
        workers=2,
    )
    norms = (2 * 126 + 1) * 16384
    assert plan.weights_bytes == 2 * (405_853_388_800 - norms)  # the published parameter count, all in bf16
    assert plan.kv_bytes == 63 * GIB
