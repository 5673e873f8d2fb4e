"""`/v1/embeddings`, `/v1/rerank`, `/v1/score` and `/classify`: their fields, and the form of their answers.

The answer of embeddings is OpenAI's, the answer of rerank Jina's and Cohere's, the others are vLLM's. Must not import
routes.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from ...common.prompts import shown
from ...engine.facade import EmbeddedTexts, EmbedRequest
from ..http.embedding import AnswerSource, EmbeddingCall
from ..http.errors import BadRequest
from ..http.fields import Fields
from .fields import check_supported
from .other_fields import HINTS

FEWER_TEXTS = "send fewer texts per request, or use a client of Quire's protocol"
HELD_VECTOR_BYTES = HELD_CLASSES_BYTES = 64  # bytes of a text's vector or classes in an answer, besides the JSON
HELD_SCORE_BYTES = 64  # approximate bytes of a score that an answer holds
_COMMON = frozenset({"model", "priority", "deadline_ms", "truncate_prompt_tokens"}) | HINTS
_RANKED = frozenset({"query", "documents", "top_n", "return_documents"})
_SCORED = frozenset({"text_1", "text_2", "queries", "documents"})
CLASSIFY_FIELDS = _COMMON | {"input"}
EMBEDDING_FIELDS = _COMMON | {"input", "encoding_format", "dimensions", "prompt_name"}
RERANK_FIELDS = _COMMON | _RANKED
SCORE_FIELDS = _COMMON | _SCORED
# Fields of these paths in other servers, with their neutral values; and the fields to use instead.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "encoding_format": ("float",),
    "dimensions": (),
    "prompt_name": (),
    "input_type": (),
    "normalize": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "truncation_side": ("right",),
    "use_activation": (True,),
    "activation": (True,),
    "softmax": (True,),
    "max_tokens_per_doc": (),
}
_INSTEAD = {"input_type": "use prompt_name", "max_tokens_per_doc": "use truncate_prompt_tokens"}


def embedding_call(fields: Fields, tenant: str) -> EmbeddingCall:
    """Return the call of `/v1/embeddings`. Raises BadRequest."""
    _check_known(fields, EMBEDDING_FIELDS)
    encoding = fields.get("encoding_format", str, "float")
    if encoding not in ("float", "base64"):
        raise BadRequest(f"encoding_format must be float or base64, not {encoding[:80]!r}", "encoding_format")
    options = _options(fields, tenant)
    if "dimensions" in fields.values:
        options["dimensions"] = fields.get("dimensions", int, 0)
    if "prompt_name" in fields.values:
        options["prompt_name"] = fields.get("prompt_name", str, "")
    name, inputs = _named_inputs(fields)
    request = EmbedRequest(inputs=inputs, input_name=name, **options)
    return EmbeddingCall(request, lambda source: _VectorForm(source.model, is_base64=encoding == "base64"))


def classify_call(fields: Fields, tenant: str) -> EmbeddingCall:
    """Return the call of `/classify`. Raises BadRequest."""
    _check_known(fields, CLASSIFY_FIELDS)
    name, inputs = _named_inputs(fields)
    request = EmbedRequest(inputs=inputs, classify=True, input_name=name, **_options(fields, tenant))
    return EmbeddingCall(request, _LabelForm)


def rerank_call(fields: Fields, tenant: str) -> EmbeddingCall:
    """Return the call of `/v1/rerank`. Raises BadRequest."""
    _check_known(fields, RERANK_FIELDS)
    query = _text("query", fields.required("query"))
    documents = _texts("documents", fields.required("documents"))
    if (top_n := fields.get("top_n", int, max(1, len(documents)))) < 1:
        raise BadRequest(f"top_n must be at least 1, not {top_n}", "top_n")
    shows_documents = fields.get("return_documents", bool, True)
    return EmbeddingCall(
        EmbedRequest(inputs=documents, query=query, input_name="documents[{}]", **_options(fields, tenant)),
        lambda source: _RankForm(source, top_n, documents if shows_documents else None),
    )


def score_call(fields: Fields, tenant: str) -> EmbeddingCall:
    """Return the call of `/v1/score`: one query and its documents. Raises BadRequest."""
    _check_known(fields, SCORE_FIELDS)
    query_name = _one_of(fields, "text_1", "queries")
    name = _one_of(fields, "text_2", "documents")
    query = fields.required(query_name)
    if isinstance(query, list):
        if len(query) != 1:
            raise BadRequest(f"{query_name} must be one text, not {len(query)}; send one request per query", query_name)
        (query,) = query
    documents = fields.required(name)
    is_list = isinstance(documents, list)
    request = EmbedRequest(
        inputs=_texts(name, documents if is_list else [documents]),
        query=_text(query_name, query),
        input_name=f"{name}[{{}}]" if is_list else name,
        query_name=query_name,
        **_options(fields, tenant),
    )
    return EmbeddingCall(request, _ScoreForm)


class _VectorForm:
    """OpenAI's list of embeddings."""

    def __init__(self, model: str, *, is_base64: bool) -> None:
        self._model = model
        self._is_base64 = is_base64
        self.advice = FEWER_TEXTS if is_base64 else f"{FEWER_TEXTS}, or ask for base64"
        self._pieces: list[bytes] = []

    def add(self, chunk: EmbeddedTexts) -> int:
        num_bytes = 0
        for index, row in enumerate(chunk.values, chunk.first_index):
            vector = base64.b64encode(row.astype("<f4").tobytes()).decode() if self._is_base64 else row.tolist()
            piece = msgspec.json.encode({"object": "embedding", "index": index, "embedding": vector})
            self._pieces.append(piece)
            num_bytes += len(piece) + HELD_VECTOR_BYTES
        return num_bytes

    def whole(self, prompt_tokens: int) -> bytes:
        tail = msgspec.json.encode({"model": self._model, "usage": _usage(prompt_tokens)})
        return b'{"object":"list","data":[' + b",".join(self._pieces) + b"]," + tail[1:]


