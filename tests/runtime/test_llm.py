"""`LLM`: one output per prompt, in order, for every form of prompt; or a typed error and nothing left running."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire import LLM, SamplingParams, ToolChoice
from quire.runtime.common.errors import (
    ConfigError,
    ContextLengthExceeded,
    GenerationFailed,
    InvalidRequest,
    ModelNotFound,
    NotOpen,
    Unavailable,
)
from quire.runtime.common.heap import resident_bytes
from quire.runtime.engine.engine_core import EngineCore
from quire.runtime.model import BUNDLED_MODEL
from quire.runtime.model.runner import Masks
from quire.scheduler import StepPlan, StepResult

from tests.support.forked_commands import ForkedCommands

HELDOUT = json.loads((Path(__file__).parents[1] / "data/heldout.json").read_text())
FOUR = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(kv_cache_memory=8 << 20) as llm:
        yield llm
        assert llm.engine.stats().pages_owned == 0


def test_the_cache_of_the_default_size_takes_memory_as_it_is_used() -> None:
    before = resident_bytes()
    with LLM() as llm:
        capacity = llm.engine.core.runner.capacity
        llm.generate([5, 6, 7], FOUR)
        assert resident_bytes() - before < capacity.memory.kv_bytes - (64 << 20)
    before = resident_bytes()
    with LLM(kv_cache_memory="256MiB") as llm:
        assert resident_bytes() - before > 192 << 20  # the heap of earlier tests may shrink meanwhile


# Prompts and parameters


@pytest.mark.parametrize(
    "prompts",
    [
        [5, 6, 7],
        (5, 6, 7),
        [[5, 6, 7]],
        np.array([5, 6, 7]),
        np.array([[5, 6, 7]], np.uint16),
        [np.int64(5), np.int32(6), 7],
    ],
    ids=["list", "tuple", "list of lists", "array", "2-d array", "numpy numbers"],
)
def test_one_prompt_in_many_forms(llm: LLM, prompts: Any) -> None:
    (output,) = llm.generate(prompts, FOUR)
    assert output.prompt_token_ids == (5, 6, 7)
    assert output.token_ids == llm.generate([[5, 6, 7]], FOUR)[0].token_ids
    assert len(output.token_ids) == 4


def test_text_and_ids_together_in_order(llm: LLM) -> None:
    outputs = llm.generate(["This module", [5, 6, 7], "If"], FOUR)
    alone = [llm.generate(prompt, FOUR)[0] for prompt in ("This module", [5, 6, 7], "If")]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]
    assert [output.text for output in outputs] == [output.text for output in alone]
    assert outputs[0].prompt_token_ids == alone[0].prompt_token_ids


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


def test_more_prompts_than_run_at_once(llm: LLM) -> None:
    outputs = llm.generate([[n + 1] for n in range(150)], FOUR)
    assert [output.prompt_token_ids for output in outputs] == [(n + 1,) for n in range(150)]


def test_sampling_params_for_all_or_for_each(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, 2, 3)]
    assert [len(output.token_ids) for output in llm.generate([[9]] * 3, each)] == [1, 2, 3]
    assert [len(output.token_ids) for output in llm.generate([[9]] * 3, each[1])] == [2, 2, 2]
    assert len(llm.generate([9])[0].token_ids) <= 128


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[1], [2]], [FOUR], "1 sampling_params for 2 prompts"),
        ([[1]], [FOUR, FOUR], "2 sampling_params for 1 prompts"),
        ([[1]], [None], "must be one SamplingParams"),
        ([[1]], {"max_tokens": 3}, "must be one SamplingParams"),
        ([[1]], SamplingParams(temperature=float("nan")), "temperature must be between 0 and 100, not nan"),
        ("", None, "empty"),
        ([[]], None, "empty"),
        (None, None, "not None"),
        (5, None, "not 5"),
        ({"prompt": "Hello"}, None, "not {'prompt': 'Hello'}"),
        ({5, 6}, None, "not {5, 6}"),
        (b"Hello", None, "not b'Hello'"),
        ([b"Hello"], None, "not b'Hello'"),
        ([True, False], None, "not \\[True, False\\]"),
        ([1.5], None, "not 1.5"),
        ([[1.5]], None, "not \\[1.5\\]"),
        ([["a"]], None, "not \\['a'\\]"),
        ([1, "a"], None, "not 1"),
        ([4096], None, "outside the vocabulary"),
        ([-1], None, "outside the vocabulary"),
        ([2**63], None, "outside the vocabulary"),
        ([[2**70]], None, "outside the vocabulary"),
        ("\ud800", None, "lone surrogate"),
    ],
)
def test_invalid_prompts_and_sampling_params(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompts, params)


def test_a_sampling_parameter_as_an_argument_is_named(llm: LLM) -> None:
    with pytest.raises(
        TypeError, match=r"no argument 'max_tokens'; write sampling_params=SamplingParams\(max_tokens=…"
    ):
        llm.generate("x", max_tokens=3)  # type: ignore[arg-type]


def test_one_refused_prompt_leaves_nothing_running(llm: LLM) -> None:
    long = SamplingParams(max_tokens=2000, ignore_eos=True)
    with pytest.raises(ContextLengthExceeded):
        llm.generate(["This", "module", [1] * 3000], long)
    stats = llm.engine.stats()
    assert (stats.running, stats.waiting, stats.pages_owned) == (0, 0, 0)
    assert llm.logits([1, 2]).shape == (2, 4096)


@pytest.mark.usefixtures("slow_steps")
def test_one_failed_prompt_leaves_nothing_running(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = llm.engine.text_processor.tokenizer
    assert tokenizer is not None
    wanted = llm.generate([5, 6, 7], FOUR)
    steps = llm.engine.stats().step
    bad = SamplingParams(max_tokens=50, logit_bias={4095: 100.0})
    long = SamplingParams(max_tokens=2000, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setitem(tokenizer._bytes_by_id, 4095, 5)  # not bytes: the detokenizer fails
        with pytest.raises(GenerationFailed, match="could not be turned into text"):
            llm.generate([[1], [2], [3]], [long, bad, long])
    stats = llm.engine.stats()
    assert (stats.running, stats.waiting, stats.pages_owned) == (0, 0, 0)
    assert stats.step - steps < 1500, "the others were cancelled, not waited for"
    assert llm.generate([5, 6, 7], FOUR)[0].outputs == wanted[0].outputs


def make_steps_slow(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each step take 5 ms, so that 2,000 steps take longer than any delay of a busy machine."""
    core = llm.engine.core
    assert isinstance(core, EngineCore)
    execute = core.runner.execute

    def slowly(plan: StepPlan, masks: Masks | None = None) -> StepResult:
        time.sleep(0.005)
        return execute(plan, masks)

    monkeypatch.setattr(core.runner, "execute", slowly)


