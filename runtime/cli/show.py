"""`quire show`: print the facts of a model's files, here or on a hub; no weights are read or downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..common.errors import ModelError, UnsupportedModel
from ..engine import TextProcessor
from ..engine.facade import NO_TEMPLATE
from ..model import DecoderSpec, model_name, model_path, open_tensors, projectors, read_head, read_spec, weights_text
from ..model.config_json import read_config
from ..model.encoder import BertSpec, EncoderSpec, is_encoder, read_encoder
from ..model.files import is_gguf
from ..model.gguf_config import unread_layers
from ..model.rope import short_context
from ..model.states import lay_out_states
from ..model.vision import read_vision
from ..model.weights.gguf import open_gguf
from ..model.weights.safetensors import SafetensorsCheckpoint
from ..tools.planning import kv_heads_text
from .flags import ModelFolder, read_settings
from .model_files import with_model_headers

Row = tuple[str, str]
PROBLEM = "problem"  # the name of a line
NEXT_TOKENS_PREFIX = "mtp."  # beginning of the names of a folder's tensors that predict further tokens
SHOWN_SIZES = (512, 512), (1920, 1080)  # width and height of images whose tokens are printed


def show(model: ModelFolder = None, /) -> None:
    """Print a table, with a line for each problem. Raises ModelNotFound, and UnsupportedModel if there is a problem.

    Only the headers are fetched of a model on a hub that is not in the cache.
    """
    with with_model_headers(read_settings(model)) as settings:
        path = model_path(settings.engine.model)
        rows = list(known(path))
    if not path.exists():
        rows[1] = ("path", "none: not downloaded")
    print("\n".join(f"{name:<12}{text}" for name, text in rows), flush=True)
    if any(name == PROBLEM for name, _ in rows):
        raise UnsupportedModel(f"{model or 'the model'} cannot be served; each line `{PROBLEM}` says why")


def known(path: Path) -> Iterator[Row]:
    """Yield the facts of the headers: family, types, tokenizer, chat template; then missing and unsupported parts."""
    yield "model", model_name(path)
    yield "path", str(path)
    problems: list[str] = []
    for part in (_shape, _types, _further_tokens, _text, _images):
        try:
            yield from part(path)
        except ModelError as error:
            problems.append(str(error))
    yield from (("images", f"{name} is not read; the model takes text only") for name in projectors(path))
    yield from ((PROBLEM, problem) for problem in dict.fromkeys(problems))


def _shape(path: Path) -> Iterator[Row]:
    if is_encoder(path):
        yield from _encoder(read_encoder(path))
        return
    spec = read_spec(path)
    yield "family", spec.family
    yield "shape", _sizes(spec)
    yield "context", f"{spec.max_position_embeddings:,} tokens"
    if (short := short_context(spec.ropes)) is not None:
        yield "LongRoPE", f"short factors up to --max-model-len {short}; beyond it long ones, for short requests too"
    if states := lay_out_states(spec).nbytes:
        yield "states", f"{states:,} B per sequence beside its KV pages"
    yield "in memory", f"{weights_text(spec, 'auto')} with --weights auto"


def _encoder(spec: EncoderSpec) -> Iterator[Row]:
    yield "family", spec.family
    yield "shape", _sizes(spec.body)
    rows = {"mean": "the mean of its rows", "first": "its first row", "last": "its last row"}[spec.pooling]
    if spec.num_labels > 1:
        yield "makes", f"probabilities of {spec.num_labels} labels of a text, from {rows}"
    elif spec.num_labels:
        yield "makes", f"1 score of a pair of texts, from {rows}"
    else:
        yield (
            "makes",
            f"a vector of {spec.dimensions} of a text, from {rows}{', of length 1' if spec.normalize else ''}",
        )
    yield from (("prompt", f"{name}: {prompt!r}") for name, prompt in spec.prompts.items() if prompt)
    yield "context", f"{spec.max_model_len:,} tokens"


def _sizes(spec: DecoderSpec | BertSpec) -> str:
    of_encoder = f"{spec.num_kv_heads} KV heads of {spec.head_dim}"
    heads = f"{spec.num_heads} query / {kv_heads_text(spec) if isinstance(spec, DecoderSpec) else of_encoder}"
    return f"{spec.num_layers} layers, hidden {spec.hidden_size}, {heads}, vocabulary {spec.vocab_size}"


def _types(path: Path) -> Iterator[Row]:
    sizes: dict[str, list[int]] = {}
    for kind, nbytes in open_tensors(path).sizes():
        sizes.setdefault(kind, []).append(nbytes)
    for kind, each in sizes.items():
        yield "stored", f"{kind}: {len(each):,} tensor{'s' if len(each) > 1 else ''}, {sum(each):,} B"


def _further_tokens(path: Path) -> Iterator[Row]:
    """Yield the number of tensors that predict further tokens, if there are any, and whether they can be read."""
    if is_gguf(path):
        file = open_gguf(path)
        names, beginnings = list(file.tensors), unread_layers(file)
    else:
        names, beginnings = list(SafetensorsCheckpoint(path).names()), (NEXT_TOKENS_PREFIX,)
    if count := sum(name.startswith(beginnings) for name in names):
        tensors = f"{count} {'tensor that predicts' if count == 1 else 'tensors that predict'} further tokens (MTP)"
        yield ("head", f"{tensors}, for --draft-model mtp") if _has_head(path) else ("not read", tensors)


def _has_head(path: Path) -> bool:
    """Return whether `--draft-model mtp` takes the model."""
    try:
        read_head(path)
    except ModelError:
        return False
    return True


def _text(path: Path) -> Iterator[Row]:
    text = TextProcessor.load(path)
    tokens = f"{text.tokenizer.vocab_size:,} tokens" if text.tokenizer else "none: prompts must be token ids"
    yield "tokenizer", tokens
    unusable = "" if text.chat_problem == NO_TEMPLATE else f"; {text.chat_problem}"
    yield "template", "yes" if text.chat_template else f"none: chats cannot be sent{unusable}"


def _images(path: Path) -> Iterator[Row]:
    """Yield whether the model has a supported vision tower, and the tokens of images."""
    if is_gguf(path) or is_encoder(path) or "vision_config" not in read_config(path):
        return
    spec = read_vision(path)
    if spec is None:
        yield "images", "its vision tower is not supported; the model takes text only"
        return
    body = spec.body
    yield "images", f"vision tower of {body.num_layers} layers, hidden {body.hidden_size}, {_image_tokens(path)}"


def _image_tokens(path: Path) -> str:
    from PIL import Image  # imported here, because other models need no Pillow

    from ..engine.images import read_image_processor

    processor = read_image_processor(path)
    tokens = {}
    for size in SHOWN_SIZES:
        image = processor.process(Image.new("RGB", size))
        tokens[size] = image.tokens * len(image.arrays)
    if len(set(tokens.values())) == 1:
        return f"{tokens[SHOWN_SIZES[0]]:,} tokens of an image"
    return ", ".join(f"{count:,} tokens of {width} x {height} pixels" for (width, height), count in tokens.items())
