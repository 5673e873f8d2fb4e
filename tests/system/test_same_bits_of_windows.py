"""Promise 1 with sliding windows: a request has the same bits alone, together with others, after a prefix hit, and in a
small pool, where other requests reuse the pages that left a window and requests are preempted.
"""

from __future__ import annotations

import pytest
from quire.runtime.common.types import SamplingParams
from quire.runtime.engine import GenerateRequest
from quire.runtime.model import kv_layout, read_spec

from tests.support import bits
from tests.support.bits import one_by_one, prompt, together

NUM_TOKENS = 80
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, temperature=0.9, seed=3)
LENGTHS = (300, 50, 120, 400, 1)
LONGEST = max(LENGTHS) + NUM_TOKENS
REQUESTS = [GenerateRequest(prompt=prompt(length), sampling_params=PARAMS) for length in LENGTHS]


def running(folder, **settings):
    return bits.running(**{"model": str(folder), "kv_cache_memory": 16 << 20, "max_num_batched_tokens": 64, **settings})


@pytest.mark.parametrize(
    ("layers", "architecture"),
    [
        ("s.s.ss", "Qwen2ForCausalLM"),
        ("ssss", "Qwen2ForCausalLM"),
        ("s.s.", "Gemma2ForCausalLM"),
        ("ss.", "Gemma3ForCausalLM"),
        ("...s", "SmolLM3ForCausalLM"),
        ("ss.s.s.", "Gemma4ForCausalLM"),  # the last four layers read the keys and values of earlier ones
    ],
)
async def test_same_bits_with_sliding_windows(hybrid_folder, layers, architecture):
    folder = hybrid_folder(layers, architecture)
    async with running(folder, enable_prefix_caching=False, threads=1) as engine:
        alone = await one_by_one(engine, REQUESTS)
    layout = kv_layout(read_spec(folder), "bf16", 32)
    preemptions = 0
    for spare_pages in (None, 0, 3):
        pages = layout.pages_for(LONGEST) + (spare_pages or 0)
        small = {} if spare_pages is None else {"kv_cache_memory": pages * layout.page_bytes, "max_model_len": LONGEST}
        async with running(folder, **small) as engine:
            assert await together(engine, REQUESTS) == alone
            before = engine.stats().prefix_hits_tokens
            assert await one_by_one(engine, REQUESTS) == alone
            assert small or engine.stats().prefix_hits_tokens > before
            preemptions += engine.stats().preemptions
    assert preemptions > 0


async def test_logits_of_a_sequence_longer_than_the_pool(hybrid_folder):
    """Layers with a window release pages between chunks; the chunking does not change the logits."""
    folder = hybrid_folder("ssss")
    tokens = REQUESTS[3].prompt
    async with running(folder) as engine:
        wanted = await engine.logits(tokens)
    layout = kv_layout(read_spec(folder), "bf16", 32)
    pages = layout.pages_for(len(tokens)) + 1
    assert pages * layout.page_size < len(tokens)
    memory = pages * layout.page_bytes
    async with running(folder, kv_cache_memory=memory, max_model_len=len(tokens), max_num_seqs=16) as engine:
        assert (await engine.logits(tokens)).tobytes() == wanted.tobytes()
