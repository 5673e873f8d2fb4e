"""What guessing gains and what it costs: decode speed with and without, alternating, for few and many users.

    python tests/bench/speculation.py [FOLDER] [--weights q8] [--users 1,4,16,32] [--guesses 4] [--repeats 3]

Two kinds of prompts of 256 tokens: random ones, and ones that repeat 16 tokens, which a model tends to continue. The
outputs of both engines are compared: they must be the same.
"""

from __future__ import annotations

import argparse
import random
import statistics

from quire import LLM, SamplingParams
from quire.runtime.common.config import EngineConfig

PROMPT_TOKENS, NEW_TOKENS = 256, 96


def prompts(kind: str, users: int, generator: random.Random) -> list[list[int]]:
    period = PROMPT_TOKENS if kind == "random" else 16
    parts = [[generator.randrange(10, 2000) for _ in range(period)] for _ in range(users)]
    return [part * (PROMPT_TOKENS // period) for part in parts]


def run(llm: LLM, asked: list[list[int]]) -> tuple[float, list[tuple[int, ...]]]:
    """Seconds of decoding, the mean over users, and the tokens."""
    outputs = llm.generate(asked, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
    return statistics.mean(output.usage.decode_ms for output in outputs) / 1e3, [out.token_ids for out in outputs]


def compare(plain: LLM, guessing: LLM, kind: str, users: int, repeats: int) -> str:
    generator = random.Random(users)
    seconds: tuple[list[float], list[float]] = ([], [])
    before = guessing.engine.stats()
    for repeat in range(repeats + 1):
        asked = prompts(kind, users, generator)
        (plain_s, expected), (guessing_s, tokens) = run(plain, asked), run(guessing, asked)
        assert tokens == expected, "guessing changed a token"
        if repeat:  # the first warms up
            seconds[0].append(plain_s)
            seconds[1].append(guessing_s)
    after = guessing.engine.stats()
    guessed, right = (
        after.draft_tokens - before.draft_tokens,
        after.accepted_draft_tokens - before.accepted_draft_tokens,
    )
    gain = statistics.median(a / b for a, b in zip(*seconds, strict=True))
    tokens_per_s = users * NEW_TOKENS / statistics.median(seconds[0])
    return (
        f"{kind:>9} prompts, {users:2d} users: {tokens_per_s:7.1f} tok/s without, {gain:.2f} x with; "
        f"{guessed} guessed, {right / guessed if guessed else 0:.0%} right"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--weights", default="q8")
    parser.add_argument("--users", default="1,4,16,32")
    parser.add_argument("--guesses", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()

    def start(guesses: int) -> LLM:
        return LLM.from_config(
            EngineConfig(
                model=arguments.folder,
                weights=arguments.weights,
                kv_cache_dtype="int8",
                max_num_seqs=max(map(int, arguments.users.split(","))),
                max_model_len=PROMPT_TOKENS + NEW_TOKENS,
                enable_prefix_caching=False,
                num_speculative_tokens=guesses,
            )
        )

    with start(0) as plain, start(arguments.guesses) as guessing:
        print(f"{plain.engine.core.runner.capacity.isa}, at most {arguments.guesses} guesses; medians", flush=True)
        for kind in ("random", "repeating"):
            for users in map(int, arguments.users.split(",")):
                print(compare(plain, guessing, kind, users, arguments.repeats), flush=True)


if __name__ == "__main__":
    main()
