"""Run random models with states in random engines, and compare each request bit for bit with its run alone.

    python -m tests.system.random_states [--seconds 600] [--seed S] [--case N]

A case is a model of a random family with states, of random sizes, layers and data types, and random requests: samples,
beam searches, and prompts that repeat themselves or share beginnings. The reference computes one request at a time on
one thread at the lowest level, without draft tokens and prefix cache; in bf16, at the case's level, because only there
do levels differ. Then some engines compute all requests together, each at a random level, with random chunks, threads
and draft tokens, pools that preempt, spill files, kept states, and snapshots that the next engine of the case loads.
The pager is audited in every step: pages and states are conserved, and the kept states stay within their memory.
Exit status 1 after a difference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import structlog
from quire.kernels import supported_levels
from quire.runtime.common.errors import ModelError
from quire.runtime.engine import GenerateRequest, prefix_snapshot
from quire.runtime.model import kv_layout, read_spec
from quire.runtime.model.states import lay_out_states
from quire.scheduler import CostModel, speculative

from tests.support.bits import asked, one_by_one, prompt, running, together
from tests.support.families import GOLDENS
from tests.support.random_models import WITH_STATES, write_random_model

FAMILIES = tuple(name for name in WITH_STATES if not name.endswith("_images"))
LEVELS = supported_levels()
CHUNKS = (None, 1, 7, 33, 512)
VOCAB = 150  # ids of prompts, within the vocabulary of every golden
MAX_LENGTH = 160  # tokens of a sequence
COUNTED = ("preemptions", "preemptions_spilled", "accepted_draft_tokens", "state_hits")


def random_changes(rng: random.Random, family: str) -> dict[str, Any]:
    """Return random values of the sizes that a golden's config.json has. The reader may refuse some of them."""
    config = json.loads((GOLDENS / family / "config.json").read_text())
    heads = rng.choice([2, 3, 4, 6, 12])
    keys = rng.choice([1, 2, 3])
    inner = 2 * config["hidden_size"]  # channels of a Mamba-2 mixer
    layers = rng.randint(2, 4)
    kinds = sorted(set(config.get("layer_types") or ()))
    sizes = {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * rng.choice([1, 2, 3]),
        "linear_key_head_dim": rng.choice([8, 20, 32, 64, rng.randint(1, 100)]),
        "linear_value_head_dim": rng.choice([8, 36, 64, rng.randint(1, 100)]),
        "linear_conv_kernel_dim": rng.randint(2, 5),
        "conv_L_cache": rng.randint(2, 5),
        "conv_kernel": rng.randint(2, 5),
        "mamba_d_conv": rng.randint(2, 4),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": rng.choice([4, 16, 20, 64, rng.randint(1, 100)]),
        "mamba_n_groups": rng.choice([each for each in (1, 2, 3) if heads % each == 0]),
        "mamba_num_heads": heads,
        "mamba_head_dim": rng.choice([8, 24, rng.randint(1, 60)]),
        "n_groups": rng.choice([each for each in (1, 2, 3) if heads % each == 0]),
        "ssm_state_size": rng.choice([4, 16, 20, 64, rng.randint(1, 100)]),
    }
    changes = {key: value for key, value in sizes.items() if key in config and rng.random() < 0.7}
    for dependent in ({"mamba_n_heads", "mamba_d_head", "mamba_n_groups"}, {"mamba_num_heads", "n_groups"}):
        if changes.keys() & dependent:
            changes |= {key: sizes[key] for key in dependent if key in config}
    if kinds and rng.random() < 0.7:
        changes |= {"num_hidden_layers": layers, "layer_types": rng.choices(kinds, k=layers)}
    return changes


def random_requests(rng: random.Random) -> list[GenerateRequest]:
    """Return requests of all kinds; some begin as earlier ones do."""
    requests: list[GenerateRequest] = []
    for index in range(rng.randint(12, 18)):
        length = rng.choice([rng.randint(1, 20), rng.randint(20, 64), 64])
        tokens = prompt(length, rng.randrange(1 << 20), VOCAB)
        if rng.random() < 0.3:
            tokens = tuple(rng.choices(range(4, VOCAB), k=rng.randint(1, 6))) * 40
        elif requests and rng.random() < 0.6:
            earlier = rng.choice(requests).prompt
            assert not isinstance(earlier, str)
            tokens = (*earlier[: rng.randint(1, len(earlier))], *tokens[:20])
        params: dict[str, Any] = {"max_tokens": rng.choice([1, 6, 30, 40]), "temperature": 0.8, "seed": index}
        kind = rng.random()
        if kind < 0.15:
            params = {"max_tokens": rng.randint(4, 20), "beam_width": 3, "n": 2, "logprobs": 0}
        elif kind < 0.35:
            params |= {"n": rng.choice([2, 3]), "best_of": rng.choice([3, 4])}
        elif kind < 0.55:
            params |= {"logit_bias": {token: rng.choice([7.0, 12.0]) for token in tokens[:4]}}
        elif kind < 0.7:
            params |= {"temperature": 0.0, "repetition_penalty": 1.2}
        requests.append(asked(tokens[:64], **params))
    return requests