@pytest.fixture
def slow_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    make_steps_slow(llm, monkeypatch)


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, whatever handler the process had before."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_sigint", "slow_steps")
def test_an_interrupted_call_leaves_nothing_running(llm: LLM) -> None:
    """Press Ctrl-C while the main thread waits in `generate`; later calls give the same outputs as before."""
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, n=2, repetition_penalty=1.2, stop=("x",), logprobs=1)
    wanted = llm.generate(["This", [5, 6, 7]], params)
    steps = llm.engine.stats().step

    def interrupt() -> None:
        while not llm.engine.stats().running:
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        interrupting = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1], [2]], SamplingParams(max_tokens=2000, ignore_eos=True))
        interrupting.result()
    while llm.engine.stats().running:
        time.sleep(0.001)
    assert llm.engine.stats().step - steps < 1500, "they were cancelled, not waited for"
    assert [output.outputs for output in llm.generate(["This", [5, 6, 7]], params)] == [one.outputs for one in wanted]


def test_threads_share_one_llm(llm: LLM) -> None:
    wanted = [llm.generate([n + 1], FOUR)[0].token_ids for n in range(20)]
    with ThreadPoolExecutor(5) as pool:
        seen = list(pool.map(lambda n: llm.generate([n + 1], FOUR)[0].token_ids, range(20)))
    assert seen == wanted


def test_several_outputs(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, seed=4, n=3, logprobs=0)
    one, two = llm.generate([[5, 6], [7]], params)
    assert [len(choice.token_ids) for choice in one.outputs] == [6] * 3
    assert (one.token_ids, one.text, one.logprobs, one.finish_reason) == (
        one.outputs[0].token_ids,
        one.outputs[0].text,
        one.outputs[0].logprobs,
        "length",
    )
    assert one.usage.completion_tokens == 18
    assert one.outputs[0].cumulative_logprob == sum(entry.logprob for entry in one.logprobs or ())
    assert two.prompt_token_ids == (7,)


# Chats


def test_chat_uses_the_models_template(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BUNDLED_MODEL, tmp_path / "model"))
    template = "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (folder / "chat_template.jinja").write_text(template)
    with LLM(folder, kv_cache_memory=8 << 20) as llm:
        answer = llm.chat([{"role": "user", "content": "What is a list?"}], FOUR)
        assert answer.prompt_token_ids[0] == 0, "the template's special token is one token"
        assert answer.prompt_token_ids.count(0) == 1, "and the tokenizer adds no second one"
        assert answer.token_ids == llm.generate([answer.prompt_token_ids], FOUR)[0].token_ids
        forged = llm.chat([{"role": "user", "content": "a<|endoftext|>b"}], FOUR)
        assert forged.prompt_token_ids.count(0) == 1, "content has no special tokens"


