"""Measure how often the bundled embedding model finds a section by its title, and the loss of each type of weights.

The baseline is BM25, a search for the title's words.

usage: embedding_recall.py [--weights f32 bf16 q8 q4] [--torch]

`tests/data/documentation.json` has the passages of the documentation when the model was trained, the titles that were
held out, and the rank that torch in f32 gave each of them: of the passages with that title, the best one's place among
all passages, from 1; the texts are searched without their titles. --torch computes these ranks again; it needs torch
and transformers.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from quire import LLM
from quire.runtime.model.files import BUNDLED_EMBEDDING_MODEL

DATA = json.loads((Path(__file__).parents[1] / "data" / "documentation.json").read_text("utf-8"))
MAX_TOKENS = 512
K1, B = 1.2, 0.75  # constants of BM25

Ranks = list[int]
Scores = npt.NDArray[np.float32]  # [held-out titles, passages]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", default=["f32", "bf16", "q8", "q4"])
    parser.add_argument("--torch", action="store_true")
    options = parser.parse_args()
    print(f"{len(DATA['held_out'])} held-out titles, {len(DATA['passages'])} passages")
    print("                  recall@1  recall@10")
    show("BM25", ranks(by_words()))
    show("torch, as stored", DATA["torch_ranks"])
    if options.torch:
        show("torch", ranks(by_vectors(embed_by_torch)))
    for weights in options.weights:
        show(weights, ranks_of(weights))


def show(name: str, found: Ranks) -> None:
    print(f"{name:<18}{recall(found, 1):>7.1f} %{recall(found, 10):>9.1f} %")


def recall(found: Ranks, k: int) -> float:
    """Return the percentage of titles that were found among the first `k` passages."""
    return 100 * sum(rank <= k for rank in found) / len(found)


def ranks_of(weights: Any, threads: int = 2) -> Ranks:
    """Return the ranks with weights of a type."""
    with LLM(BUNDLED_EMBEDDING_MODEL.name, weights=weights, threads=threads) as llm:
        return ranks(by_vectors(lambda texts: llm.embed(texts, truncate_prompt_tokens=MAX_TOKENS)))


def ranks(scores: Scores) -> Ranks:
    """Return the rank of each held-out title."""
    named = [[page, title] for page, title, _ in DATA["passages"]]
    best = [row[[each == title for each in named]].max() for row, title in zip(scores, DATA["held_out"], strict=True)]
    return [1 + int((row > score).sum()) for row, score in zip(scores, best, strict=True)]


def by_vectors(embed: Callable[[list[str]], npt.NDArray[np.float32]]) -> Scores:
    """Return the products of the vectors [texts, dimensions] that `embed` makes."""
    passages = embed([text for _, _, text in DATA["passages"]])
    return embed([title for _, title in DATA["held_out"]]) @ passages.T


def by_words() -> Scores:
    """Return the scores of BM25: rare words that a title and a passage share count for more."""
    passages = [Counter(words(text)) for _, _, text in DATA["passages"]]
    lengths = np.array([passage.total() for passage in passages])
    scores = np.zeros((len(DATA["held_out"]), len(passages)), np.float32)
    for row, (_, title) in zip(scores, DATA["held_out"], strict=True):
        for word in words(title):
            counts = np.array([passage[word] for passage in passages])
            having = np.count_nonzero(counts)
            weight = math.log(1 + (len(passages) - having + 0.5) / (having + 0.5))
            row += weight * counts * (K1 + 1) / (counts + K1 * (1 - B + B * lengths / lengths.mean()))
    return scores


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def embed_by_torch(texts: list[str]) -> npt.NDArray[np.float32]:
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModel

    tokenizer = Tokenizer.from_file(str(BUNDLED_EMBEDDING_MODEL / "tokenizer.json"))
    model = AutoModel.from_pretrained(BUNDLED_EMBEDDING_MODEL, dtype=torch.float32).eval()
    with torch.no_grad():
        ids = (torch.tensor([tokenizer.encode(text).ids[:MAX_TOKENS]]) for text in texts)
        rows = torch.stack([model(input_ids=each).last_hidden_state[0].mean(0) for each in ids])
    vectors: npt.NDArray[np.float32] = torch.nn.functional.normalize(rows, dim=-1).numpy()
    return vectors


if __name__ == "__main__":
    main()
