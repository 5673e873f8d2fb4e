"""Grammars that take too long, too much memory, or crash the library are refused by a process of their own."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper
from quire.runtime.common.errors import InvalidRequest, Unavailable
from quire.runtime.common.heap import resident_bytes
from quire.runtime.common.types import StructuredOutputs
from quire.runtime.engine.preparing import PromptPreparer
from quire.runtime.engine.structured import trial_process
from quire.runtime.engine.structured import trials as trials_module
from quire.runtime.engine.structured.grammars import CheckedStructures, check_structure, grammar_of
from quire.runtime.engine.structured.trials import TOO_MUCH, Trials

PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23)
SMALL = StructuredOutputs(regex="[ab]{2}")
CPU = resource.RLIMIT_CPU


@pytest.fixture
def trials() -> Iterator[Trials]:
    found = Trials()
    yield found
    found.close()


def refusal(trials: Trials, **structure: Any) -> str:
    with pytest.raises(InvalidRequest, match=r"^structured_outputs: ") as caught:
        check_structure(StructuredOutputs(**structure), trials)
    return str(caught.value).removeprefix("structured_outputs: ")


@pytest.mark.parametrize(
    "structure",
    [
        {"lark": 'start: p::0\np::_: p::incr(_) "b" | "a"'},
        {"lark": f"start: T\nT: {' & '.join(f'/(.{{{prime}}})*/' for prime in PRIMES)}"},
        {"regex": "a?" * 20_000},
        {"regex": ".*" * 8_000},
        {"json": {"allOf": [{"type": "string", "pattern": f"w{index}"} for index in range(24)]}},
    ],
    ids=["endless", "intersections", "nullable", "any", "patterns"],
)
def test_a_grammar_that_takes_too_long_or_too_much_memory_is_refused(trials: Trials, structure: dict[str, Any]) -> None:
    before = resident_bytes()
    assert refusal(trials, **structure) == TOO_MUCH
    assert resident_bytes() - before < 32 << 20
    check_structure(SMALL, trials)


def test_a_panic_of_the_library_is_a_refusal(trials: Trials) -> None:
    grammar = 'start: %regex {"substring_chunks":[""]}'
    assert "Option::unwrap()" in refusal(trials, lark=grammar)
    with pytest.raises(InvalidRequest, match="on a `None` value"):
        check_structure(StructuredOutputs(lark=grammar))
    check_structure(SMALL, trials)


def test_a_grammar_whose_characters_take_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = LLTokenizer(TokenizerWrapper(trial_process._Bytes()), eos_token=[trial_process.END])
    times = iter((0.0, 0.025, 1.0, 1.026))
    monkeypatch.setattr(trial_process, "time", SimpleNamespace(thread_time=lambda: next(times)))
    refused = trial_process._tried(tables, grammar_of(SMALL), LLParserLimits())
    assert refused == "reading a character of its text takes more than 25 ms"


@pytest.mark.parametrize(
    "structure",
    [
        {"regex": "abcdefghij" * 10_000},
        {"choice": [f"{number:05} text" for number in range(18_000)]},
        {"json": {"type": "object", "properties": {f"v{number}": {"type": "integer"} for number in range(2_000)}}},
        {"gbnf": 'root ::= "a" root'},
        {"json": {"const": "é\U0001f600"}},
    ],
)
def test_large_grammars_pass(trials: Trials, structure: dict[str, Any]) -> None:
    check_structure(StructuredOutputs(**structure), trials)


@pytest.mark.parametrize(
    "structure",
    [
        {"lark": "start: start"},
        {"lark": "start: a\na: b\nb: a"},
        {"gbnf": "root ::= root"},
        {"gbnf": "root ::= a\na ::= root | a"},
        {"lark": 'start: "a" b\nb: b'},
        {"regex": r"a[^\s\S]"},
    ],
    ids=str,
)
def test_a_grammar_without_texts_is_refused(trials: Trials, structure: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidRequest, match="structured_outputs: no text matches it, or none that begins as it allows"
    ):
        check_structure(StructuredOutputs(**structure), trials)


@pytest.mark.parametrize("structure", [{"gbnf": 'root ::= ""'}, {"gbnf": 'root ::= "a"*'}, {"regex": "a?"}], ids=str)
def test_a_grammar_of_the_empty_text_passes(trials: Trials, structure: dict[str, Any]) -> None:
    check_structure(StructuredOutputs(**structure), trials)


def test_errors_are_those_of_the_library(trials: Trials) -> None:
    for structure in (StructuredOutputs(regex="("), StructuredOutputs(lark="start: x"), StructuredOutputs(gbnf="a")):
        with pytest.raises(InvalidRequest) as here:
            check_structure(structure)
        with pytest.raises(InvalidRequest) as tried:
            check_structure(structure, trials)
        assert str(here.value) == str(tried.value)


def test_one_process_tries_small_grammars_one_after_the_other(trials: Trials) -> None:
    check_structure(SMALL, trials)
    (first,) = trials._idle
    for letter in "cde":
        check_structure(StructuredOutputs(regex=f"[a{letter}]"), trials)
    assert trials._idle == [first]
    assert first.poll() is None
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    check_structure(StructuredOutputs(regex="[xy]"), trials)
    (second,) = trials._idle
    assert second is not first


def test_a_process_that_a_grammar_has_made_large_ends(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials_module, "TRIAL_COMMAND", (*trials_module.TRIAL_PROGRAM, *map(str, (2, 128 << 20, 0))))
    check_structure(StructuredOutputs(regex="a" * 10_000), trials)
    assert trials._idle == []


class ManualTimer:
    """A timer that runs out when a test says so."""

    started: ClassVar[list[ManualTimer]] = []

    def __init__(self, interval: float, function: Callable[[], None]) -> None:
        self.interval = interval
        self.function = function
        self.daemon = False

    def start(self) -> None:
        self.started.append(self)

    def cancel(self) -> None:
        self.started.remove(self)


def test_idle_processes_end(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ManualTimer, "started", [])
    monkeypatch.setattr(trials_module.threading, "Timer", ManualTimer)
    for _ in range(2):
        check_structure(SMALL, trials)
        (process,) = trials._idle
        (timer,) = ManualTimer.started
        assert (timer.interval, timer.daemon) == (trials_module.IDLE_S, True)
        timer.function()
        assert process.returncode is not None
        assert trials._idle == []
        assert ManualTimer.started == []


def test_each_grammar_has_cpu_time_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system counts the time of a process; the time for grammars before does not count for the next."""
    limits: list[int] = []
    times = iter((0.2, 7.9, 30.0))
    request = json.dumps([grammar_of(SMALL), {}])
    monkeypatch.setattr(trial_process, "_limit", lambda kind, value: limits.append(value) if kind == CPU else None)
    monkeypatch.setattr(
        trial_process.resource, "getrusage", lambda _: SimpleNamespace(ru_utime=next(times), ru_stime=0.5)
    )
    monkeypatch.setattr("sys.argv", ["trial_process.py", "2", str(1 << 40), str(1 << 40)])
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{request}\n" * 3))
    trial_process.main()
    assert limits == [3, 11, 33]