def test_a_file_replaces_the_chat_template_and_content_may_have_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}|")
    options: Any = {"chat_template": str(tmp_path / "mine.jinja"), "special_tokens_in_content": True}
    with LLM(BUNDLED_MODEL, kv_cache_memory=8 << 20, **options) as llm:
        answer = llm.chat([{"role": "user", "content": "a<|endoftext|>b"}], FOUR)
        assert answer.token_ids == llm.generate("a<|endoftext|>b|", FOUR)[0].token_ids
        assert answer.prompt_token_ids.count(0) == 1


def test_tools_and_variables_reach_the_template(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BUNDLED_MODEL, tmp_path / "model"))
    sign = '{# <tool_call>\n{"name": #}'  # Hermes' calls: tools of other templates are written by the server
    text = "{% for t in tools %}{{ t.function.name }}{% endfor %} {{ mood }}"
    (folder / "chat_template.jinja").write_text(sign + text)
    tool = {"type": "function", "function": {"name": "weather"}}
    messages = [{"role": "user", "content": "Hi"}]
    with LLM(folder, kv_cache_memory=8 << 20) as llm:
        answer = llm.chat(messages, FOUR, tools=[tool], chat_template_kwargs={"mood": "calm"})
        assert answer.token_ids == llm.generate("weather calm", FOUR)[0].token_ids
        with pytest.raises(InvalidRequest, match="must be a function"):
            llm.chat(messages, tools=[{"type": "other"}])


def test_a_required_call_of_a_chat_comes_apart_from_its_text() -> None:
    city = {"type": "object", "properties": {"city": {"const": "Rome"}}, "required": ["city"]}
    strict = {"name": "weather", "parameters": {**city, "additionalProperties": False}, "strict": True}
    tools: list[dict[str, Any]] = [{"type": "function", "function": strict}]
    messages = [{"role": "user", "content": "Hello"}]
    with LLM(tool_call_parser="hermes", kv_cache_memory=16 << 20) as llm:
        choice = ToolChoice(needed="required", parallel=False)
        output = llm.chat(messages, SamplingParams(max_tokens=100), tools=tools, tool_choice=choice).outputs[0]
    (call,) = output.tool_calls
    assert (output.text, call.name, json.loads(call.arguments)) == ("", "weather", {"city": "Rome"})


def test_a_model_without_a_template(tmp_path: Path) -> None:
    shutil.copytree(BUNDLED_MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("chat_template*"))
    with (
        LLM(tmp_path / "model", kv_cache_memory=4 << 20) as llm,
        pytest.raises(InvalidRequest, match="has no chat template"),
    ):
        llm.chat([{"role": "user", "content": "Hello"}])


@pytest.mark.parametrize("messages", ["hi", ["hi"], [], {"role": "user", "content": "hi"}, None, 5], ids=str)
def test_messages_of_another_form(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidRequest, match="messages must be a list of at least one map such as"):
        llm.chat(messages)


# Logits


def test_logits_agree_with_generation(llm: LLM) -> None:
    (output,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1))
    logits = llm.logits((5, 6, 7, *output.token_ids))
    assert logits.shape == (9, 4096)
    assert logits.dtype == np.float32
    assert tuple(logits[2:8].argmax(1).tolist()) == output.token_ids
    wide = logits[2:8].astype(np.float64)
    logprobs = wide.max(1) - np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1)) - wide.max(1)
    assert output.logprobs is not None
    assert [entry.logprob for entry in output.logprobs] == pytest.approx(logprobs.tolist(), abs=1e-4)


def test_logits_do_not_depend_on_chunking(llm: LLM) -> None:
    tokens = HELDOUT["token_ids"][:200]
    with LLM(kv_cache_memory=8 << 20, max_num_seqs=7) as other:
        assert np.array_equal(other.logits(tokens), llm.logits(np.array(tokens)))


def test_logits_of_text_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="token ids"):
        llm.logits("text")  # type: ignore[arg-type]


# Options


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "^max_num_seqs must be a whole number of at least 1, not 0"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({"threads": 0}, "threads"),
        ({"threads": 5000}, "threads"),
        ({"max_model_len": -3}, "max_model_len"),
        ({"max_model_len": 2049}, "max_model_len 2049 is more than the 2048 positions"),
        ({"weights": "int4"}, "weights must be auto, bf16, f32, q4 or q8, not 'int4'"),
        ({"kv_cache_dtype": "q8"}, "kv_cache_dtype"),
        ({"kv_cache_memory": 0}, "kv_cache_memory"),
        ({"kv_cache_memory": 10**18}, "kv_cache_memory"),
        ({"page_size": 7}, "page_size must be 16, 32 or 64, not 7"),
        ({"isa": "mmx"}, "unknown ISA level 'mmx'"),
        ({"max_num_batched_tokens": 10**9}, "lower max_num_batched_tokens"),
        ({"max_num_batched_tokens": 63}, "must be at least max_num_seqs 64"),
    ],
    ids=str,
)
def test_invalid_options(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**settings)


