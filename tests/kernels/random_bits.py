"""Run random models in random batches, and compare each result bit for bit with one row at a time on one thread.

    python -m tests.kernels.random_bits [--seconds 600] [--seed S]
    python -m tests.kernels.random_bits --case '{"model": ...}'

A case is a small decoder of random sizes and dtypes, some sequences, and the steps that compute them: chunks and single
rows of some of the sequences at a time, with prefixes in shared pages, each step at a random ISA level on a random
number of threads. Some steps mix levels: each function of the program comes from a random level. The reference computes
every sequence alone at the scalar level; in bf16, at the level of the case, because only there do levels differ. A
difference is reduced to a smaller case and printed with the command that repeats it; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from quire.kernels import Program, supported_levels
from quire.kernels.isa import EQUAL_FUNCTIONS
from quire.kernels.ops import padded
from quire.pager import KVLayout

from tests.kernels.conftest import BLOCK_DTYPES, MAX_POSITIONS, MAX_SAMPLES, VOCAB, Toy

MAX_ROWS = 400
LEVELS = supported_levels()
DTYPES = ["f32", "q8", "rotated", "q4", "bf16", *BLOCK_DTYPES], ["f32", "int8", "bf16", "f16"]
MULTIPLICATIONS = 100_000_000  # multiplications of a case's reference: about half a second
REDUCING_S = 60
POISONED_POSITION = 300  # a position in the middle of a page, so that the page is not cleared

Place = tuple[str, int, dict[str, str]]  # level, threads, functions of other levels
Results = dict[tuple[int, int], bytes]  # (sequence, position) -> logits and their maxima


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step of a case."""

    isa: str
    threads: int
    rows: dict[int, int]  # sequence -> its next tokens
    choices: dict[str, str] = {}  # function -> its level, if that is another


