"""Checks of a request's fields: types, ranges and combinations.

Each check raises a typed error that names the parameter, its value and what is allowed. Checks depend only on the
request and on the engine's constant `EngineInfo`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ...kernels.sample import MAX_TOP_LOGPROBS
from ..common.errors import ContextLengthExceeded, InvalidRequest
from ..common.images import count_image_parts
from ..common.prompts import PromptImage, shown
from ..common.types import SamplingParams
from .facade import EmbedRequest, EncoderInfo, EngineInfo, GenerateRequest, ImageInfo

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_BIASED_TOKENS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000
MAX_PIN_MS = 24 * 3600 * 1000
MAX_PRIORITY = 1_000_000
MAX_SALT_CHARACTERS = 128
MAX_INPUTS = 1 << 14  # texts of one request to embed or score
MAX_CHOICES = 128  # samples or beams of one request; at most `max_num_seqs` anyway
MAX_BEAM_WIDTH = MAX_TOP_LOGPROBS // 2  # a beam search needs twice as many continuations
SEED_LIMIT = 1 << 64
MAX_BUDGET = (1 << 31) - 1  # tokens of reasoning
NEUTRAL_FOR_BEAMS: dict[str, object] = {
    "temperature": 0,
    "best_of": None,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": None,
    "stop": (),
    "thinking_token_budget": None,
}
NEUTRAL_FOR_GRAMMARS: dict[str, object] = {"min_tokens": 0, "ignore_eos": False}  # the grammar decides about the end
MAX_GRAMMAR_BYTES = 256 << 10
NO_TOKENIZER = "this model has no tokenizer.json; give the prompt as token ids"
SMALLEST = 1e-6  # least value of parameters that must be above 0: kernels compute in f32


def _integer(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):  # numpy's integers are allowed
        raise InvalidRequest(f"{name} must be a whole number, not {shown(value)}")
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, not {value}")


def _number(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # the comparison is also false for NaN
        raise InvalidRequest(f"{name} must be between {low} and {high}, not {value}")


Ranges = dict[str, tuple[Callable[[str, Any, Any, Any], None], float, float]]

# Parameters that a model may recommend, and their allowed values.
SAMPLING_RANGES: Ranges = {
    "temperature": (_number, 0, 100),
    "top_k": (_integer, -1, 2**31 - 1),
    "top_p": (_number, SMALLEST, 1),
    "min_p": (_number, 0, 1),
    "repetition_penalty": (_number, SMALLEST, 100),
}


class Validator:
    """Checks of requests to one engine. The methods raise InvalidRequest or ContextLengthExceeded."""

    def __init__(self, info: EngineInfo, max_prompt_characters: int) -> None:
        self._info = info
        self._max_prompt_characters = max_prompt_characters  # a longer text always has more than `max_model_len` tokens
        self._max_choices = min(MAX_CHOICES, info.max_num_seqs)
        self._choice_ranges: Ranges = {
            "n": (_integer, 1, self._max_choices),
            "beam_width": (_integer, 0, min(MAX_BEAM_WIDTH, self._max_choices)),
            "length_penalty": (_number, -10, 10),
        }

    def check_options(self, request: GenerateRequest) -> None:
        """Check everything except the prompt: the ranges of all parameters."""
        params = request.sampling_params
        least = 0 if request.echo else 1
        limit = self._info.max_model_len
        if isinstance(params.max_tokens, Integral) and params.max_tokens > limit:
            raise ContextLengthExceeded(f"max_tokens must be between {least} and {limit}, not {params.max_tokens}")
        _integer("max_tokens", params.max_tokens, least, limit)
        if request.echo and (params.beam_width or params.best_of is not None or params.structured_outputs is not None):
            raise InvalidRequest("echo cannot be used with best_of, beam_width or structured_outputs")
        _integer("min_tokens", params.min_tokens, 0, params.max_tokens)
        for name, (check, low, high) in SAMPLING_RANGES.items():
            check(name, getattr(params, name), low, high)
        _number("presence_penalty", params.presence_penalty, -2, 2)
        _number("frequency_penalty", params.frequency_penalty, -2, 2)
        if params.seed is not None:
            _integer("seed", params.seed, 0, SEED_LIMIT - 1)
        if params.logprobs is not None:
            _integer("logprobs", params.logprobs, 0, MAX_LOGPROBS)
        if params.thinking_token_budget is not None:
            _integer("thinking_token_budget", params.thinking_token_budget, 0, MAX_BUDGET)
            if not self._info.has_reasoning:
                raise InvalidRequest(
                    "thinking_token_budget: this model has no token that ends reasoning; leave the budget out"
                )
        self._check_bias(params)
        self._check_stops(params)
        for name, (check, low, high) in self._choice_ranges.items():
            check(name, getattr(params, name), low, high)
        if params.best_of is not None or params.beam_width:
            self._check_ranking(params)
        self._check_structure(params)
        _integer("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if request.deadline_ms is not None:
            _integer("deadline_ms", request.deadline_ms, 1, MAX_DEADLINE_MS)
        if request.pin_ms is not None:
            _integer("pin_ms", request.pin_ms, 0, MAX_PIN_MS)
            if request.cache_salt:  # a tenant's pins are limited per salt
                raise InvalidRequest("pin_ms cannot be used with cache_salt")
        self.check_lora(request.lora)
        if len(request.cache_salt) > MAX_SALT_CHARACTERS:
            raise InvalidRequest(f"cache_salt has more than {MAX_SALT_CHARACTERS} characters")

    def check_lora(self, name: str) -> None:
        """Check that an adapter of this name is loaded; an empty name is none."""
        if name and name not in self._info.adapters:
            names = ", ".join(self._info.adapters) or "none"
            raise InvalidRequest(f"lora {name[:80]!r} is no loaded adapter; the adapters are: {names}")

    def check_generated(self, request: GenerateRequest) -> None:
        """Check the outputs of a request that another server began, except their ends."""
        generated = request.generated or ()
        params = request.sampling_params
        if params.best_of is not None or params.beam_width:
            raise InvalidRequest(
                "generated cannot be used with best_of or beam_width, whose outputs come at the end: send the request "
                "again with its seed, and skip what was received"
            )
        if params.seed is None:
            raise InvalidRequest("generated needs the seed with which the outputs were begun: ACCEPTED has it")
        if len(generated) != params.n:
            raise InvalidRequest(
                f"generated must have one array per output, which are {params.n}, not {len(generated)}"
            )
        _integer("ended: the number of outputs", len(request.ended), 0, params.n)
        for output in request.ended:
            _integer("ended: an output", output, 0, params.n - 1)
        if len(set(request.ended)) == params.n:
            raise InvalidRequest("ended names all outputs: there is nothing to go on with")
        for index, token_ids in enumerate(generated):
            _integer(f"generated: the number of tokens of output {index}", len(token_ids), 0, params.max_tokens)
            for token in (min(token_ids, default=0), max(token_ids, default=0)):
                self._check_token("generated", token)

    def check_prompt(self, request: GenerateRequest) -> None:
        """Check the prompt before it is rendered or tokenized."""
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("give a prompt or messages, and not both")
        if request.echo and (request.images or request.image_files):
            raise InvalidRequest("echo cannot be used with images")
        if request.images and not isinstance(request.prompt, tuple):
            raise InvalidRequest("images need a prompt of token ids, which has their placeholders")
        if request.image_files and request.messages is None:
            raise InvalidRequest("images belong to messages; send them instead of a prompt")
        if isinstance(request.prompt, str):
            self.check_text(request.prompt)
        elif request.messages is not None:
            if not self._info.has_chat_template:
                raise InvalidRequest(self._info.chat_problem)
            if not self._info.has_tokenizer:
                raise InvalidRequest(NO_TOKENIZER)
            self._check_image_parts(request.messages, len(request.image_files))
        elif request.sampling_params.stop and not self._info.has_tokenizer:
            raise InvalidRequest("stop: strings cannot be found without a tokenizer.json; use stop_token_ids")

    def check_text(self, text: str) -> None:
        """Check a text before it is tokenized, so that a text that is far too long costs nothing."""
        if not self._info.has_tokenizer:
            raise InvalidRequest(NO_TOKENIZER)
        if not text:
            raise InvalidRequest("the prompt is empty; give at least one character or one token id")
        if len(text) > self._max_prompt_characters:
            raise ContextLengthExceeded(
                f"the prompt has {len(text)} characters; a prompt of {self._info.max_model_len} tokens, the limit of "
                f"this model, has at most {self._max_prompt_characters}"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest("the prompt is not valid Unicode: it contains a lone surrogate") from None

    def check_images(self, token_ids: Sequence[int], images: Sequence[PromptImage]) -> None:
        """Check a prompt's images against the model's limits, and their places in the prompt."""
        if images and self._info.images is None:
            raise InvalidRequest("this model takes no images; leave them out")
        if self._info.images is not None:
            check_images(token_ids, images, self._info.images)

    def check_token_ids(self, token_ids: Sequence[int], max_tokens: int = 0) -> None:
        """Check a prompt's ids, and that they and `max_tokens` generated tokens fit the model."""
        if not token_ids:
            raise InvalidRequest("the prompt is empty; give at least one character or one token id")
        limit = self._info.max_model_len
        if len(token_ids) + max_tokens > limit:
            raise ContextLengthExceeded(
                f"prompt of {len(token_ids)} tokens + max_tokens {max_tokens} exceed the limit of {limit} tokens"
            )
        for token in (min(token_ids), max(token_ids)):
            if not 0 <= token < self._info.vocab_size:
                raise self._outside("prompt", token)

    def check_vocabulary(self, token_ids: Sequence[int]) -> None:
        """Check the ids for `detokenize`."""
        if not self._info.has_tokenizer:
            raise InvalidRequest("this model has no tokenizer.json; token ids cannot become text")
        if token_ids:
            for token in (min(token_ids), max(token_ids)):
                self._check_token("tokens", token)

    def _check_image_parts(self, messages: Sequence[object], num_files: int) -> None:
        num_parts = count_image_parts(messages)
        if num_parts != num_files:
            raise InvalidRequest(f"messages: {num_parts} image parts, and {num_files} images; one each is needed")
        check_num_images(num_files, self._info)

    def _check_bias(self, params: SamplingParams) -> None:
        bias = params.logit_bias or {}
        if len(bias) > MAX_BIASED_TOKENS:
            raise InvalidRequest(f"logit_bias names {len(bias)} tokens; at most {MAX_BIASED_TOKENS} are allowed")
        for token, value in bias.items():
            self._check_token("logit_bias", token)
            _number(f"logit_bias of token {token}", value, -100, 100)

    def _check_stops(self, params: SamplingParams) -> None:
        if len(params.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop has {len(params.stop)} strings; at most {MAX_STOP_STRINGS} are allowed")
        for text in params.stop:
            if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise InvalidRequest(
                    f"stop: a string has {len(text)} characters; 1 to {MAX_STOP_CHARACTERS} are allowed"
                )
        if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids has {len(params.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed"
            )
        for token in params.stop_token_ids:
            self._check_token("stop_token_ids", token)

    def _check_ranking(self, params: SamplingParams) -> None:
        if params.best_of is not None:
            _integer("best_of", params.best_of, params.n, self._max_choices)
        if params.beam_width:
            _check_beam(params)

    def _check_structure(self, params: SamplingParams) -> None:
        """Check the parts that need no compiled grammar."""
        if params.structured_outputs is None:
            return
        if not self._info.has_tokenizer:
            raise InvalidRequest("structured_outputs need a tokenizer.json, which this model does not have")
        for name, neutral in NEUTRAL_FOR_GRAMMARS.items():
            value = getattr(params, name)
            if value != neutral:
                raise InvalidRequest(
                    f"{name} cannot be used with structured_outputs: leave it at {neutral!r}, not {value!r}"
                )
        try:
            num_bytes = len(msgspec.msgpack.encode(params.structured_outputs))
        except RecursionError:
            raise InvalidRequest("structured_outputs: the schema is nested too deeply") from None
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"structured_outputs: the grammar has {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are allowed"
            )

    def _check_token(self, name: str, token: int) -> None:
        if not 0 <= token < self._info.vocab_size:
            raise self._outside(name, token)

    def _outside(self, name: str, token: int) -> InvalidRequest:
        return InvalidRequest(f"{name}: token id {token} is outside the vocabulary 0..{self._info.vocab_size - 1}")


def check_images(token_ids: Sequence[int], images: Sequence[PromptImage], info: ImageInfo) -> None:
    """Check a prompt's images against a tower's limits, and their places in the prompt. Raises InvalidRequest."""
    end = 0
    for index, image in enumerate(images):
        num_tokens = _check_pixels(f"images[{index}]", image.pixels, info)
        if image.tokens != num_tokens:
            raise InvalidRequest(f"images[{index}]: tokens must be {num_tokens}, not {image.tokens}")
        if not end <= image.position <= len(token_ids) - image.tokens:
            raise InvalidRequest(
                f"images[{index}]: position must be from {end} to {len(token_ids) - image.tokens}, after the image "
                f"before it and within the prompt, not {image.position}"
            )
        end = image.position + image.tokens
        if any(token != info.token_id for token in token_ids[image.position : end]):
            raise InvalidRequest(
                f"images[{index}]: the prompt must have the token {info.token_id} from position {image.position} "
                f"to {end - 1}"
            )


def _check_pixels(where: str, pixels: npt.NDArray[np.uint8], info: ImageInfo) -> int:
    """Return the number of tokens of an image. Raises InvalidRequest for pixels that the tower does not take."""
    shape = pixels.shape
    block = info.block
    if not block:
        allowed = f"[{info.size}, {info.size}, 3]"
        num_tokens = info.num_tokens
        fits = shape == (info.size, info.size, 3)
    else:
        allowed = f"[height, width, 3] in multiples of {block}, of at most {info.num_tokens} tokens"
        num_tokens = 0
        fits = len(shape) == 3 and shape[2] == 3 and not shape[0] % block and not shape[1] % block
        if fits:
            num_tokens = shape[0] // block * (shape[1] // block)
            fits = 1 <= num_tokens <= info.num_tokens
    if not fits or pixels.dtype != np.uint8:
        raise InvalidRequest(f"{where}: pixels must be uint8 {allowed}, not {pixels.dtype} {list(shape)}")
    return num_tokens


def check_num_images(num_images: int, info: EngineInfo) -> None:
    """Check the number of images in one request. Raises InvalidRequest."""
    if num_images and not info.max_images:
        raise InvalidRequest("messages: this model takes no images; send text parts only")
    if num_images > info.max_images:
        raise InvalidRequest(f"messages: {num_images} images; at most {info.max_images} (`max_images_per_request`)")


def check_embed_options(request: EmbedRequest, info: EncoderInfo) -> None:
    """Check a request to embed or score, except the lengths of its texts in tokens. Raises InvalidRequest."""
    is_score = request.query is not None
    if is_score and info.num_labels > 1:
        raise InvalidRequest(f"this model has {info.num_labels} labels; scores need a model with one, or with vectors")
    if request.classify and not info.labels:
        raise InvalidRequest("this model has no labels; a classifier has")
    if not is_score and not request.classify and info.num_labels:
        raise InvalidRequest("this model scores pairs of texts; it makes no embeddings")
    if not 1 <= len(request.inputs) <= MAX_INPUTS:
        name = request.input_name.removesuffix("[{}]")
        raise InvalidRequest(f"{name} has {len(request.inputs)} entries; 1 to {MAX_INPUTS} are allowed")
    for index, each in enumerate(request.inputs):
        _check_input(request.input_name.format(index), each, info, takes_ids=not is_score)
    if request.query is not None:
        _check_input(request.query_name, request.query, info, takes_ids=False)
        if request.dimensions is not None or request.prompt_name is not None:
            raise InvalidRequest("dimensions and prompt_name are for embeddings; leave them out of a request to score")
    if request.dimensions is not None:
        _check_dimensions(request.dimensions, info)
    prompt_name = request.prompt_name
    if prompt_name is not None and not (isinstance(prompt_name, str) and prompt_name in info.prompts):
        names = ", ".join(sorted(info.prompts)) or "none"
        raise InvalidRequest(f"prompt_name {shown(prompt_name)} is not one of this model's prompts: {names}")
    truncation = request.truncate_prompt_tokens
    if truncation is not None and truncation != -1:
        if truncation == 0:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be -1, for as many as fit, or 1 to {info.max_model_len}, not 0"
            )
        _integer("truncate_prompt_tokens", truncation, 1, info.max_model_len)
    _integer("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if request.deadline_ms is not None:
        _integer("deadline_ms", request.deadline_ms, 1, MAX_DEADLINE_MS)


def _check_input(name: str, value: str | tuple[int, ...], info: EncoderInfo, *, takes_ids: bool) -> None:
    if not value:
        raise InvalidRequest(f"{name} is empty; give at least one character or one token id")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(f"{name} is not valid Unicode: it contains a lone surrogate") from None
    elif not takes_ids:
        raise InvalidRequest(f"{name} must be text, not token ids: the model's own form of a pair is around it")
    elif not 0 <= min(value) <= max(value) < info.vocab_size:
        outside = min(value) if min(value) < 0 else max(value)
        raise InvalidRequest(f"{name}: the token id {outside} is outside the vocabulary 0..{info.vocab_size - 1}")


def _check_dimensions(dimensions: int, info: EncoderInfo) -> None:
    _integer("dimensions", dimensions, 1, info.dimensions)
    if info.matryoshka and dimensions not in (*info.matryoshka, info.dimensions):
        allowed = ", ".join(map(str, sorted({*info.matryoshka, info.dimensions})))
        raise InvalidRequest(f"dimensions must be one of {allowed}, not {dimensions}")


def _check_beam(params: SamplingParams) -> None:
    """Refuse parameters that change the model's probabilities or sample from them: beam search does neither."""
    if params.n > params.beam_width:
        raise InvalidRequest(f"n must be at most beam_width {params.beam_width}, not {params.n}")
    if params.logprobs:
        raise InvalidRequest(f"logprobs must be None or 0 with beam_width, not {params.logprobs}")
    for name, neutral in NEUTRAL_FOR_BEAMS.items():
        value = getattr(params, name)
        if value != neutral:
            raise InvalidRequest(f"{name} cannot be used with beam_width: leave it at {neutral!r}, not {value!r}")