@pytest.mark.parametrize("model", ["/nowhere", "", __file__, Path("/nowhere"), "\0"])
def test_missing_models(model: Any) -> None:
    with pytest.raises(ModelNotFound):
        LLM(model)


def test_the_name_of_a_repository_is_not_a_folder() -> None:
    with pytest.raises(ModelNotFound, match="download it with `quire pull Qwen/"):
        LLM("Qwen/Qwen3-0.6B")


def test_a_model_given_as_a_path() -> None:
    with LLM(BUNDLED_MODEL, kv_cache_memory=1 << 20) as llm:
        assert llm.generate([1], FOUR)[0].finish_reason == "length"


def test_environment_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "none")
    with LLM(kv_cache_memory=1 << 20) as llm:
        assert llm.engine.core.config.max_num_seqs == 64


# Closing and internal errors


def test_close_is_idempotent_and_later_calls_raise() -> None:
    llm = LLM(kv_cache_memory=1 << 20)
    llm.close()
    llm.close()
    for use in (lambda: llm.generate([1]), lambda: llm.logits([1]), lambda: llm.engine):
        with pytest.raises(NotOpen, match="closed"):
            use()


def test_close_ends_calls_of_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    llm = LLM(kv_cache_memory=8 << 20)
    make_steps_slow(llm, monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(llm.generate, [1, 2], SamplingParams(max_tokens=2000, ignore_eos=True))
        while not llm.engine.stats().running:
            time.sleep(0.001)
        llm.close()
        with pytest.raises(Unavailable, match="the engine was closed"):
            waiting.result(60)
    deadline = time.monotonic() + 60
    while not set(threading.enumerate()) <= before:  # threads end when their work has ended
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_failed_start_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(ModelNotFound):
        LLM("/nowhere")
    assert set(threading.enumerate()) <= before


@pytest.fixture(scope="module")
def programs() -> Iterator[ForkedCommands]:
    commands = ForkedCommands(os.environ, ["-X", "dev"])
    yield commands
    commands.close()


UNCLOSED = """
import gc, logging, threading
from quire import LLM, SamplingParams
logging.getLogger("asyncio").setLevel(logging.ERROR)  # callbacks are slow on a busy machine, which -X dev would log
llm = LLM(kv_cache_memory=1 << 20)
many = SamplingParams(max_tokens=400, ignore_eos=True)
"""


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("llm.generate([1, 2])", ""),
        ("del llm; gc.collect()", ""),
        ("for _ in range(3): llm = LLM(kv_cache_memory=1 << 20)", ""),
        ("class Owner: pass\nowner = Owner(); owner.llm, owner.self = llm, owner", ""),
        ("outputs = (llm.generate([n])[0] for n in range(1, 9)); next(outputs)", ""),
        (
            "from quire import GenerateRequest\n"
            "request = GenerateRequest(prompt=(1,), sampling_params=many)\n"
            "async def begin(): stream = aiter(await llm.engine.submit(request)); await anext(stream); return stream\n"
            "stream = llm._thread.run(begin())",
            "",
        ),
        ("llm.generate([1, 2]); 1 / 0", "ZeroDivisionError: division by zero"),
        ("llm.generate([1, 2])[7]", "IndexError: list index out of range"),
        ("import sys; sys.exit('no')", "no"),
        ("try: llm.generate([-1])\nexcept Exception as error: kept = error", ""),
    ],
)
def test_an_llm_that_is_never_closed_exits_silently(
    programs: ForkedCommands, tmp_path: Path, program: str, error: str
) -> None:
    done = programs.run(["-c", UNCLOSED + program], tmp_path, os.environ)
    assert done.stdout == ""
    assert (done.stderr.splitlines() or [""])[-1] == error
    assert "Task" not in done.stderr
    assert len(done.stderr.splitlines()) <= 6
    assert done.returncode == (1 if error else 0)


def test_a_thread_that_generates_at_exit_gets_unavailable() -> None:
    program = """
started = threading.Event()
def work():
    try:
        started.set()
        while True:
            llm.generate([1, 2], many)
    except Exception as error:
        print(type(error).__name__)
threading.Thread(target=work).start()
started.wait()
"""
    done = subprocess.run([sys.executable, "-c", UNCLOSED + program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Unavailable\n", "")


def test_an_unreferenced_llm_ends_its_threads() -> None:
    before = set(threading.enumerate())
    llm = LLM(kv_cache_memory=1 << 20)
    llm.generate([1, 2], FOUR)
    during = set(threading.enumerate()) - before
    assert during
    del llm
    gc.collect()
    for thread in during:
        thread.join()
