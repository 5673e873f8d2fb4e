"""`quire plan`: models with sliding-window layers, and the memory for clients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from quire.runtime.cli.plan import plan_text
from quire.runtime.common.config import EngineConfig, ServerConfig
from quire.runtime.common.settings import Settings

MEMORY = 1 << 20
PAGE = 2 * 32 * 16 * 2 * 2  # keys and values of 32 tokens, two heads of 16 in bf16, one layer


@pytest.mark.parametrize(
    ("layers", "groups", "pool"),
    [
        (
            "s.s.ss",
            ["3 layer groups: 2 full, 2 of window 100, 2 of window 100; 2 layers per page"],
            "128 pages in the pool, a sequence takes up to 128 of them; at most 64 sequences, 3,712 tokens each",
        ),
        (
            "s",
            ["1 layer group: 1 of window 100; 1 layer per page"],
            "256 pages in the pool, a sequence takes up to 6 of them; at most 64 sequences, 4,096 tokens each",
        ),
        ("....", [], "2,048 tokens in the pool; at most 64 sequences, 2,048 tokens each"),
    ],
)
def test_layer_groups_are_shown_if_a_layer_has_a_window(
    hybrid_folder: Callable[[str], Path], layers: str, groups: list[str], pool: str
) -> None:
    per_page = {"s.s.ss": 2, "s": 1, "....": 4}[layers]
    config = EngineConfig(model=str(hybrid_folder(layers)), kv_cache_memory=MEMORY)
    lines = plan_text(Settings(engine=config, server=ServerConfig()), False).splitlines()
    assert lines[1].endswith(f"{per_page * PAGE:,} B per page of 32 tokens")
    assert lines[2 : lines.index("")] == [*groups, f"{pool}; 512 tokens per step"]
    assert f"KV pages{MEMORY:>28,} B  {MEMORY // PAGE // per_page:,} pages" in lines


def test_the_plan_shows_what_the_server_holds_for_clients_at_most(hybrid_folder: Callable[[str], Path]) -> None:
    engine = EngineConfig(model=str(hybrid_folder("s")), kv_cache_memory=MEMORY)
    server = ServerConfig(max_kept_bytes=1000, max_unsent_bytes=2000, max_connections=10)
    lines = plan_text(Settings(engine=engine, server=server), False).splitlines()
    assert lines[lines.index("for clients, in the API server process:") + 1 :] == [
        "kept output                    1,000 B  to resume requests and answer idempotency keys",
        "unsent output                  2,000 B  frames, and tokens that wait for credit",
        "connections                  163,840 B  10 of 16,384 B",
        "at most                      166,840 B",
    ]
