"""`quire plan`: models with sliding-window layers, the memory for clients, and the memory that processes take."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.runtime.cli.main import run
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.memory import MemoryLimit
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.common.settings import Settings
from quire.runtime.model import BUNDLED_MODEL, read_spec
from quire.runtime.model.weights.tensors import expected_tensors
from quire.runtime.tools.bench.checkpoint import write_safetensors
from quire.runtime.tools.planning import PlanTarget, comparison, plan_serving, plan_text
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.bench.plan_memory import KV_CACHE_MEMORY, measured_bytes, planned_bytes, resident_bytes

MEMORY = 1 << 20
PAGE = 2 * 32 * 16 * 2 * 2  # keys and values of 32 tokens, two heads of 16 in bf16, one layer


def plan_lines(settings: Settings) -> list[str]:
    return plan_text(plan_serving(settings, PlanTarget()), False).splitlines()


@pytest.mark.parametrize(
    ("layers", "groups", "pool"),
    [
        (
            "s.s.ss",
            [
                "3 layer groups, 2 layers per page; 2 full: 256 B per token; "
                "4 of window 100: 512 B per token, up to 163 tokens"
            ],
            "128 pages in the pool, a sequence takes up to 128 of them; at most 64 sequences, 3,712 tokens each",
        ),
        (
            "s",
            ["1 layer group, 1 layer per page; 1 of window 100: 128 B per token, up to 163 tokens"],
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


def test_a_mixture_of_experts_is_described() -> None:
    config = EngineConfig(model=str(Path(__file__).parents[2] / "goldens" / "qwen3_moe"), kv_cache_memory=MEMORY)
    lines = plan_lines(Settings(engine=config, server=ServerConfig()))
    assert lines[1] == "2 layers of 6 experts with an MLP of 40, 3 per token"


@pytest.mark.parametrize(
    ("settings", "kept", "rest"),
    [
        ({"state_cache_memory": 12 * 5760}, 12, "keeps 12, in a long prompt one every 512 tokens"),
        ({"state_cache_memory": 1}, 0, "is off: no state fits; raise kv_cache_memory or state_cache_memory, or lower "),
        ({"state_cache_memory": 0}, 0, "is off"),
        ({"enable_prefix_caching": False}, 0, "is off"),
    ],
    ids=str,
)
def test_the_plan_shows_the_states_that_the_prefix_cache_keeps(settings: dict[str, Any], kept: int, rest: str) -> None:
    """A state has 3 layers of 5 rows with 96 columns, in f32."""
    folder = str(Path(__file__).parents[2] / "goldens" / "lfm2")
    config = EngineConfig(model=folder, kv_cache_memory=MEMORY, **settings)
    plan = plan_serving(Settings(engine=config, server=ServerConfig()), PlanTarget())
    (line,) = (line for line in plan_text(plan, False).splitlines() if line.startswith("states of"))
    assert line.removesuffix("max_num_seqs") == f"states of 5,760 B each; the prefix cache {rest}"
    figures = plan.as_dict()
    assert (figures["state_bytes"], figures["states_kept"]) == (5760, kept)


@pytest.mark.parametrize(
    ("max_model_len", "factors", "line"),
    [
        (64, "short", "LongRoPE: short factors; a --max-model-len above 64 takes the long ones for all requests"),
        (65, "long", "LongRoPE: long factors, for short requests too; --max-model-len 64 takes the short ones"),
        (None, "long", "LongRoPE: long factors, for short requests too; --max-model-len 64 takes the short ones"),
    ],
)
def test_the_plan_says_which_factors_of_longrope_apply(max_model_len: int | None, factors: str, line: str) -> None:
    folder = str(Path(__file__).parents[2] / "goldens" / "phi3")
    config = EngineConfig(model=folder, kv_cache_memory=MEMORY, max_model_len=max_model_len)
    plan = plan_serving(Settings(engine=config, server=ServerConfig()), PlanTarget())
    assert line in plan_text(plan, False).splitlines()
    assert plan.as_dict()["rope_factors"] == factors


def test_the_plan_shows_what_the_server_holds_for_clients_at_most(hybrid_folder: Callable[[str], Path]) -> None:
    engine = EngineConfig(model=str(hybrid_folder("s")), kv_cache_memory=MEMORY)
    limits = {"max_kept_bytes": 1000, "max_unsent_bytes": 2000, "max_pending_bytes": 3000, "max_text_bytes": 4000}
    server = ServerConfig(max_connections=10, **limits)  # type: ignore[arg-type]
    lines = plan_lines(Settings(engine=engine, server=server))
    first = lines.index("for clients, in the API server process:") + 1
    assert lines[first : lines.index("", first)] == [
        "kept output                    1,000 B  to resume requests and answer idempotency keys",
        "unsent output                  2,000 B  frames, events, tokens that wait for credit, and incomplete answers",
        "pending input                  3,000 B  incomplete frames and bodies",
        "texts                          4,000 B  prompts and texts to tokenize",
        "connections                  327,680 B  20 of 16,384 B",
        "at most                      337,680 B",
    ]


@pytest.mark.parametrize(("model", "size"), [(None, "536,870,912"), ("qwen3", "0")], ids=["tokenizer", "none"])
def test_the_plan_shows_what_compiled_grammars_take_at_most(model: str | None, size: str) -> None:
    folder = None if model is None else str(Path(__file__).parents[2] / "goldens" / model)
    lines = plan_lines(Settings(engine=EngineConfig(model=folder, kv_cache_memory=MEMORY), server=ServerConfig()))
    first = lines.index("for structured output, in the engine process, and in processes that try grammars:") + 1
    assert lines[first + 1] == f"compiled grammars {size:>18} B  at most"
    assert lines[first + 2] == f"trials of grammars{'318,767,104' if model is None else '0':>18} B  at most"


def test_the_plan_shows_the_memory_of_a_draft_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--kv-cache-memory", "64MiB", "--draft-model", "demo", "--num-speculative-tokens", "4"]) == 2
    assert capsys.readouterr().err.startswith("quire: demo does not exist")
    drafts = ["--draft-model", str(BUNDLED_MODEL), "--num-speculative-tokens", "4"]
    assert run(["plan", "--kv-cache-memory", "64MiB", *drafts]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^KV pages +33,554,432 B", text, re.MULTILINE)
    assert re.search(r"^draft model .* weights 7,995,392 B, KV pages 33,554,432 B$", text, re.MULTILINE)


def test_the_plan_is_compared_with_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert comparison(5000, 12_000) == "It fits: 5,000 B in all, this machine has 12,000 B available."
    assert comparison(12_500, 12_000) == (
        "It does not fit: 12,500 B in all, this machine has 12,000 B available, 500 B less."
    )
    assert comparison(12_500, 12_000, MemoryLimit(15_000, 3000, "/sys/fs/cgroup/memory.max")) == (
        "It does not fit: 12,500 B in all, this machine has 12,000 B available, 500 B less; "
        "the limit is 15,000 bytes in /sys/fs/cgroup/memory.max."
    )
    assert run(["plan", "--kv-cache-memory", "1TiB"]) == 0
    assert capsys.readouterr().err.startswith("It does not fit: 1,101,")


@pytest.mark.parametrize(
    "others", [["folder"], ["--plot", "a.svg"], ["--json"], ["--memory", "3GiB"], ["--max-num-seqs", "3"]]
)
def test_sizes_ignores_no_flag(others: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--sizes", *others]) == 2
    assert capsys.readouterr().err.startswith("quire: --sizes cannot be given with a model or another flag")


# The memory of processes


@pytest.fixture
def wide_folder(tmp_path: Path) -> str:
    """Return a model whose matrices take far more memory while they are packed than the bundled model's."""
    hidden = 1024
    inner = vocab = 4096
    shapes = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,)}
    for layer in ("model.layers.0", "model.layers.1"):
        shapes |= {f"{layer}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}.self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj"] = (hidden, inner)
    save_file(
        {f"{name}.weight": np.ones(shape, np.float16) for name, shape in shapes.items()}, tmp_path / "model.safetensors"
    )
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocab, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 16, "max_position_embeddings": 512, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes, **heads}))
    return str(tmp_path)


