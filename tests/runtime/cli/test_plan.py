"""`quire plan`: models with sliding-window layers, and the memory for clients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from quire.runtime.cli.main import run
from quire.runtime.cli.plan import comparison, plan_text
from quire.runtime.common.config import EngineConfig, ServerConfig
from quire.runtime.common.settings import Settings
from quire.runtime.model import model_path, read_spec
from quire.runtime.model.runner import decide_capacity

MEMORY = 1 << 20
PAGE = 2 * 32 * 16 * 2 * 2  # keys and values of 32 tokens, two heads of 16 in bf16, one layer


def plan_lines(settings: Settings) -> list[str]:
    spec = read_spec(model_path(settings.engine.model))
    return plan_text(settings, spec, decide_capacity(settings.engine, spec), False).splitlines()


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
    lines = plan_lines(Settings(engine=config, server=ServerConfig()))
    assert lines[1].endswith(f"{per_page * PAGE:,} B per page of 32 tokens")
    assert lines[2 : lines.index("")] == [*groups, f"{pool}; 512 tokens per step"]
    assert f"KV pages{MEMORY:>28,} B  {MEMORY // PAGE // per_page:,} pages" in lines


def test_the_plan_shows_what_the_server_holds_for_clients_at_most(hybrid_folder: Callable[[str], Path]) -> None:
    engine = EngineConfig(model=str(hybrid_folder("s")), kv_cache_memory=MEMORY)
    limits = {"max_kept_bytes": 1000, "max_unsent_bytes": 2000, "max_pending_bytes": 3000, "max_text_bytes": 4000}
    server = ServerConfig(max_connections=10, **limits)  # type: ignore[arg-type]
    lines = plan_lines(Settings(engine=engine, server=server))
    assert lines[lines.index("for clients, in the API server process:") + 1 :] == [
        "kept output                    1,000 B  to resume requests and answer idempotency keys",
        "unsent output                  2,000 B  frames, and tokens that wait for credit",
        "pending input                  3,000 B  incomplete frames",
        "texts                          4,000 B  prompts and texts to tokenize",
        "connections                  163,840 B  10 of 16,384 B",
        "at most                      173,840 B",
    ]


def test_the_plan_is_compared_with_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert comparison(5000, 12_000) == "It fits: 5,000 B in all, this machine has 12,000 B available."
    assert comparison(12_500, 12_000) == (
        "It does not fit: 12,500 B in all, this machine has 12,000 B available, 500 B less."
    )
    assert run(["plan", "--kv-cache-memory", "1TiB"]) == 0
    assert capsys.readouterr().err.startswith("It does not fit: 1,0")
