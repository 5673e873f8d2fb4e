"""Measure attention of decode over pages of latents, in the shape of DeepSeek-V2-Lite, beside the memory bandwidth.

usage: latent_attention.py [--users N] [--context N] [--heads N] [--layers N] [--rounds N] [--isa LEVEL]

Each layer reads other pages, so that no cache holds them. The bandwidth is measured between the rounds.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
from quire.kernels import Pool, Program, available_cpus, pick_level
from quire.kernels.ops import Embed, LatentAttention, Region, region_nbytes
from quire.pager.layout import KVLayout
from quire.runtime.tools.bench.roofline import RooflineMeter

from tests.kernels.test_linear import packed

RANK, ROTATED, STRIDE = 512, 64, 192


class Attentions:
    """A program of one latent attention per layer, whose sequences have `context` tokens in the cache."""

    def __init__(self, kv: str, users: int, context: int, heads: int, layers: int, isa: str, pool: Pool) -> None:
        rng = np.random.default_rng(0)
        columns = heads * STRIDE
        table = rng.standard_normal((4, columns + RANK + ROTATED)).astype(np.float32)
        rotary = rng.uniform(-1, 1, (context + 1, ROTATED)).astype(np.float32)
        end = 0

        def region(rows: int, width: int, dtype: str = "f32") -> Region:
            nonlocal end
            made = Region(end, rows, width, dtype)
            end += region_nbytes(rows, width, dtype)
            return made

        x, absorbed = region(users, table.shape[1]), region(users, heads * RANK)
        out = region(heads * users, RANK, "bf16")
        norm = np.ones(RANK, np.float32)
        self.layout = KVLayout(layers, 1, RANK + ROTATED, kv, 32, values_in_keys=RANK)
        each = -(-context // 32)
        self.ops = [
            Embed(packed(table, "f32"), x),
            *(
                LatentAttention(
                    x, STRIDE, absorbed, x, columns, out, 0, layer, heads, RANK, norm, 1e-6, rotary, STRIDE**-0.5
                )
                for layer in range(layers)
            ),
        ]
        memory = np.full(users * each * self.layout.page_bytes, 0x2E, np.uint8)  # small numbers in each dtype
        limits = {"max_rows": users, "max_samples": 1, "max_sequences": users, "vocab_size": 4}
        self.program = Program(self.ops, end, memory, self.layout, users * each, pool, isa=isa, **limits)
        self.program.view(absorbed)[:] = rng.standard_normal((users, heads * RANK)) * 0.1
        self.step = (
            np.zeros(users, np.int32),
            np.arange(users + 1, dtype=np.int32),
            np.full(users, context - 1, np.int32),
            np.arange(users * each, dtype=np.int32),
            np.arange(users + 1, dtype=np.int32) * each,
            np.zeros(0, np.int32),
        )
        self.bytes = layers * users * context * self.layout.slot_bytes((1, RANK + ROTATED)) // 32

    def seconds(self) -> float:
        """Return the seconds of all attentions of a step."""
        self.program.op_seconds()
        self.program.run(*self.step)
        return sum(self.program.op_seconds()[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--isa", default=pick_level())
    options = parser.parse_args()
    threads = available_cpus().threads
    meter = RooflineMeter(threads, options.isa)
    pool = Pool(threads)
    print(f"{options.users} x {options.context} tokens, {options.heads} heads, {threads} threads, {options.isa}")
    for kv in ("f32", "bf16", "int8"):
        attentions = Attentions(kv, options.users, options.context, options.heads, options.layers, options.isa, pool)
        rates, memory = [], []
        for _ in range(options.rounds):
            memory.append(meter.measure().read_bytes_per_s / 1e9)
            rates.append(attentions.bytes / attentions.seconds() / 1e9)
        rate, read = statistics.median(rates), statistics.median(memory)
        print(f"{kv:>5}: {rate:6.1f} GB/s of {read:.1f} GB/s, {rate / read:.0%}")


if __name__ == "__main__":
    main()