class _Scores:
    """The scores of a call, in the order of the documents."""

    advice = FEWER_TEXTS

    def __init__(self, source: AnswerSource) -> None:
        self._model = source.model
        self._name = source.name
        self._scores: list[float] = []

    def add(self, chunk: EmbeddedTexts) -> int:
        self._scores += chunk.values[:, 0].tolist()
        return HELD_SCORE_BYTES * len(chunk.values)


class _RankForm(_Scores):
    """The documents by falling score; among equals, in their order."""

    def __init__(self, source: AnswerSource, top_n: int, documents: tuple[str | tuple[int, ...], ...] | None) -> None:
        super().__init__(source)
        self._top_n = top_n
        self._documents = documents

    def whole(self, prompt_tokens: int) -> bytes:
        scores = self._scores
        documents = self._documents
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._top_n]
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({} if documents is None else {"document": {"text": documents[index]}})
            for index in order
        ]
        body = {"id": f"rerank-{self._name}", "model": self._model, "results": results, "usage": _usage(prompt_tokens)}
        return msgspec.json.encode(body)


class _ScoreForm(_Scores):
    """vLLM's list of scores."""

    def whole(self, prompt_tokens: int) -> bytes:
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(self._scores)]
        body = {
            "id": f"score-{self._name}",
            "object": "list",
            "created": int(time.time()),
            "model": self._model,
            "data": data,
        }
        return msgspec.json.encode({**body, "usage": _usage(prompt_tokens)})


class _LabelForm:
    """vLLM's list of labels with their probabilities."""

    advice = FEWER_TEXTS

    def __init__(self, source: AnswerSource) -> None:
        self._model = source.model
        self._labels = source.labels
        self._name = source.name
        self._pieces: list[bytes] = []

    def add(self, chunk: EmbeddedTexts) -> int:
        num_bytes = 0
        for index, row in enumerate(chunk.values, chunk.first_index):
            likeliest = self._labels[int(row.argmax())]
            each = {"index": index, "label": likeliest, "probs": row.tolist(), "num_classes": len(self._labels)}
            self._pieces.append(msgspec.json.encode(each))
            num_bytes += len(self._pieces[-1]) + HELD_CLASSES_BYTES
        return num_bytes

    def whole(self, prompt_tokens: int) -> bytes:
        body = {"id": f"classify-{self._name}", "object": "list", "created": int(time.time()), "model": self._model}
        body |= {"data": [msgspec.Raw(piece) for piece in self._pieces], "usage": _usage(prompt_tokens)}
        return msgspec.json.encode(body)


def _usage(prompt_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}


def _options(fields: Fields, tenant: str) -> dict[str, Any]:
    options: dict[str, Any] = {"tenant": tenant}
    for name in ("priority", "deadline_ms", "truncate_prompt_tokens"):
        if name in fields.values:
            options[name] = fields.get(name, int, 0)
    return options


def _one_of(fields: Fields, name: str, other_name: str) -> str:
    """Return the name of a field that the body uses, of two possible ones; `name` if it uses neither."""
    if other_name not in fields.values:
        return name
    if name in fields.values:
        raise BadRequest(f"{name} and {other_name} are two names of one field; give one of them", name)
    return other_name


def _named_inputs(fields: Fields) -> tuple[str, tuple[str | tuple[int, ...], ...]]:
    """Return the name of one input in messages, and the inputs."""
    given = fields.required("input")
    inputs = _inputs(given)
    is_one = isinstance(given, str) or type(next(iter(given), None)) is int
    return "input" if is_one else "input[{}]", inputs


def _inputs(value: object) -> tuple[str | tuple[int, ...], ...]:
    """Return one text, one list of token ids, or a list of them, as a tuple of inputs."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        kinds = set(map(type, value))
        if kinds == {int}:
            return (tuple(value),)
        if kinds <= {str, list} and all(isinstance(each, str) or set(map(type, each)) <= {int} for each in value):
            return tuple(each if isinstance(each, str) else tuple(each) for each in value)
    raise BadRequest(f"input must be text, token ids or a list of those, not {shown(value)}", "input")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be text, not {shown(value)}", name)
    return value


def _texts(name: str, value: object) -> tuple[str, ...]:
    """Return a list of texts, each of which may be an object with its `text`."""
    if not isinstance(value, list):
        raise BadRequest(f"{name} must be a list of texts, not {shown(value)}", name)
    texts: list[str] = []
    for index, each in enumerate(value):
        text = each.get("text") if isinstance(each, Mapping) else each
        if not isinstance(text, str):
            raise BadRequest(f"{name}[{index}] must be text or an object with its text, not {shown(each)}", name)
        texts.append(text)
    return tuple(texts)


def _check_known(fields: Fields, known: frozenset[str]) -> None:
    """Raise BadRequest for a field of other paths that this path does not support."""
    check_supported(fields, known, _UNSUPPORTED, _INSTEAD)