class Case(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model, sequences and the steps that compute them."""

    model: dict[str, Any]  # arguments of Toy
    lengths: list[int]  # tokens of each sequence
    shared: list[int]  # first tokens and pages that each sequence shares with sequence 0
    steps: list[Step]
    releases: bool = False  # pages that left the window of a sequence without shared pages are filled with NaN
    poisons: bool = False  # a step of NaN precedes each step

    @property
    def reference_level(self) -> str:
        return self.steps[0].isa if "bf16" in (self.model["weights"], self.model["kv"]) else LEVELS[0]

    def tokens(self, sequence: int) -> np.ndarray:
        ids = [
            np.random.default_rng((self.model["seed"], i)).integers(0, VOCAB, self.lengths[i]) for i in (0, sequence)
        ]
        shared = min(self.shared[sequence], self.lengths[0])
        ids[1][:shared] = ids[0][:shared]
        return ids[1].astype(np.int32)

    def toy(self, isa: str, threads: int, **sizes: int) -> Toy:
        return Toy(**self.model | {"windows": tuple(self.model["windows"])}, isa=isa, threads=threads, **sizes)


# Random cases


def random_case(seed: int, number: int) -> Case:
    rng = random.Random(f"{seed}/{number}")
    model = random_model(rng)
    lengths = random_lengths(rng, model)
    page_size = model["page_size"]
    shares = 0 if model["taps"] or model["recurrence"] else 0.4  # a prefix in pages has no state
    shared = [0] + [
        rng.randint(0, min(lengths[0], length - 1) // page_size) * page_size if rng.random() < shares else 0
        for length in lengths[1:]
    ]
    levels = [rng.choice(LEVELS)] if "bf16" in (model["weights"], model["kv"]) else LEVELS
    places = [random_place(rng, levels) for _ in range(rng.randint(1, 3))]
    steps = random_steps(rng, places, lengths, shared)
    return Case(model, lengths, shared, steps, releases=rng.random() < 0.5, poisons=rng.random() < 0.3)


def random_place(rng: random.Random, levels: Sequence[str]) -> Place:
    """Return a level, a number of threads, and in half of the places functions of random levels."""
    mixes = rng.random() < 0.5
    choices = {name: rng.choice(LEVELS) for name in EQUAL_FUNCTIONS} if mixes else {}
    return rng.choice(levels), rng.choice([1, 2, 2, 3, 4, 6, 17]), choices


def random_model(rng: random.Random) -> dict[str, Any]:
    kv_heads = rng.choice([1, 1, 2, 3, 4])
    heads = kv_heads * rng.choice([1, 1, 2, 3, 4, 5, 7, 8, 16])
    windows = [rng.choice([0, 0, 0, 1, 64, 256, rng.randint(1, 400)]) for _ in range(rng.choice([1, 1, 2, 3]))]
    experts = rng.choice([0, 0, rng.randint(1, 40)])
    model = {
        "weights": rng.choices(DTYPES[0], [3, 3, 4, 4, 1, 1, 1, 1, 2, 2])[0],
        "kv": rng.choices(DTYPES[1], [3, 4, 1, 2])[0],
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": rng.choice([n for n in (2, 6, 16, 24, 32, 40, 64, 72, 96, 128, 256) if n * heads <= 1024]),
        "windows": windows,
        "hidden": rng.choice([rng.randint(1, 200), 32 * rng.randint(1, 6)]),
        "intermediate": rng.choice([rng.randint(1, 300), 16 * rng.randint(1, 20)]),
        "bias": rng.random() < 0.3,
        "qk_norm": rng.random() < 0.5,
        "page_size": rng.choice([16, 32, 64]),
        "experts": experts,
        "top_k": rng.randint(1, max(1, min(experts, 8))),
        "normalized": rng.random() < 0.7,
        "sigmoid": rng.random() < 0.4,
        "gated": rng.random() < 0.3,
        "taps": rng.choice([0, 0, rng.randint(1, 5)]),
        "ring": rng.choice([0, 0, rng.randint(1, 9)]),
        "recurrence": rng.choice([None, None, random_recurrence(rng)]),
        "head_norm": rng.choice(["rms", "rms", "layer", "rotated"]),
        "seed": rng.randrange(1 << 30),
        "unusual": rng.random() < 0.3,
    }
    if model["weights"] == "rotated":
        model["group"] = rng.choice([1, 2, 4])
    if block := BLOCK_DTYPES.get(model["weights"]):  # whole blocks along K
        head_dim = rng.choice([n for n in (16, 32, 64, 128, 256) if n * heads % block == 0] or [block])
        model |= {"head_dim": head_dim, "hidden": 256, "intermediate": block * rng.choice([1, 2])}
        if model["recurrence"]:
            model["recurrence"] |= {"heads": 2, "keys": rng.choice([1, 2]), "value_dim": block // 2}
    return model


def random_recurrence(rng: random.Random) -> dict[str, Any]:
    keys = rng.choice([1, 1, 2, 3])
    return {
        "heads": keys * rng.choice([1, 1, 2]),
        "keys": keys,
        "key_dim": rng.choice([1, 7, 16, 24, 64, 128, rng.randint(1, 150)]),
        "value_dim": rng.choice([1, 9, 16, 40, 64, 80, 128, rng.randint(1, 150)]),
        "taps": rng.randint(1, 5),
        "rollback": rng.choice([1, 2, 2, rng.randint(1, 12)]),
        "delta": rng.random() < 0.6,
        "dtype": rng.choice(["f32", "f32", "bf16"]),
        "tiled": rng.random() < 0.3,
    }


def random_lengths(rng: random.Random, model: dict[str, Any]) -> list[int]:
    inside = model["heads"] * model["head_dim"]
    mlps = model["top_k"] if model["experts"] else 1
    convolution = 4 * model["hidden"] if model["taps"] else 0
    per_layer = model["hidden"] * (convolution + 3 * inside + 3 * mlps * model["intermediate"]) + 300 * inside
    if shape := model["recurrence"]:
        keys, values = shape["keys"] * shape["key_dim"], shape["heads"] * shape["value_dim"]
        per_layer += model["hidden"] * (2 * keys + 3 * values) + 8 * shape["key_dim"] * values
    left = max(8, MULTIPLICATIONS // (len(model["windows"]) * per_layer + VOCAB * model["hidden"]))
    lengths = []
    for _ in range(rng.choice([1, 2, 3, 5, 8, 20])):
        length = rng.choice([1, rng.randint(1, 20), rng.randint(1, 150), rng.randint(200, MAX_POSITIONS)])
        lengths.append(min(length, left))
        left -= lengths[-1]
        if not left:
            break
    return lengths


def random_steps(rng: random.Random, places: list[Place], lengths: list[int], shared: list[int]) -> list[Step]:
    steps = []
    done = list(shared)
    while done != lengths:
        ready = [i for i in range(len(lengths)) if done[i] < lengths[i] and (not shared[i] or done[0] >= shared[i])]
        single = rng.random()
        left = MAX_ROWS
        rows = {}
        for sequence in rng.sample(ready, rng.randint(1, len(ready))):
            count = 1 if rng.random() < single else rng.randint(1, lengths[sequence] - done[sequence])
            rows[sequence] = min(count, left)
            left -= rows[sequence]
            done[sequence] += rows[sequence]
            if not left:
                break
        isa, threads, choices = rng.choice(places)
        steps.append(Step(isa, threads, rows, choices))
    return steps


# Running a case


def difference(case: Case) -> str | None:
    """Return where the case's results differ from the reference, or None."""
    expected = results_alone(case)
    for number, step, results in results_of_steps(case):
        for (sequence, position), result in results.items():
            if result != expected[sequence, position]:
                mixed = ", mixed" if step.choices else ""
                where = f"step {number} ({step.isa}{mixed}, {step.threads} threads)"
                return f"sequence {sequence}, position {position}, in {where}"
    return None


def results_alone(case: Case) -> Results:
    """Compute each sequence in its own pages, one row per step."""
    results = {}
    for sequence, length in enumerate(case.lengths):
        tables = Tables(case, [sequence])
        model = case.toy(case.reference_level, 1, max_rows=1, num_pages=tables.num_pages)
        ids = case.tokens(sequence)
        for position in range(length):
            step = model.step((ids[position : position + 1], position, tables.of[sequence]))
            model.program.run(**step)
            results[sequence, position] = result(model, model.program, 0)
    return results


def results_of_steps(case: Case) -> Iterator[tuple[int, Step, Results]]:
    """Run the case's steps; yield each with the results of as many rows as a step may sample."""
    tables = Tables(case, range(len(case.lengths)))
    model = case.toy(case.steps[0].isa, 1, max_rows=MAX_ROWS, num_pages=tables.num_pages)
    programs: dict[tuple[str, int, str], Program] = {}
    states = model.program.states  # states after the last step
    ids = [case.tokens(sequence) for sequence in range(len(case.lengths))]
    done = list(case.shared)
    for number, step in enumerate(case.steps):
        model.isa, model.threads, model.choices = step.isa, step.threads, step.choices
        place = (step.isa, step.threads, repr(step.choices))
        if place not in programs:
            programs[place] = model.bind()
        program = programs[place]
        program.states[:] = states
        states = program.states
        if case.poisons:
            run_nan(model, program, tables.spare)
        if case.releases and not any(case.shared):
            for sequence in step.rows:
                model.release_pages(tables.of[sequence], done[sequence])
        arrays = model.step(
            *[(ids[i][done[i] : done[i] + count], done[i], tables.of[i]) for i, count in step.rows.items()]
        )
        rows = [(i, done[i] + row) for i, count in step.rows.items() for row in range(count)]
        last = set(arrays["sample_rows"].tolist())
        others = [row for row in range(len(rows)) if row not in last]
        sampled = sorted([*last, *others[: MAX_SAMPLES - len(last)]])
        slots = np.array(list(step.rows), np.int32)
        program.run(**arrays | {"sample_rows": np.array(sampled, np.int32), "state_slots": slots})
        yield number, step, {rows[row]: result(model, program, i) for i, row in enumerate(sampled)}
        for sequence, count in step.rows.items():
            done[sequence] += count


class Tables:
    """Page tables of some of a case's sequences, one per layer group. The page `spare` belongs to no sequence."""

    def __init__(self, case: Case, sequences: Sequence[int]) -> None:
        model = case.model
        size = model["page_size"]
        windows = tuple(model["windows"])
        layout = KVLayout(len(windows), model["kv_heads"], model["head_dim"], model["kv"], size, windows)
        shared = {i: case.shared[i] // size if len(sequences) > 1 else 0 for i in sequences}
        own = {i: -(-case.lengths[i] // size) - shared[i] for i in sequences}
        self.spare = len(layout.group_windows) * sum(own.values())
        self.num_pages = self.spare + 1
        pages = iter(np.random.default_rng(model["seed"]).permutation(self.spare).astype(np.int32))
        self.of: dict[int, list[np.ndarray]] = {}  # sequence -> its tables
        for i in sequences:
            tables = [np.array([next(pages) for _ in range(own[i])], np.int32) for _ in layout.group_windows]
            if shared[i]:
                tables = [np.concatenate([self.of[0][g][: shared[i]], table]) for g, table in enumerate(tables)]
            self.of[i] = tables


def result(model: Toy, program: Program, index: int) -> bytes:
    logits = program.view(model.logits)[index, :VOCAB]
    maxima = program.view(model.maxima)[index, : padded(VOCAB) // 32]
    return bytes(logits.tobytes() + maxima.tobytes())


def run_nan(model: Toy, program: Program, page: int) -> None:
    """Run a row that sees nothing but NaN, which fills buffers of the workers and of the arena with NaN."""
    by_page = model.kv_memory.reshape(model.layout.planes, model.num_pages, -1)
    by_page[:, page] = 0xFF
    table = np.full(POISONED_POSITION // model.page_size + 1, page, np.int32)
    tables = [table] * len(model.layout.group_windows)
    slots = np.array([MAX_SAMPLES - 1], np.int32)
    program.run(**model.step((np.zeros(1, np.int32), POISONED_POSITION, tables)), state_slots=slots)
    by_page[:, page] = 0xFF


# Reducing a case that differs


def reduced(case: Case) -> Case:
    """Return a smaller case that differs too."""
    deadline = time.monotonic() + REDUCING_S
    smaller: Case | None = case
    while smaller is not None:
        case = smaller
        smaller = next((c for c in smaller_cases(case) if time.monotonic() < deadline and difference(c)), None)
    return case


def smaller_cases(case: Case) -> Iterator[Case]:
    for sequence in reversed(range(len(case.lengths))):
        if len(case.lengths) > 1 and (sequence or not any(case.shared)):
            yield without_sequence(case, sequence)
    if len(case.steps) > 1:
        yield shortened(case, case.steps[: len(case.steps) // 2])
        yield shortened(case, case.steps[:-1])
    for field, value in ("poisons", False), ("releases", False):
        if getattr(case, field) != value:
            yield msgspec.structs.replace(case, **{field: value})
    for name, value in (
        ("windows", case.model["windows"][1:]),
        ("windows", [0]),
        ("bias", False),
        ("qk_norm", False),
        ("head_norm", "rms"),
        ("taps", min(1, case.model["taps"])),
        ("recurrence", None),
        ("unusual", False),
        ("gated", False),
        ("heads", case.model["kv_heads"]),
        ("hidden", 32),
        ("intermediate", 32),
        ("head_dim", 32),
    ):
        if name in ("heads", "hidden", "intermediate", "head_dim") and case.model["weights"] in BLOCK_DTYPES:
            continue
        if value not in ([], case.model[name]):
            yield msgspec.structs.replace(case, model={**case.model, name: value})
    for threads in (1, 2):
        steps = [msgspec.structs.replace(step, threads=min(threads, step.threads)) for step in case.steps]
        if steps != case.steps:
            yield msgspec.structs.replace(case, steps=steps)
    for half in (0, 1):
        steps = [with_half(step, half) for step in case.steps]
        if steps != case.steps:
            yield msgspec.structs.replace(case, steps=steps)
    for level in {step.isa for step in case.steps}:
        steps = [msgspec.structs.replace(step, isa=level) for step in case.steps]
        if steps != case.steps:
            yield msgspec.structs.replace(case, steps=steps)


def with_half(step: Step, half: int) -> Step:
    """Return the step with the first or the second half of its choices; the second half of one choice is none."""
    names = list(step.choices)
    kept = names[: (len(names) + 1) // 2] if half == 0 else names[(len(names) + 1) // 2 :]
    return msgspec.structs.replace(step, choices={name: step.choices[name] for name in kept})


def without_sequence(case: Case, sequence: int) -> Case:
    steps = []
    for step in case.steps:
        rows = {i - (i > sequence): count for i, count in step.rows.items() if i != sequence}
        if rows:
            steps.append(msgspec.structs.replace(step, rows=rows))
    lengths, shared = ([*values[:sequence], *values[sequence + 1 :]] for values in (case.lengths, case.shared))
    return msgspec.structs.replace(case, lengths=lengths, shared=shared, steps=steps)


def shortened(case: Case, steps: list[Step]) -> Case:
    """Return the case with these of its first steps, and no more tokens than they compute."""
    lengths = [max(1, start + sum(step.rows.get(i, 0) for step in steps)) for i, start in enumerate(case.shared)]
    return msgspec.structs.replace(case, lengths=lengths, steps=steps)


# The campaign


def report(case: Case, where: str) -> None:
    small = reduced(case)
    print(f"DIFFERENCE: {where}\nreduced: {difference(small)}; to repeat it:")
    print(f"python -m tests.kernels.random_bits --case '{msgspec.json.encode(small).decode()}'")


def campaign(seed: int, seconds: float) -> int:
    """Run cases for this time, and return the exit status."""
    print(f"seed {seed}, levels {', '.join(LEVELS)}", flush=True)
    end = time.monotonic() + seconds
    number = rows = 0
    used = set()
    while time.monotonic() < end:
        case = random_case(seed, number)
        where = difference(case)
        if where:
            print(f"case {number} of seed {seed}")
            report(case, where)
            return 1
        number += 1
        rows += sum(case.lengths)
        used |= {(case.model["weights"], case.model["kv"], step.isa) for step in case.steps}
    print(f"{number} cases, {rows:,} rows, {len(used)} combinations of weights, KV cache and level: all bits equal")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="random_bits", description="Compare random batches bit for bit.")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    parser.add_argument("--case", type=lambda text: msgspec.json.decode(text, type=Case), help="repeat one case")
    options = parser.parse_args()
    if options.case is None:
        return campaign(random.randrange(1 << 32) if options.seed is None else options.seed, options.seconds)
    where = difference(options.case)
    print(f"DIFFERENCE: {where}" if where else "all bits equal")
    return 1 if where else 0


if __name__ == "__main__":
    sys.exit(main())
