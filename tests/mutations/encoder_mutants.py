"""Bugs in `runtime/model/encoder/` and the encoder runner."""

from mutant import Mutant

TESTS = "tests/runtime/model/encoder"
RUNNER = "runtime/model/runner/encoder_runner.py"
EMIT, MODULES, REGISTRY, MODERNBERT, TENSORS, WEIGHTS = (
    f"runtime/model/encoder/{name}.py"
    for name in ("emit", "sentence_transformers", "registry", "modernbert", "tensors", "weights")
)

MUTANTS = [
    Mutant(
        RUNNER,
        "        self._program.give_up()\n        token_ids",
        "        token_ids",
        "a refused batch is answered with the values of the one before it",
    ),
    Mutant(
        RUNNER,
        '        if any(len(of_text) != len(text.token_ids) for of_text, text in zip(types, texts, strict=True)):\n            raise ValueError("a text has a type for each token, or none")\n',
        "",
        "types that are fewer than tokens are read beyond their end",
    ),
    Mutant(
        RUNNER,
        "types = [text.type_ids or (0,) * len(text.token_ids) for text in texts]",
        "types = [text.type_ids or () for text in texts]",
        "texts without types cannot be embedded beside texts with them",
    ),
    Mutant(
        RUNNER,
        "return self._values[: self._num_texts, : self.spec.dimensions].copy()",
        "return self._values[: self._num_texts, : self.spec.dimensions]",
        "vectors of a batch are overwritten by the next one",
    ),
    Mutant(
        RUNNER,
        "return self._base_s + self._row_s * sum(lengths) + self._pair_s * pairs",
        "return self._base_s + self._row_s * sum(lengths)",
        "long texts take far longer than predicted, and sequences beside them stall",
    ),
    Mutant(
        EMIT,
        "scale, window, causal=False",
        "scale, 0, causal=False",
        "layers with a window see all tokens",
    ),
    Mutant(
        MODULES,
        "if len(chosen) > 1 or",
        "if",
        "two ways of pooling are one of them",
    ),
    Mutant(
        MODULES,
        "        projections.append(_dense(config, path, width))\n",
        "        projections.append(_dense(config, path, hidden_size))\n",
        "models with two dense modules are refused",
    ),
    Mutant(
        MODULES,
        '"sigmoid" if labels == 1 else "identity"',
        '"sigmoid"',
        "scores of several labels are squeezed to probabilities",
    ),
    Mutant(
        MODULES,
        'elif kind == "Dense" and pooling is not None and not normalise and not scores:',
        'elif kind == "Dense" and pooling is not None and not scores:',
        "vectors are normalised after a dense module that follows their norm",
    ),
    Mutant(
        REGISTRY,
        "token >= body.vocab_size:",
        "token > body.vocab_size:",
        "an answer token after the end of the vocabulary is read out of bounds",
    ),
    Mutant(
        MODERNBERT,
        'window = config.integer("local_attention", 2, MAX_POSITIONS, 128) // 2',
        'window = config.integer("local_attention", 2, MAX_POSITIONS, 128)',
        "windows of ModernBERT are twice as wide",
    ),
    Mutant(
        MODERNBERT,
        "KINDS[bool(layer % every)]",
        "KINDS[bool((layer + 1) % every)]",
        "other layers of ModernBERT see all tokens",
    ),
    Mutant(
        TENSORS,
        "row(answer.true) - row(answer.false)",
        "row(answer.true)",
        "the logit of the token for false does not count",
    ),
    Mutant(
        WEIGHTS,
        "spec.first_position, max_positions)",
        "0, max_positions)",
        "positions of RoBERTa begin with those of padding",
    ),
]
