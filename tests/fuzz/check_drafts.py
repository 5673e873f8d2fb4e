"""Compare outputs with and without draft tokens, bit by bit, and sampled tokens with the model's own probabilities.

usage: check_drafts.py [--tokens 200000] [--seed 1]

The bundled model generates random requests in random batches: alone without draft tokens, then with each drafter, with
drafts that are predicted to cost more than they save. The drafters are prompt lookup and recent outputs, a draft model
of the model's first layer, the model as its own draft model, and random tokens. Pools of different sizes preempt
requests. Then the third token of many samples is compared with its probability (chi-squared), with the model as its own
draft model. Exit status 1 if an output differs, or if the distribution does.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from quire import LLM, SamplingParams
from quire.runtime.model import BUNDLED_MODEL
from quire.scheduler import Request, speculative

VOCABULARY = 4000
SAMPLES = 4000  # samples of the chi-squared test
SAMPLE_BATCH = 8  # samples of one call: no request waits, and each has rows for its draft
TOP_K = 4  # tokens that each of its samples may take
SIGMAS = 5.0  # deviation of chi-squared that fails

RequestDraw = tuple[list[int], SamplingParams]


class RandomTokens:
    """A drafter of random tokens."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def propose(self, request: Request, limit: int) -> Sequence[int]:
        return [self._chance.randrange(VOCABULARY) for _ in range(self._chance.randint(0, limit))]

    def forget(self, request: Request) -> None:
        pass