def random_settings(rng: random.Random, model: Path, fixed: dict[str, Any]) -> dict[str, Any]:
    """Return settings of an engine; most of them have a pool that is too small for the requests."""
    drafts = rng.choice([0, 0, 1, 2, 4])
    settings: dict[str, Any] = {
        "chunk": rng.choice(CHUNKS),
        "threads": rng.choice([1, 2, 3]),
        "num_speculative_tokens": drafts,
        "max_num_seqs": rng.choice([4, 20, 32]),
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "state_interval": rng.choice([None, 32, 64]),
        "max_num_batched_tokens": rng.choice([32, 100, 512]),
        "max_model_len": MAX_LENGTH,
    }
    spec = read_spec(model)
    state_bytes = lay_out_states(spec, drafts, fixed["state_dtype"]).nbytes
    kept = rng.choice([0, 1, 3, 40])
    pages = rng.choice([14, 14, 16, 400])
    page_bytes = kv_layout(spec, fixed["kv_cache_dtype"], 32).page_bytes
    settings["state_cache_memory"] = kept * state_bytes
    settings["kv_cache_memory"] = (settings["max_num_seqs"] + kept) * state_bytes + pages * page_bytes
    if rng.random() < 0.4:
        settings["kv_spill_size"] = rng.choice([1 << 20, 16 << 20])
    return settings


async def run_case(seed: int, number: int, folder: Path, counted: Counter[str]) -> str | None:
    """Run a case, and return its first difference, or None."""
    rng = random.Random(f"{seed}/{number}")
    family = rng.choice(FAMILIES)
    model = folder / "model"
    changes = random_changes(rng, family)
    try:
        write_random_model(family, model, **changes)
    except ModelError:
        counted["refused"] += 1
        return None
    if not lay_out_states(read_spec(model)).nbytes:
        counted["without states"] += 1
        return None
    fixed: dict[str, Any] = {
        "model": str(model),
        "weights": rng.choice(["q8", "q8", "q4", "f32", "bf16"]),
        "kv_cache_dtype": rng.choice(["int8", "f32", "bf16"]),
        "state_dtype": rng.choice(["f32", "f32", "bf16"]),
    }
    levels = [rng.choice(LEVELS)] if "bf16" in (fixed["weights"], fixed["kv_cache_dtype"]) else LEVELS
    requests = random_requests(rng)
    memory = {"kv_cache_memory": 64 << 20, "max_model_len": MAX_LENGTH}
    async with running(**fixed, **memory, threads=1, isa=levels[0], enable_prefix_caching=False) as engine:
        expected = await one_by_one(engine, requests)
    for round_number in range(3):
        settings = random_settings(rng, model, fixed) | {"isa": rng.choice(levels)}
        order = rng.sample(range(len(requests)), len(requests))
        async with running(**fixed, **settings) as engine, AsyncExitStack() as stack:
            if engine.core.pager.prefix is not None:
                await stack.enter_async_context(prefix_snapshot(engine.core, folder / "prefixes"))
            for _ in range(2):
                found = await together(engine, [requests[index] for index in order])
                for index, one in zip(order, found, strict=True):
                    if one != expected[index]:
                        return f"{family} {changes} {fixed}, round {round_number} with {settings}: {requests[index]}"
            stats = engine.stats()
            counted.update({name: getattr(stats, name) for name in COUNTED})
        counted["requests"] += 2 * len(requests)
        counted[family] += 1
    return None


def run(seed: int, seconds: float, first: int = 0, cases: int = 1 << 62) -> int:
    """Run cases for this time, and return the exit status."""
    print(f"seed {seed}, levels {', '.join(LEVELS)}", flush=True)
    end = time.monotonic() + seconds
    number = first
    counted: Counter[str] = Counter()
    # Draft tokens and spilling are tried wherever there is room, not only where they save time.
    drafts = patch.object(speculative, "MARGIN", 0.0)
    spilling = patch.object(CostModel, "predict_prefill", lambda self, num_tokens: 1e9)
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    with drafts, spilling, patch.dict(os.environ, {"QUIRE_DEBUG": "1"}):
        while time.monotonic() < end and number < first + cases:
            with tempfile.TemporaryDirectory() as folder:
                where = asyncio.run(run_case(seed, number, Path(folder), counted))
            if where:
                print(f"DIFFERENCE: {where}\nto repeat it: --seed {seed} --case {number}")
                return 1
            number += 1
    counts = ", ".join(f"{name} {count:,}" for name, count in counted.items())
    print(f"{number - first} cases, {counts}: all bits equal")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="random_states", description="Compare random engines bit for bit.")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    parser.add_argument("--case", type=int, help="run one case")
    options = parser.parse_args()
    seed = random.randrange(1 << 32) if options.seed is None else options.seed
    if options.case is not None:
        return run(seed, 1e9, options.case, 1)
    return run(seed, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
