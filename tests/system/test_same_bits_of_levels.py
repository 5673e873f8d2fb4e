"""The same bits on every machine: with weights in f32, q8 or q4 and a KV cache in f32 or int8, tokens and logprobs do
not depend on the ISA level. `tests/goldens/bits.json` has a digest per pair of dtypes, from the bundled model; "gguf"
is a GGUF file of it with the types Q4_K, Q6_K and Q8_0.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from quire.kernels import supported_levels
from quire.runtime.common.config import EngineConfig
from quire.runtime.engine import Engine, GenerateRequest, TextProcessor
from quire.runtime.model import BUNDLED_MODEL, model_path
from quire.runtime.workers import EnginePool
from quire.runtime.workers.supervisor import ProcessSource

from tests.support.bits import asked, bits, chunks_of, prompt, running
from tests.support.gguf_files import describe, encode, stored_tensors, write

LEVELS = supported_levels()
GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "bits.json").read_text())
KV_CACHE_MEMORY = 16 << 20


def requests() -> Sequence[GenerateRequest]:
    return [
        asked(prompt(70, 1), max_tokens=10),
        asked(prompt(9, 2), max_tokens=10, temperature=0.9, top_p=0.9, top_k=50, seed=3),
        asked(prompt(33, 3), max_tokens=10, temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.3, seed=8),
    ]


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the bundled model with the types that a Q4_K_M file has; 704 columns are not a multiple of 256."""
    kinds = {"token_embd": "Q6_K", "attn_v": "Q6_K", "ffn_down": "Q8_0"}
    tensors = {}
    for name, tensor in stored_tensors(BUNDLED_MODEL, "F32").items():
        values = np.frombuffer(tensor.data, np.float32).reshape(tensor.shape)
        tensors[name] = encode(values, kinds.get(name.split(".")[-2], "Q4_K"))
    about = {**describe(BUNDLED_MODEL), "general.quantization_version": 2}
    return str(write(tmp_path_factory.mktemp("bits") / "a.gguf", about, tensors))


@pytest.mark.parametrize("dtypes", GOLDEN)
@pytest.mark.parametrize("isa", LEVELS)
async def test_golden_bits(isa: str, dtypes: str, gguf_file: str) -> None:
    weights, kv = dtypes.split("/")
    settings = {"model": gguf_file, "weights": "auto"} if weights == "gguf" else {"weights": weights}
    async with running(isa=isa, kv_cache_dtype=kv, kv_cache_memory=KV_CACHE_MEMORY, **settings) as engine:
        streams = [await chunks_of(engine, request) for request in requests()]
    tokens = [token for chunks in streams for chunk in chunks for token in chunk.logprobs]
    lines = [f"{token.token_id} {token.logprob.hex()} {token.top}" for token in tokens]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == GOLDEN[dtypes]


@pytest.mark.usefixtures("slow_engine", "forked_engines")
@pytest.mark.parametrize(("other", "weights"), list(zip(LEVELS[1:-1], cycle(["q8", "q4"]), strict=False)))
async def test_a_request_continues_at_another_level_after_a_crash(other: str, weights: Any) -> None:
    config = EngineConfig(isa=LEVELS[-1], weights=weights, kv_cache_dtype="int8", kv_cache_memory=KV_CACHE_MEMORY)
    request = asked(prompt(40, 5), max_tokens=300, temperature=0.8, seed=2)
    async with running(**msgspec.structs.asdict(config)) as undisturbed:
        expected = bits(await chunks_of(undisturbed, request))
    engine = Engine(await EnginePool.launch(config), TextProcessor.load(model_path(None)))
    try:
        member = engine.core.members[0]
        supervisor = member._supervisor
        source = supervisor._source
        assert isinstance(source, ProcessSource)
        elsewhere = msgspec.structs.replace(source.start.config, isa=other)
        source.start = msgspec.structs.replace(source.start, config=elsewhere)
        chunks = []
        async for chunk in await engine.submit(request):
            chunks.append(chunk)
            if len(chunks) == 3:
                assert supervisor.process is not None
                await supervisor.process.kill()
    finally:
        await engine.close()
    assert member.num_restarts == 1
    assert bits(chunks) == expected
