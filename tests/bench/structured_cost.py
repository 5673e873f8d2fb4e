"""Measure what grammars cost: decoding of 16 users with and without, on the bundled model or another.

usage: structured_cost.py [--model FOLDER] [--users 16] [--tokens 128] [--rounds 6] [--threads N]

Each round runs the same prompts without a grammar and with each of the grammars, alternating. Printed are the plain
throughput in tokens per second, the share of it with each grammar, and the additional CPU time per token; all are
medians over the rounds but the first. Then 1, 4 and 16 users generate records with long keys, with and without draft
tokens for the text that the schema forces.
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median
from typing import Any

from quire import LLM, SamplingParams, StructuredOutputs
from quire.scheduler import speculative

RECORD = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 0, "maximum": 9999},
        "description": {"type": "string", "maxLength": 30},
        "enabled": {"type": "boolean"},
    },
    "required": ["identifier", "description", "enabled"],
    "additionalProperties": False,
}
LONG_KEYS = {
    "type": "object",
    "properties": {
        "customer_identifier": {"type": "integer", "minimum": 0, "maximum": 9999},
        "shipping_address_line": {"type": "string", "maxLength": 10},
        "preferred_payment_method": {"enum": ["credit_card_visa", "bank_transfer_sepa"]},
        "is_gift_wrapped": {"type": "boolean"},
    },
    "required": ["customer_identifier", "shipping_address_line", "preferred_payment_method", "is_gift_wrapped"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "any text": {"regex": r"[\s\S]{4000,}"},
    "schema": {"json": {"type": "array", "items": RECORD, "minItems": 12, "maxItems": 80}},
    "letters": {"lark": 'start: /[a-z ]{1,4000}/ "!"'},
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    model: dict[str, Any] = {} if args.model is None else {"model": args.model}
    with LLM(**model, max_num_seqs=max(64, args.users), threads=args.threads, enable_prefix_caching=False) as llm:
        prompts = ["The server " + "x" * number for number in range(args.users)]

        def run(users: int, **params: Any) -> tuple[float, float]:
            """Return the seconds of a token of all users, and of its CPU."""
            sampling_params = SamplingParams(max_tokens=args.tokens, temperature=1.0, seed=1, **params)
            start = time.perf_counter()
            cpu = sum(os.times()[:2])
            outputs = llm.generate(prompts[:users], sampling_params)
            tokens = sum(len(output.token_ids) for output in outputs)
            return (time.perf_counter() - start) / tokens, (sum(os.times()[:2]) - cpu) / tokens

        plain: list[tuple[float, float]] = []
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in GRAMMARS}
        gains: dict[int, list[float]] = {users: [] for users in (1, 4, 16) if users <= args.users}
        records = StructuredOutputs(json={"type": "array", "items": LONG_KEYS, "minItems": 12})
        acceptance = speculative.FORCED_ACCEPTANCE
        for _ in range(args.rounds):
            plain.append(run(args.users, ignore_eos=True))
            for name, grammar in GRAMMARS.items():
                found[name].append(run(args.users, structured_outputs=StructuredOutputs(**grammar)))
            for users, gained in gains.items():
                drafted, _ = run(users, structured_outputs=records)
                speculative.FORCED_ACCEPTANCE = 0.0
                undrafted, _ = run(users, structured_outputs=records)
                speculative.FORCED_ACCEPTANCE = acceptance
                gained.append(undrafted / drafted)

    def middle(rounds: list[tuple[float, float]], column: int) -> float:
        return median(each[column] for each in rounds[1:])

    print(f"plain {1 / middle(plain, 0):,.0f} tokens per second, {middle(plain, 1) * 1e6:.1f} µs of CPU per token")
    for name, rounds in found.items():
        share = median(p[0] / r[0] for p, r in zip(plain[1:], rounds[1:], strict=True))
        print(f"{name:10} {share:.3f} of it, {(middle(rounds, 1) - middle(plain, 1)) * 1e6:+.1f} µs of CPU per token")
    for users, gained in gains.items():
        print(f"forced tokens as drafts, {users} users: {median(gained[1:]):.2f}x the throughput of records")


if __name__ == "__main__":
    main()
