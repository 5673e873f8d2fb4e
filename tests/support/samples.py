"""Example statistics and info of a small engine; a test replaces the fields it is about."""

from __future__ import annotations

import msgspec
from quire.runtime.engine.facade import EngineInfo, EngineStats, HostStatus

STATS = EngineStats(
    step=7,
    running=2,
    waiting=1,
    pages_total=10,
    pages_owned=4,
    pages_cached=1,
    pages_free=5,
    prefix_queries_tokens=100,
    prefix_hits_tokens=30,
    preemptions=2,
)
INFO = EngineInfo(
    vocab_size=100,
    max_model_len=2048,
    max_num_seqs=8,
    num_pages=10,
    page_size=32,
    isa="avx2",
    threads=2,
    threads_reason="--threads",
    has_tokenizer=True,
    has_chat_template=False,
)
BYTES_INFO = msgspec.structs.replace(  # a model whose token ids are bytes
    INFO, vocab_size=256, max_model_len=100, page_size=10
)
HOSTS = [
    HostStatus(
        address="a:7072",
        state="up",
        problem=None,
        bits="f00d",
        isa="avx2",
        requests=3,
        moved_requests=2,
        predicted_wait_s=0.5,
        engine=STATS,
    ),
    HostStatus(
        address="b:7072",
        state="down",
        problem="engine host b:7072 cannot be reached: no answer",
        bits="",
        isa="",
        requests=1,
        moved_requests=4,
        predicted_wait_s=0.0,
        engine=None,
    ),
]
