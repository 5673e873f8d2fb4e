"""Measure speculative decoding: decode speed with and without draft tokens, alternating, for few and many users.

    python tests/bench/speculation.py [FOLDER] [--weights q8] [--users 1,4,16,32] [--draft-tokens 4] [--repeats 3]

Two kinds of prompts of 256 tokens: random ones, and ones that repeat 16 tokens, which a model tends to continue. The
outputs of both engines must be equal.
"""

from __future__ import annotations

import argparse
import random
import statistics

from quire import LLM, SamplingParams
from quire.runtime.common.config import EngineConfig

PROMPT_TOKENS = 256
NEW_TOKENS = 96


def prompts(kind: str, users: int, generator: random.Random) -> list[list[int]]:
    period = PROMPT_TOKENS if kind == "random" else 16
    parts = [[generator.randrange(10, 2000) for _ in range(period)] for _ in range(users)]
    return [part * (PROMPT_TOKENS // period) for part in parts]


def run(llm: LLM, batch: list[list[int]]) -> tuple[float, list[tuple[int, ...]]]:
    """Return the seconds of decoding, as the mean over users, and the tokens."""
    outputs = llm.generate(batch, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    return statistics.mean(output.usage.decode_ms for output in outputs) / 1e3, [out.token_ids for out in outputs]


def compare(plain: LLM, speculative: LLM, kind: str, users: int, repeats: int) -> str:
    generator = random.Random(users)
    seconds: tuple[list[float], list[float]] = ([], [])
    before = speculative.engine.stats()
    for repeat in range(repeats + 1):
        batch = prompts(kind, users, generator)
        (plain_s, expected) = run(plain, batch)
        (speculative_s, tokens) = run(speculative, batch)
        assert tokens == expected, "speculation changed a token"
        if repeat:  # the first warms up
            seconds[0].append(plain_s)
            seconds[1].append(speculative_s)
    after = speculative.engine.stats()
    drafted = after.draft_tokens - before.draft_tokens
    accepted = after.accepted_draft_tokens - before.accepted_draft_tokens
    gain = statistics.median(a / b for a, b in zip(*seconds, strict=True))
    tokens_per_s = users * NEW_TOKENS / statistics.median(seconds[0])
    return (
        f"{kind:>9} prompts, {users:2d} users: {tokens_per_s:7.1f} tok/s without, {gain:.2f} x with; "
        f"{drafted} draft tokens, acceptance rate {accepted / drafted if drafted else 0:.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--weights", default="q8")
    parser.add_argument("--users", default="1,4,16,32")
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()

    def start(num_speculative_tokens: int) -> LLM:
        return LLM.from_config(
            EngineConfig(
                model=arguments.folder,
                weights=arguments.weights,
                kv_cache_dtype="int8",
                max_num_seqs=max(map(int, arguments.users.split(","))),
                max_model_len=PROMPT_TOKENS + NEW_TOKENS,
                enable_prefix_caching=False,
                num_speculative_tokens=num_speculative_tokens,
            )
        )

    with start(0) as plain, start(arguments.draft_tokens) as speculative:
        print(
            f"{plain.engine.core.runner.capacity.isa}, at most {arguments.draft_tokens} draft tokens; medians",
            flush=True,
        )
        for kind in ("random", "repeating"):
            for users in map(int, arguments.users.split(",")):
                print(compare(plain, speculative, kind, users, arguments.repeats), flush=True)


if __name__ == "__main__":
    main()
