"""A serving plan: sequences that fit a given memory, the effect of other data types, predictions and the picture."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from quire.runtime.cli.main import run
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.common.settings import Settings
from quire.runtime.model import BUNDLED_MODEL, read_spec
from quire.runtime.model.runner import decide_capacity
from quire.runtime.tools.bench import MachineProfile, write_profile
from quire.runtime.tools.bench.profile import FORMAT, PROFILE_VERSION, MeasuredRoofline
from quire.runtime.tools.planning import PlanTarget, ServingPlan, plan_serving
from quire.runtime.tools.planning.alternatives import sequence_lengths
from quire.runtime.tools.planning.serving_plan import TOKENIZER_TOKEN_BYTES

SHAPE = Path(__file__).parents[3] / "data" / "qwen3-0.6b"
GOLDENS = Path(__file__).parents[3] / "goldens"
GIB = 1 << 30


def profile_of(path: Path, threads: int) -> Path:
    """Write the profile of the machine of tests/bench/LOG.md, with any number of threads."""
    peaks: Any = {"q8": 920e9, "bf16": 460e9, "f32": 230e9}
    roofline = MeasuredRoofline(isa="avx512-vnni-bf16", threads=threads, read_bytes_per_s=34.5e9, peak_ops_per_s=peaks)
    machine = MachineProfile(
        format=FORMAT,
        version=PROFILE_VERSION,
        machine="a test",
        isa=roofline.isa,
        threads=threads,
        rooflines=(roofline,),
    )
    write_profile(machine, path)
    return path


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return profile_of(tmp_path / "machine.json", threads=2)


THIS_MACHINE = PlanTarget()


def planned(target: PlanTarget = THIS_MACHINE, model: Path = SHAPE, **options: Any) -> ServingPlan:
    engine = EngineConfig(model=str(model), **{"threads": 2, **options})
    return plan_serving(Settings(engine=engine, server=ServerConfig()), target)


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["plan", str(SHAPE), *arguments, "--json"]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


@pytest.mark.parametrize("model", [SHAPE, GOLDENS / "gemma3", GOLDENS / "qwen3_moe"])
def test_each_alternative_fits_the_memory_that_is_planned(model: Path) -> None:
    plan = planned(model=model, kv_cache_memory=8 << 20)
    total = plan.capacity.memory.total_bytes
    spec = read_spec(model)
    for each in plan.alternatives:
        chosen = decide_capacity(msgspec.structs.replace(each.config, kv_cache_memory=each.kv_bytes), spec)
        assert chosen.num_pages == each.num_pages
        assert total - chosen.layout.page_bytes < chosen.memory.total_bytes <= total


def test_each_sequence_of_a_model_with_states_takes_one() -> None:
    """Pages and states divide one memory, whose size does not depend on the types. All have the planned states."""
    plan = planned(model=GOLDENS / "qwen3_5", kv_cache_memory=4 << 20, max_num_seqs=8, weights="bf16")
    assert plan.capacity.memory.state_bytes == 21 * 68_864
    for each, page_bytes in zip(plan.alternatives, (12_288, 6_720) * 3, strict=True):
        assert each.capacity.layout.page_bytes == page_bytes
        in_all = each.num_pages * page_bytes + 21 * 68_864
        assert each.sequences(65) == in_all // (3 * page_bytes + 68_864)
    assert plan.alternatives[0].num_pages == plan.capacity.num_pages
    assert plan.alternatives[1].num_pages > plan.capacity.num_pages


def test_smaller_types_hold_more_sequences() -> None:
    bf16, int8, *_, q4_int8 = planned(weights="bf16", kv_cache_memory=2 * GIB).alternatives
    assert bf16.sequences(1024) == 2 * GIB // (1024 * 114_688)
    assert bf16.sequences(33) == bf16.sequences(64) == bf16.num_pages // 2, "pages of 32 tokens"
    assert int8.sequences(1024) > 1.8 * bf16.sequences(1024)
    assert q4_int8.kv_bytes - int8.kv_bytes == pytest.approx(int8.weights_bytes - q4_int8.weights_bytes, abs=1 << 24)


@pytest.mark.parametrize(
    ("weights", "kv", "kinds"),
    [
        ("auto", "bf16", ["bf16 bf16", "bf16 int8", "q8 bf16", "q8 int8", "q4 bf16", "q4 int8"]),
        ("q4", "bf16", ["q4 bf16", "q4 int8", "q8 bf16", "q8 int8"]),
        ("q8", "int8", ["q8 int8", "q4 int8"]),
    ],
)
def test_what_is_planned_comes_first(weights: str, kv: str, kinds: list[str]) -> None:
    plan = planned(weights=weights, kv_cache_dtype=kv, kv_cache_memory=GIB)
    assert [f"{each.weights} {each.capacity.layout.dtype}" for each in plan.alternatives] == kinds


def test_the_pool_takes_what_the_rest_leaves_of_a_given_memory() -> None:
    plan = planned(PlanTarget(memory="4GiB"), weights="q8")
    assert 0.99 * 4 * GIB < plan.total_bytes <= 4 * GIB
    assert plan.capacity.max_model_len == plan.capacity.num_pages * 32
    hybrid = planned(PlanTarget(memory="1GiB"), GOLDENS / "gemma3")
    assert GIB - (1 << 20) < hybrid.total_bytes <= GIB
    with_states = planned(PlanTarget(memory="1GiB"), GOLDENS / "qwen3_5")
    assert with_states.capacity.memory.state_bytes > 1 << 20
    assert GIB - (1 << 20) < with_states.total_bytes <= GIB
    with_tokenizer = planned(PlanTarget(memory="2GiB"), BUNDLED_MODEL)
    assert with_tokenizer.structured_bytes["compiled grammars"] > 0
    assert 2 * GIB - (1 << 20) < with_tokenizer.total_bytes <= 2 * GIB


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (PlanTarget(memory="lots"), {}, "memory must be a size in bytes, such as 17179869184 or 16GiB, not 'lots'"),
        (PlanTarget(memory="1GiB"), {}, r"memory must be at least 1,\d+,\d+,\d+ bytes with these options, not 1,073,"),
        (PlanTarget(memory="3GiB"), {"max_model_len": 40960}, r"memory must be at least 6,\d+,\d+,\d+ bytes"),
        (PlanTarget(memory="8GiB"), {"kv_cache_memory": GIB}, "memory cannot be given with --kv-cache-memory"),
        (PlanTarget(memory="8GiB"), {"kv_cache_share": 0.5}, "memory cannot be given with --kv-cache-share"),
        (PlanTarget(shapes="1x128"), {}, "shapes needs --profile"),
    ],
)
def test_what_cannot_be_planned_is_refused(target: PlanTarget, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        planned(target, **options)


@pytest.mark.parametrize(
    ("options", "kept"), [({}, 0), ({"state_cache_memory": 9 * 68_864}, 9), ({"max_model_len": 1000}, 1)], ids=str
)
def test_the_least_memory_of_a_model_with_states_has_a_state_for_each_sequence(
    options: dict[str, Any], kept: int
) -> None:
    """The prefix cache keeps states only where the memory of pages allows, unless `state_cache_memory` is given."""

    def plan_in(num_bytes: int) -> ServingPlan:
        return planned(PlanTarget(memory=str(num_bytes)), GOLDENS / "qwen3_5", max_num_seqs=8, **options)

    with pytest.raises(ConfigError, match=r"memory must be at least [\d,]+ bytes") as error:
        plan_in(1)
    least = int(str(error.value).split()[5].replace(",", ""))
    plan = plan_in(least)
    assert least - (1 << 17) < plan.total_bytes <= least
    assert plan.capacity.num_cached_states == kept
    with pytest.raises(ConfigError, match="memory must be at least"):
        plan_in(least - 1)


@pytest.mark.parametrize(
    ("longest", "lengths"),
    [(128, [128]), (1024, [256, 1024]), (2048, [256, 1024, 2048]), (40_960, [256, 1024, 4096, 16_384, 40_960])],
)
def test_lengths_grow_up_to_the_longest(longest: int, lengths: list[int]) -> None:
    assert sequence_lengths(longest) == lengths
    assert sequence_lengths(131_072) == [1024, 4096, 16_384, 65_536, 131_072]


def test_speeds_are_those_measured_on_the_machine_of_the_profile(profile: Path) -> None:
    """The measured figures come from tests/runtime/tools/simulation/test_cost.py and docs/planning.md."""
    target = PlanTarget(profile=profile, shapes="1x128,8x128,32x128,1x40000")
    plan = planned(target, weights="q8", kv_cache_dtype="int8", kv_cache_memory=GIB)
    one, eight, many, too_long = plan.speeds[0]
    assert too_long is None
    assert one is not None
    assert eight is not None
    assert many is not None
    assert [speed.tokens_per_s for speed in (one, eight, many)] == pytest.approx([47.1, 325, 398], rel=0.1)
    assert [speed.first_token_s for speed in (one, eight, many)] == pytest.approx(
        [128 / 623, 1024 / 651, 4096 / 657], rel=0.1
    )
    by_weights = {each.weights: speeds[0] for each, speeds in zip(plan.alternatives, plan.speeds, strict=True)}
    assert by_weights["q4"] is not None
    assert by_weights["q4"].tokens_per_s > 1.3 * one.tokens_per_s


def test_users_that_do_not_run_at_once_have_no_prediction(profile: Path) -> None:
    target = PlanTarget(profile=profile, shapes="8x128,9x128")
    plan = planned(target, weights="q8", kv_cache_dtype="int8", kv_cache_memory=GIB, max_num_seqs=8)
    assert [speed is None for speed in plan.speeds[0]] == [False, True]


def test_a_prompt_that_leaves_no_room_for_a_token_has_no_prediction(profile: Path) -> None:
    plan = planned(PlanTarget(profile=profile, shapes="1x63,1x64"), kv_cache_memory=GIB, max_model_len=64)
    assert [speed is None for speed in plan.speeds[0]] == [False, True]


def test_a_plan_has_the_threads_of_its_profile(tmp_path: Path) -> None:
    plan = planned(PlanTarget(profile=profile_of(tmp_path / "one.json", threads=1)), kv_cache_memory=GIB, threads=None)
    assert plan.as_dict()["threads"] == 1


def test_json_has_every_figure(capsys: pytest.CaptureFixture[str], profile: Path) -> None:
    plan = plan_json(capsys, "--kv-cache-memory", "1GiB", "--profile", str(profile), "--max-num-seqs", "8")
    groups = ("engine_process", "api_server_process", "clients", "structured_output")
    assert sum(size for group in groups for size in plan[group].values()) == plan["total_bytes"]
    assert plan["kv_layers"] == [{"window": 0, "layers": 28, "token_bytes": 114_688}]
    assert (plan["threads"], plan["read_bytes_per_s"]) == (2, 34.5e9)
    first = plan["alternatives"][0]
    assert list(first["sequences"]) == ["256", "1024", "4096", "16384", "40960"]
    assert set(first["predicted"]["1x128"]) == {"first_token_s", "tokens_per_s"}
    assert first["predicted"]["32x128"] is None
    assert plan_json(capsys)["alternatives"][0]["predicted"] == {}


def test_the_tables_fit_100_columns_and_one_screen(capsys: pytest.CaptureFixture[str], profile: Path) -> None:
    assert run(["plan", str(SHAPE), "--kv-cache-memory", "1GiB", "--profile", str(profile)]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("in the same memory"))
    assert max(map(len, lines[first:])) <= 100
    assert len(lines) <= 48


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    assert run(["plan", str(SHAPE), "--plot", str(tmp_path / "map.svg")]) == 0
    assert "<svg" in (tmp_path / "map.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plot", "map.txt"], "--plot map.txt: the name must end in one of"),
        (["--plot", "/nowhere/map.svg"], "--plot /nowhere/map.svg cannot be written"),
        (["--arena", "--json"], "--arena cannot be given with --json"),
        (["--memory", "1TiBs"], "--memory must be a size"),
        (["--shapes", "8x128"], "--shapes needs --profile"),
        (["--profile", "/nowhere.json"], "--profile /nowhere.json cannot be read: No such file"),
    ],
)
def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert run(["plan", *arguments]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith(f"quire: {message}")


def test_a_tokenizer_is_planned_with_the_tokens_that_it_has(tmp_path: Path) -> None:
    assert planned(model=BUNDLED_MODEL).server_bytes["tokenizer"] == 4096 * TOKENIZER_TOKEN_BYTES
    config = json.loads((BUNDLED_MODEL / "config.json").read_text()) | {"vocab_size": 5000}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert planned(model=tmp_path).server_bytes["tokenizer"] == 0
    shutil.copy(BUNDLED_MODEL / "tokenizer.json", tmp_path)
    assert planned(model=tmp_path).server_bytes["tokenizer"] == 4096 * TOKENIZER_TOKEN_BYTES
    (tmp_path / "tokenizer.json").write_text("{}")
    assert planned(model=tmp_path).server_bytes["tokenizer"] == 5000 * TOKENIZER_TOKEN_BYTES


def test_parts_of_the_picture_add_up() -> None:
    plan = planned(kv_cache_memory=GIB)
    assert sum(plan.parts.values()) == plan.total_bytes
    assert replace(plan, shapes=[]).title == "qwen3-0.6b, weights bf16, KV bf16"