def test_a_process_may_have_limits_of_its_own(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = ("sh", "-c", 'ulimit -H -t 3600; ulimit -H -d 4194304; ulimit -H -c 0; exec "$@"', "sh")
    monkeypatch.setattr(trials_module, "TRIAL_COMMAND", (*shell, *trials_module.TRIAL_COMMAND))
    check_structure(SMALL, trials)
    assert refusal(trials, regex=".*" * 8_000) == TOO_MUCH


def test_at_most_two_processes_run_and_none_is_left(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    lock = threading.Lock()
    started = trials_module._started

    def count() -> Any:
        process = started()
        with lock:
            begun.append(process)
        return process

    monkeypatch.setattr(trials_module, "_started", count)
    threads = [threading.Thread(target=check_structure, args=(SMALL, trials)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= len(begun) <= trials_module.MAX_PROCESSES
    trials.close()
    assert all(process.returncode is not None for process in begun)
    with pytest.raises(Unavailable, match="closed"):
        check_structure(SMALL, trials)


def test_close_ends_a_process_that_tries_a_grammar(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is stopped. Two of four requests are being tried and two wait for a process."""
    begun = threading.Semaphore(0)
    started = trials_module._started
    outcomes = []
    command = (sys.executable, "-c", "import os; os.kill(os.getpid(), 19)")

    def start() -> Any:
        process = started()
        begun.release()
        return process

    def check() -> None:
        try:
            check_structure(SMALL, trials)
        except Unavailable as error:
            outcomes.append(str(error))

    monkeypatch.setattr(trials_module, "TRIAL_COMMAND", command)
    monkeypatch.setattr(trials_module, "_started", start)
    threads = [threading.Thread(target=check) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        begun.acquire()
    trials.close()
    for thread in threads:
        thread.join()
    assert outcomes == ["the engine was closed before this grammar was tried; try again"] * 4


@pytest.fixture
def _default_hangup() -> Iterator[None]:
    """Make SIGHUP end processes also where the tests run under nohup, whose processes ignore it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_default_hangup")
def test_a_stopped_process_ends_with_its_server() -> None:
    script = (
        "import os, signal, sys; from quire.runtime.engine.structured import trials\n"
        "trials.TRIAL_COMMAND = (sys.executable, '-c', 'import time; time.sleep(600)')\n"
        "process = trials._started(); os.kill(process.pid, signal.SIGSTOP); os.waitid(os.P_PID, process.pid, 4 | 2)\n"
        "print(process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    server = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=False)
    deadline = time.monotonic() + 60
    while is_alive(int(server.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Return whether a process runs or is stopped. Nothing may collect the status of a child of a former server."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("letters", ["a", "a" * 200_000], ids=["waiting", "writing"])
def test_a_machine_without_time(trials: Trials, monkeypatch: pytest.MonkeyPatch, letters: str) -> None:
    """It is unknown whether the grammar is at fault. The process does not read, and a pipe has room for 64 KiB."""
    monkeypatch.setattr(trials_module, "TRIAL_COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    monkeypatch.setattr(trials_module, "TRIAL_WAIT_S", 0.2)
    with pytest.raises(Unavailable, match=r"cannot be checked now: there was no answer in 0.2 s; try again later"):
        trials.refusal(letters, {})
    assert (trials._idle, trials._trying) == ([], set())


def test_a_machine_without_processes(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials_module, "TRIAL_COMMAND", ("/nowhere/python",))
    with pytest.raises(Unavailable, match="structured_outputs cannot be checked now: No such file"):
        check_structure(SMALL, trials)


@pytest.fixture
def num_started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    begun = []
    started = trials_module._started

    def start() -> Any:
        begun.append(started())
        return begun[-1]

    monkeypatch.setattr(trials_module, "_started", start)
    yield lambda: len(begun)
    assert all(process.returncode is not None for process in begun)


def ending(status: str) -> tuple[str, ...]:
    """Return the command of a process that ends before it answers, with a signal's name or an exit status."""
    return ("sh", "-c", f"read line; exit {status}" if status.isdigit() else f"read line; kill -{status} $$")


@pytest.mark.usefixtures("_default_hangup")
@pytest.mark.parametrize("cause", ["KILL", "TERM", "HUP", "INT", "1"])
def test_a_process_ended_from_outside_twice_is_no_fault_of_the_grammar(
    num_started: Callable[[], int], monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    monkeypatch.setattr(trials_module, "TRIAL_COMMAND", ending(cause))
    with pytest.raises(Unavailable, match="now: the processes that check them are ended from outside; try again"):
        check_structure(SMALL, Trials())
    assert num_started() == 2


@pytest.mark.parametrize("cause", ["XCPU", "ABRT", "SEGV", "0"])
def test_a_process_ended_by_its_limits_or_a_fault_refuses_the_grammar_at_once(
    num_started: Callable[[], int], monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    monkeypatch.setattr(trials_module, "TRIAL_COMMAND", ending(cause))
    assert refusal(Trials(), regex="a") == TOO_MUCH
    assert num_started() == 1


def test_a_grammar_is_tried_again_in_a_new_process_after_one_was_ended_from_outside(
    trials: Trials, num_started: Callable[[], int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    once = ("sh", "-c", 'mkdir "$0" 2>&- && kill -KILL $$; exec "$@"', str(tmp_path / "began"))
    monkeypatch.setattr(trials_module, "TRIAL_COMMAND", (*once, *trials_module.TRIAL_COMMAND))
    check_structure(SMALL, trials)
    assert num_started() == 2
    assert trials._trying == set()
    trials.close()


def test_idle_processes_that_end_as_they_are_asked_are_replaced(
    trials: Trials, num_started: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both idle processes are ended; the second attempt is not made with one of them."""
    ended = [trials_module._started() for _ in range(2)]
    trials._idle += ended
    for process in ended:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        monkeypatch.setattr(process, "poll", lambda: None)
    check_structure(SMALL, trials)
    assert num_started() == 3
    trials.close()


def test_lack_of_memory_in_python_ends_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def validate(grammar: str, limits: object) -> str:
        raise MemoryError

    monkeypatch.setattr(trial_process, "LLMatcher", SimpleNamespace(validate_grammar=validate))
    with pytest.raises(MemoryError):
        trial_process._tried(Any, "", Any)


def test_the_end_of_an_engine_ends_its_processes() -> None:
    """The process that an engine's requests have left idle would stay for half a minute."""
    preparer = PromptPreparer(cast(Any, None), cast(Any, None), frozenset())
    preparer._checked.check("", SMALL)
    (process,) = preparer._checked._trials._idle
    preparer.close()
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(Unavailable, match="the engine was closed"):
        preparer._checked.check("", StructuredOutputs(regex="[xy]"))


def test_requests_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Trials, "refusal", lambda _, grammar, limits: asked.append(json.dumps([grammar, limits])) or "")
    checked = CheckedStructures()
    checked.check("", SMALL)
    checked.check("", SMALL)
    assert len(asked) == 1
    assert "[ab]{2}" in asked[0]
    assert "max_lexer_states" in asked[0]
    checked.close()