def drawn_request(chance: random.Random) -> RequestDraw:
    """Return a prompt of random or repeating tokens, and random parameters."""
    period = chance.choice([3, 17, 400])
    part = [chance.randrange(10, VOCABULARY) for _ in range(min(period, chance.randint(1, 200)))]
    prompt = (part * (200 // len(part) + 1))[: chance.randint(1, 200)]
    sampling: dict[str, Any] = {"temperature": chance.choice([0.0, 0.5, 1.0, 1.5]), "seed": chance.randrange(1 << 32)}
    options = {
        "top_p": chance.uniform(0.5, 1.0),
        "top_k": chance.randint(1, 60),
        "min_p": chance.uniform(0.0, 0.2),
        "repetition_penalty": chance.uniform(0.8, 1.5),
        "presence_penalty": chance.uniform(-1.0, 2.0),
        "frequency_penalty": chance.uniform(-1.0, 2.0),
        "logit_bias": {chance.randrange(VOCABULARY): chance.uniform(-5.0, 5.0)},
        "n": chance.randint(1, 3),
        "stop": (chance.choice([" ", "e", "\n", "self"]),),
        "min_tokens": chance.randint(0, 9),
        "logprobs": chance.randint(0, 5),
        "ignore_eos": True,
    }
    sampling |= {name: value for name, value in options.items() if chance.random() < 0.25}
    return prompt, SamplingParams(max_tokens=chance.randint(9, 80), **sampling)


def outputs(llm: LLM, requests: Sequence[RequestDraw]) -> list[Any]:
    prompts, params = zip(*requests, strict=True)
    results = llm.generate([list(prompt) for prompt in prompts], list(params))
    return [
        [(each.token_ids, each.text, each.logprobs, each.finish_reason) for each in result.outputs]
        for result in results
    ]


def first_layer(folder: Path) -> str:
    """Write a folder with the bundled model's first layer."""
    shutil.copytree(BUNDLED_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": config["layer_types"][:1]}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def only(llm: LLM, select: Callable[[Any], list[Any]]) -> None:
    """Leave the engine the drafters that `select` returns of its own."""
    core: Any = llm.engine.core
    speculator = core.scheduler._speculator
    speculator._drafters = tuple(select(speculator._drafters))
    speculator._rates = speculator._rates[: len(speculator._drafters)]


def check_outputs(tokens: int, seed: int, draft: str) -> bool:
    """Compare outputs until `tokens` tokens have been generated with drafts. Return whether all are equal."""
    chance = random.Random(seed)
    done = differences = 0
    small, large = 3 << 20, 16 << 20
    kinds: dict[str, tuple[dict[str, Any], Callable[[Any], list[Any]]]] = {
        "lookup and suffixes": ({"kv_cache_memory": small}, list),
        "random tokens": ({"kv_cache_memory": small}, lambda found: [RandomTokens(seed)]),
        "first layer": ({"kv_cache_memory": small, "draft_model": draft}, lambda found: found[2:]),
        "itself": ({"kv_cache_memory": large, "draft_model": str(BUNDLED_MODEL)}, list),
    }
    while done < tokens:
        weights, kv = chance.choice([("q8", "int8"), ("bf16", "bf16"), ("q4", "f16"), ("f32", "f32")])
        settings = {"weights": weights, "kv_cache_dtype": kv, "threads": chance.choice([1, 2])}
        requests = [drawn_request(chance) for _ in range(24)]
        with LLM(**settings, kv_cache_memory=large, enable_prefix_caching=False) as llm:
            wanted = [outputs(llm, [each])[0] for each in requests]
        for name, (options, select) in kinds.items():
            limits = {
                "num_speculative_tokens": chance.randint(1, 8),
                "max_num_seqs": chance.choice([3, 8, 64]),
                "max_num_batched_tokens": chance.choice([64, 128, 512]),
            }
            with LLM(**settings, **limits, **options) as llm:
                if name != "itself" or chance.random() < 0.5:
                    only(llm, select)
                found = outputs(llm, requests)
                stats = llm.engine.stats()
            different = [index for index in range(len(requests)) if found[index] != wanted[index]]
            differences += len(different)
            done += sum(len(choice[0]) for result in found for choice in result)
            print(
                f"{done:>8} tokens  {name:<20} {settings} {limits}: {stats.accepted_draft_tokens} of "
                f"{stats.draft_tokens} draft tokens accepted, {stats.preemptions} preemptions, "
                f"{len(different)} differences",
                flush=True,
            )
            for index in different:
                print("  differs:", requests[index])
    print(f"{differences} differences in {done} tokens")
    return not differences


def check_distribution(seed: int) -> bool:
    """Return whether the first three tokens of samples with drafts have the model's probabilities."""
    prompt = [400, 401, 402, 403, 404]
    options: dict[str, Any] = {"num_speculative_tokens": 4, "max_num_seqs": 40, "kv_cache_memory": 16 << 20}
    with LLM(draft_model=str(BUNDLED_MODEL), **options) as llm:
        only(llm, lambda found: found[2:])
        params = [
            SamplingParams(temperature=1.0, top_k=TOP_K, max_tokens=5, seed=seed * SAMPLES + index, ignore_eos=True)
            for index in range(SAMPLES)
        ]
        counts: Counter[tuple[int, ...]] = Counter()
        for begin in range(0, SAMPLES, SAMPLE_BATCH):
            results = llm.generate([prompt] * SAMPLE_BATCH, params[begin : begin + SAMPLE_BATCH])
            counts.update(result.outputs[0].token_ids[:3] for result in results)
        stats = llm.engine.stats()
        expected = probabilities(llm, prompt)
    cells: list[tuple[float, int]] = []
    rest_expected, rest = 0.0, SAMPLES
    for tokens, probability in expected.items():
        if probability * SAMPLES >= 5:
            cells.append((probability * SAMPLES, counts[tokens]))
            rest -= counts[tokens]
        else:
            rest_expected += probability * SAMPLES
    cells.append((max(rest_expected, 1e-9), rest))
    chi_squared = sum((count - wanted) ** 2 / wanted for wanted, count in cells if wanted > 1)
    freedom = len(cells) - 1
    sigmas = (chi_squared - freedom) / math.sqrt(2 * freedom)
    print(
        f"{SAMPLES} samples, {stats.accepted_draft_tokens} of {stats.draft_tokens} draft tokens accepted: chi-squared "
        f"{chi_squared:.1f} with {freedom} degrees of freedom, {sigmas:+.1f} sigmas"
    )
    return sigmas < SIGMAS and set(counts) <= set(expected)


def probabilities(llm: LLM, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Return the probability of each three tokens, of the `TOP_K` likeliest at each position."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, probability in found.items():
            logits = llm.logits([*prompt, *tokens])[-1].astype(np.float64)
            top = np.argsort(-logits, kind="stable")[:TOP_K]
            weights = np.exp(logits[top] - logits[top[0]])
            for token, share in zip(top.tolist(), (weights / weights.sum()).tolist(), strict=True):
                longer[*tokens, token] = probability * share
        found = longer
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    speculative.MARGIN = 0.0  # verify drafts that do not pay, too
    with tempfile.TemporaryDirectory() as folder:
        equal = check_outputs(arguments.tokens, arguments.seed, first_layer(Path(folder) / "first_layer"))
    sys.exit(not (check_distribution(arguments.seed) and equal))


if __name__ == "__main__":
    main()