@pytest.mark.parametrize("is_wide", [False, True])
def test_a_model_in_this_process_takes_the_planned_memory(wide_folder: str, is_wide: bool) -> None:
    """Engine and tokenizer, within 5 %."""
    model = wide_folder if is_wide else ""
    assert measured_bytes(model, "q8", "bf16", 8) == pytest.approx(planned_bytes(model, "q8", "bf16", 8), rel=0.05)


def test_a_server_and_its_engine_process_take_the_planned_memory() -> None:
    """File pages that both processes map count once."""
    config = EngineConfig(weights="q8", kv_cache_memory=KV_CACHE_MEMORY, threads=2)
    plan = plan_serving(Settings(engine=config, server=ServerConfig()), PlanTarget())
    planned = plan.capacity.memory.total_bytes + sum(plan.server_bytes.values())
    flags = (
        "--weights",
        "q8",
        "--kv-cache-memory",
        str(KV_CACHE_MEMORY),
        "--threads",
        "2",
        "--port",
        "0",
        "--operator-port",
        "0",
    )
    command = [sys.executable, "-P", "-m", "quire.runtime.cli.main", "serve", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("quire ready")
        engines = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        anonymous, files = zip(*map(resident_bytes, [server.pid, *engines]), strict=True)
        server.terminate()
    assert len(anonymous) == 2
    assert sum(anonymous) + max(files) == pytest.approx(planned, rel=0.05)


STRUCTURED = """
import json
import sys
from quire import LLM, SamplingParams, StructuredOutputs
with LLM(**json.loads(sys.argv[1])) as llm:
    sampling = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputs(regex="[ab]{4}"))
    print(llm.generate(["a b"], sampling)[0].text, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def many_tokens_folder(tmp_path: Path, hybrid_folder: Callable[[str], Path]) -> str:
    """Return a model with a vocabulary of 60,000 tokens: bytes, pairs of bytes and triples of bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(left, right) for left in letters[:140] for right in letters[:140]]
    merges = [*pairs, *(("".join(pair), letter) for pair in pairs for letter in letters[:3])][: 59_999 - len(letters)]
    texts = [*letters, *map("".join, merges), "<end>"]
    fast = Tokenizer(models.BPE({text: token_id for token_id, text in enumerate(texts)}, merges))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast.save(str(tmp_path / "tokenizer.json"))
    config = json.loads((hybrid_folder("..") / "config.json").read_text())
    config |= {"vocab_size": len(texts), "eos_token_id": len(texts) - 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with (tmp_path / "model.safetensors").open("wb") as file:
        write_safetensors(file, list(expected_tensors(read_spec(tmp_path))))
    return str(tmp_path)


def test_a_large_vocabulary_takes_the_planned_memory_when_a_grammar_has_used_it(many_tokens_folder: str) -> None:
    """Within 10 %: most of so small a process are libraries and the vocabulary, which are estimates."""
    options: dict[str, Any] = {"model": many_tokens_folder, "kv_cache_memory": MEMORY, "max_num_seqs": 8, "threads": 2}
    plan = plan_serving(Settings(engine=EngineConfig(**options), server=ServerConfig()), PlanTarget())
    planned = plan.capacity.memory.total_bytes + plan.server_bytes["tokenizer"] + plan.structured_bytes["vocabulary"]
    command = [sys.executable, "-c", STRUCTURED, json.dumps(options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert re.match("[ab]{4}", process.stdout.readline())
        assert sum(resident_bytes(process.pid)) == pytest.approx(planned, rel=0.1)
