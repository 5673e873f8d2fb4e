"""Measure what batch-invariant results cost: time builds that break one rule each against the unchanged build.

    python tests/bench/price_of_same_bits.py build SCRATCH
    python tests/bench/price_of_same_bits.py measure SCRATCH CHECKPOINT

`build` patches a copy of this tree, a few lines per variant, and installs each under SCRATCH (takes minutes). `measure`
runs one process per variant in turns, and prints the median difference of a step from the unchanged build in the
same round. The unchanged build runs twice; the difference from itself is the noise. Two rules have no
variant, because attention over pages needs them: K and V are read back from the page, and the softmax is rounded for
V.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from operator import truediv
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {  # sequences, rows of each, position of their first row, runs per turn
    "decode 1": (1, 1, 144, 12),
    "decode 8": (8, 1, 144, 7),
    "decode 32": (32, 1, 144, 3),
    "decode 1 at 4,096": (1, 1, 4095, 7),
    "prefill 4x128": (4, 128, 0, 1),
}
PAGES = 160
PAGE_SIZE = 32
MAX_ROWS = 512
MAX_POSITIONS = 4096

# Patches are (file, regular expression, replacement) and must match; the order keeps recompilation short.
VARIANTS: dict[str, list[tuple[str, str, str]]] = {
    "unchanged": [],
    "attention in one split": [("kernels/attention.pyx", r"\bSPLIT = 256\b", "SPLIT = 1 << 20")],
    "pages not zeroed": [("kernels/heads.pyx", r"memset\(kv\.k, 0, op\.slot\.head_bytes\)", "pass")],
    "q8 in two chains over K": [  # even and odd blocks of 32, added up at the end
        (
            "kernels/simd/linear.c",
            r"acc\[i\]\[([01])\] = (vf_fma\(vf_from\(dot\[i\]\[\1\]\), .*?, acc\[i\]\[\1\]\));",
            r"{ const vf next_acc = \2; acc[i][\1] = odd[i][\1], odd[i][\1] = next_acc; }",
        ),
        (
            "kernels/simd/linear.c",
            r"(void body_blocks\b.*?)(vf acc\[LINEAR_ROWS\]\[2\];)(.*?)(finish\(rows, acc, t\);)",
            r"\1\2 vf odd[LINEAR_ROWS][2];"
            r" UNROLL for (int i = 0; i < rows; i++) odd[i][0] = odd[i][1] = vf_zero();\3"
            r"UNROLL for (int i = 0; i < rows; i++) UNROLL for (int j = 0; j < 2; j++)"
            r" acc[i][j] = vf_add(acc[i][j], odd[i][j]); \4",
        ),
    ],
    "contraction and fast-math": [  # infinities are kept: they mask
        ("kernels/meson.build", "'-ffp-contract=off'", "'-ffp-contract=fast', '-ffast-math', '-fno-finite-math-only'")
    ],
}


def build(scratch: Path) -> None:
    tree = scratch / "tree"
    compiled = scratch / "compiled"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns("build", ".*", "__pycache__", "*.so"))
    options = "-Dpython.platlibdir=/site", "-Dpython.purelibdir=/site"
    subprocess.run(["meson", "setup", compiled, tree, *options], check=True, stdout=subprocess.DEVNULL)
    for name, patches in VARIANTS.items():
        for file, pattern, replacement in patches:
            text, found = re.subn(pattern, replacement, (tree / file).read_text(), flags=re.S)
            if not found:
                sys.exit(f"{name}: {pattern} does not match {file} any more; update the patch")
            (tree / file).write_text(text)
        subprocess.run(["meson", "install", "-C", compiled, "--quiet", "--destdir", scratch / name], check=True)
        for file, _, _ in patches:
            shutil.copyfile(ROOT / file, tree / file)


def measure(scratch: Path, checkpoint: str) -> None:
    names = [*VARIANTS, "unchanged, again"]
    workers = {name: start(scratch / name.removesuffix(", again"), checkpoint) for name in names}
    for worker in workers.values():
        worker.stdout.readline()  # loaded
    seconds: dict[tuple[str, str], list[float]] = {(name, shape): [] for name in names for shape in SHAPES}
    for first, shape in itertools.product(range(len(names)), SHAPES):
        for name in names[first:] + names[:first]:  # rotate: the first run after another shape is slower
            print(shape, file=workers[name].stdin, flush=True)
            seconds[name, shape].append(float(workers[name].stdout.readline()))
    print(f"{'':<28}" + "".join(f"{shape:>20}" for shape in SHAPES))
    print(f"{'unchanged':<28}" + "".join(f"{median(seconds['unchanged', shape]) * 1000:>17.1f} ms" for shape in SHAPES))
    for name in names[1:]:
        shares = (median(map(truediv, seconds[name, shape], seconds["unchanged", shape])) - 1 for shape in SHAPES)
        print(f"{name:<28}" + "".join(f"{share:>+20.1%}" for share in shares))


def start(variant: Path, checkpoint: str) -> subprocess.Popen[str]:
    """Start a process that imports the variant's quire. -S: the hook of an editable install would come first."""
    environment = os.environ | {"PYTHONPATH": f"{variant / 'site'}:{sysconfig.get_path('purelib')}"}
    command = [sys.executable, "-S", __file__, "work", checkpoint]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def work(checkpoint: str) -> None:
    """Answer each shape's name on standard input with the median seconds of a step."""
    step = prepare(checkpoint)
    for shape in SHAPES:
        step(*SHAPES[shape][:3])
    print("ready", flush=True)
    for line in sys.stdin:
        *sizes, runs = SHAPES[line.strip()]
        print(median(step(*sizes) for _ in range(runs)), flush=True)


