"""Put one bug at a time into a copy of the tree and check that the tests notice it.

usage: run.py [--package NAME]... [--only TEXT] [--sample N] [--seed S] [--check] [--again] [--results FILE]

The lists of bugs are the modules beside this file, one per package. The copy lies in a temporary folder and is
installed there in editable form, with the dependencies of this environment. Before the first bug of a set of tests,
these tests must pass without a bug. Results are appended to FILE, one JSON object per line. A bug that was caught is
not tried again while its file is the same, nor one that survived while its tests are the same too, unless `--again`
is given. `--check` only checks that every text occurs exactly once. Exit status 1 if a bug does not apply, or if less
than 95 % of the bugs tried were caught.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

from mutant import Mutant

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    *("pager", "protocol", "measuring", "scheduler", "server", "page", "kernels"),
    *("engine", "text", "workers", "cluster", "model", "encoder", "vision"),
)
LEAST_CAUGHT = 0.95
TEST_TIMEOUT_S = 60  # limit of one test
LEAST_TIMEOUT_S = 60.0  # limit of a whole test run
USAGE_ERROR = 4  # pytest's exit status
TIMEOUT_FACTOR = 3  # factor of the time without a bug
SLOW = ("test_interleavings.py", "runtime/engine/test_engine.py")  # run after the others of their folder
NOT_COPIED = (".git", ".venv", "build", "__pycache__", "node_modules", ".mypy_cache", ".ruff_cache", ".pytest_cache")


@dataclass(frozen=True, slots=True)
class Trial:
    package: str
    mutant: Mutant
    tests: tuple[str, ...]

    @property
    def key(self) -> str:
        """Return an identifier that changes with the bug and its file."""
        return _digest(repr(astuple(self.mutant)).encode(), (ROOT / self.mutant.file).read_bytes())

    @property
    def tests_key(self) -> str:
        """Return an identifier that changes with the tests."""
        return _digest(*(path.read_bytes() for path in test_files(self.tests)))


def _digest(*contents: bytes) -> str:
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]


class Copy:
    """A copy of the tree, with an environment of its own."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(*NOT_COPIED))
        environment = self.root / ".venv"
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        packages = sysconfig.get_path("purelib", vars={"base": str(environment)})
        # A plain path line makes dependencies importable, but not this environment's own editable quire.
        Path(packages, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self._python = str(environment / "bin" / "python")
        tools = f"{environment / 'bin'}:{Path(sys.executable).parent}"
        self._variables = os.environ | {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "CYTHON": str(Path(sys.executable).parent / "cython"),
        }
        subprocess.run(
            [
                *(self._python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"),
                *("-Csetup-args=-Damx_twin=true", "-e", "."),
            ],
            cwd=self.root, env=self._variables, check=True,
        )  # fmt: skip

    def test(self, paths: Sequence[str], timeout_s: float | None, changed: str = "") -> tuple[bool, str]:
        """Run the tests, first the tests of the `changed` file. Return whether all passed, and the first failure."""
        options = ("-x", "-q", "-p", "no:cacheprovider", "--tb=no", f"--timeout={TEST_TIMEOUT_S}")
        command = [self._python, "-m", "pytest", *options, *self._ordered(paths, Path(changed).stem)]
        process = subprocess.Popen(
            command, cwd=self.root, env=self._variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False, "no end"
        finally:
            _kill_group(process)
        if process.returncode == USAGE_ERROR:
            raise SystemExit(output)
        lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))] or output.splitlines()
        return process.returncode == 0, lines[0 if process.returncode == 1 else -1] if lines else ""

    def _ordered(self, tests: Sequence[str], stem: str) -> list[str]:
        """Return the test files of folders: test_`stem` first, the slow ones last."""
        paths: list[str] = []
        for test in tests:
            folder = self.root / test
            found = sorted(folder.rglob("test_*.py")) if folder.is_dir() else []
            paths += [str(path.relative_to(self.root)) for path in found] or [test]
        return sorted(paths, key=lambda path: (path.endswith(SLOW), not path.endswith(f"/test_{stem}.py")))

    @contextmanager
    def bug(self, mutant: Mutant) -> Iterator[None]:
        """Put the bug in, and take it out."""
        path = self.root / mutant.file
        content = mutant.apply(self.root)
        try:
            _forget_bytecode(path)
            yield
        finally:
            path.write_text(content)
            _forget_bytecode(path)