def prepare(checkpoint: str) -> Callable[[int, int, int], float]:
    """Load q8 weights and fill int8 pages; return a function that runs a step and returns its seconds."""
    import numpy as np
    from quire.kernels import Pool, Program, available_cpus
    from quire.pager import KVArena
    from quire.runtime.model import kv_layout, pack_model

    model = pack_model(checkpoint, "q8")
    plan = model.compile(max_positions=MAX_POSITIONS, max_tokens=MAX_ROWS, max_samples=32)
    layout = kv_layout(model.spec, "int8", PAGE_SIZE)
    vocab = model.spec.vocab_size
    arena = KVArena(layout, PAGES)
    limits = {"max_rows": MAX_ROWS, "max_samples": 32, "max_sequences": 32}
    pool = Pool(available_cpus().threads)
    program = Program(plan.ops, plan.arena_bytes, arena.memory, layout, PAGES, pool, vocab_size=vocab, **limits)
    ids = np.random.default_rng(0).integers(0, vocab, MAX_ROWS).astype(np.int32)

    def step(sequences: int, rows: int, first: int) -> float:
        starts = np.arange(sequences + 1, dtype=np.int32)
        pages = -(-(first + rows) // PAGE_SIZE)
        table = np.arange(sequences * pages, dtype=np.int32)
        firsts = np.full(sequences, first, np.int32)
        before = time.perf_counter()
        program.run(ids[: sequences * rows], starts * rows, firsts, table, starts * pages, starts[1:] * rows - 1)
        return time.perf_counter() - before

    step(1, MAX_ROWS, 0)
    for page in range(MAX_ROWS // PAGE_SIZE, PAGES):
        arena.copy_page(page % (MAX_ROWS // PAGE_SIZE), page)
    return step


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["build", scratch]:
            build(Path(scratch).resolve())
        case ["measure", scratch, checkpoint]:
            measure(Path(scratch).resolve(), checkpoint)
        case ["work", checkpoint]:
            work(checkpoint)
        case _:
            sys.exit(__doc__)