def _kill_group(process: subprocess.Popen[str]) -> None:
    """Kill engine processes that the tests left, of a server that a bug made hang."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _forget_bytecode(path: Path) -> None:
    """Remove the compiled file: its time stamp has whole seconds, and a bug may keep the size."""
    if path.suffix == ".py":
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def test_files(tests: Iterable[str]) -> list[Path]:
    files: list[Path] = []
    for test in tests:
        path = ROOT / test.partition("::")[0]
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return files


def load_trials(packages: Iterable[str]) -> list[Trial]:
    trials = []
    for package in packages:
        module = importlib.import_module(package + "_mutants")
        trials += [Trial(package, mutant, tuple((mutant.tests or module.TESTS).split())) for mutant in module.MUTANTS]
    return trials


def choose(trials: list[Trial], options: argparse.Namespace) -> list[Trial]:
    """Return the trials that the options select, in the order of the lists."""
    if options.only:
        trials = [trial for trial in trials if options.only in f"{trial.mutant.file} {trial.mutant.bug}"]
    if options.sample and options.sample < len(trials):
        trials = sorted(random.Random(options.seed).sample(trials, options.sample), key=trials.index)
    return trials


def stale(trials: list[Trial]) -> dict[Trial, str]:
    """Return the bugs that do not apply, with the reason."""
    found = {}
    for trial in trials:
        path = ROOT / trial.mutant.file
        times = path.read_text().count(trial.mutant.text) if path.exists() else 0
        if times != 1:
            found[trial] = f"{trial.mutant.file}: occurs {times} times: {trial.mutant.text!r}"
        for test in test_files(trial.tests):
            if not test.exists():
                found[trial] = f"no file {test}"
    return found


def run_trials(trials: list[Trial], results: Path, again: bool) -> dict[Trial, str]:
    """Return the outcome per trial: caught, survived or equivalent."""
    known = {} if again else _read_results(results)
    outcomes: dict[Trial, str] = {}
    limits: dict[tuple[str, ...], float] = {}
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy: Copy | None = None
        for number, trial in enumerate(trials, 1):
            if trial.mutant.equivalent:
                outcomes[trial] = "equivalent"
            elif known.get(trial.key) in ("caught", trial.tests_key):
                outcomes[trial] = "caught" if known[trial.key] == "caught" else "survived"
            else:
                copy = copy or Copy(Path(folder))
                if trial.tests not in limits:
                    limits[trial.tests] = _time_without_bug(copy, trial.tests)
                outcomes[trial], detail, seconds = _try(copy, trial, limits[trial.tests])
                print(
                    f"{number:4}/{len(trials)} {outcomes[trial]:<9} {seconds:5.1f} s  "
                    f"{trial.mutant.file}: {trial.mutant.bug}  [{detail[:110]}]",
                    flush=True,
                )
                result = "caught" if outcomes[trial] == "caught" else trial.tests_key
                line = {"key": trial.key, "result": result, "bug": trial.mutant.bug, "detail": detail}
                with results.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    return outcomes


def _time_without_bug(copy: Copy, tests: tuple[str, ...]) -> float:
    """Return the time limit of a run of these tests, in seconds."""
    started = time.monotonic()
    passed, detail = copy.test(tests, None)
    if not passed:
        raise SystemExit(f"the tests fail without a bug: {' '.join(tests)}: {detail}")
    return max(LEAST_TIMEOUT_S, TIMEOUT_FACTOR * (time.monotonic() - started))


def _try(copy: Copy, trial: Trial, limit_s: float) -> tuple[str, str, float]:
    """Return the outcome, the first failure and the time in seconds."""
    started = time.monotonic()
    with copy.bug(trial.mutant):
        passed, detail = copy.test(trial.tests, limit_s, trial.mutant.file)
    return "survived" if passed else "caught", "" if passed else detail, time.monotonic() - started


def _read_results(results: Path) -> dict[str, str]:
    """Return, by key, "caught" or the key of the tests that did not notice the bug."""
    if not results.exists():
        return {}
    lines = map(json.loads, results.read_text().splitlines())
    return {line["key"]: line["result"] for line in lines}


def print_table(outcomes: dict[Trial, str]) -> float:
    """Print a row per package and the survivors; return the share of the bugs that was caught."""
    print(f"{'package':<12} {'caught':>7} {'survived':>9} {'equivalent':>11}")
    total: Counter[str] = Counter()
    for package in PACKAGES:
        counts = Counter(outcome for trial, outcome in outcomes.items() if trial.package == package)
        total += counts
        if counts:
            print(f"{package:<12} {counts['caught']:7} {counts['survived']:9} {counts['equivalent']:11}")
    share = total["caught"] / max(1, total["caught"] + total["survived"])
    print(f"{'all':<12} {total['caught']:7} {total['survived']:9} {total['equivalent']:11}   {share:.1%} caught")
    for trial, outcome in outcomes.items():
        if outcome != "caught":
            print(f"{outcome}: {trial.mutant.file}: {trial.mutant.bug}. {trial.mutant.equivalent}")
    return share


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", action="append", choices=PACKAGES, help="may be given several times")
    parser.add_argument("--only", help="part of the file's name or of the bug's description")
    parser.add_argument("--sample", type=int, help="try this many, drawn at random")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="only check that every bug applies")
    parser.add_argument("--again", action="store_true", help="ignore earlier results")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "mutations.jsonl")
    options = parser.parse_args()
    trials = choose(load_trials(options.package or PACKAGES), options)
    problems = stale(trials)
    if not options.check:
        options.results.parent.mkdir(exist_ok=True)
        applicable = [trial for trial in trials if trial not in problems]
        share = print_table(run_trials(applicable, options.results, options.again))
    for trial, reason in problems.items():
        print(f"does not apply: {trial.package}: {reason}")
    print(f"{len(trials)} bugs, {len(problems)} do not apply")
    return 1 if problems or (not options.check and share < LEAST_CAUGHT) else 0


if __name__ == "__main__":
    sys.exit(main())
