"""Bodies of Ollama's API as calls. Fields and options that the API does not have are ignored, as Ollama does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...common.errors import InvalidRequest
from ...common.prompts import chat_tools, shown
from ...common.types import SamplingParams, StructuredOutputs, ToolChoice
from ...engine.facade import EmbedRequest, EngineInfo, GenerateRequest
from ..http.calls import Call, checked_messages
from ..http.errors import BadRequest
from ..http.fields import Fields
from ..http.logprobs import MAX_ALTERNATIVES
from .messages import chat_messages, image_parts

COMMON_FIELDS = frozenset({"model", "name", "options", "keep_alive"})
ANSWER_FIELDS = COMMON_FIELDS | {"stream", "format", "think", "logprobs", "top_logprobs", "truncate", "shift"}
CHAT_FIELDS = ANSWER_FIELDS | {"messages", "tools"}
GENERATE_FIELDS = ANSWER_FIELDS | {"prompt", "system", "images", "raw", "suffix", "template", "context"}
EMBED_FIELDS = COMMON_FIELDS | {"input", "prompt", "truncate", "dimensions"}
ALL_FIELDS = CHAT_FIELDS | GENERATE_FIELDS | EMBED_FIELDS
# Options of sampling, their names here, and their types.
OPTIONS: dict[str, tuple[str, type]] = {
    "temperature": ("temperature", float),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "top_k": ("top_k", int),
    "seed": ("seed", int),
    "repeat_penalty": ("repetition_penalty", float),
    "presence_penalty": ("presence_penalty", float),
    "frequency_penalty": ("frequency_penalty", float),
}
NEUTRAL_OPTIONS: dict[str, tuple[float, ...]] = {"typical_p": (1,), "tfs_z": (1,), "mirostat": (0,)}  # not supported
OLLAMA_SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}  # Ollama's, for models that recommend nothing
SEED_RANGE = 1 << 64  # a negative seed counts from the end
RANDOM_SEED = -1
THINK_LEVELS = ("low", "medium", "high")
DURATION = re.compile(r"-?(\d+(\.\d*)?(ns|us|µs|ms|s|m|h))+|-?\d+")
OPTION_NAMES = {name: f"options.{given}" for given, (name, _) in OPTIONS.items()}
OPTION_NAMES |= {"stop": "options.stop", "max_tokens": "options.num_predict", "structured_outputs": "format"}


def chat_call(fields: Fields, info: EngineInfo, tenant: str) -> Call:
    """Return the call of `/api/chat`. Raises InvalidRequest."""
    tools = fields.get("tools", list, [])
    try:
        offered = chat_tools(tools)
    except InvalidRequest as error:
        raise BadRequest(str(error), "tools") from None
    messages = checked_messages(chat_messages(fields.get("messages", list, [])), info)
    request = _chat_request(fields, info, tenant, messages, offered)
    return _call(fields, request)


def generate_call(fields: Fields, info: EngineInfo, tenant: str) -> Call:
    """Return the call of `/api/generate`: a chat of one message, unless `raw` is set. Raises InvalidRequest."""
    for name in ("suffix", "template", "context"):
        if fields.values.get(name):
            raise BadRequest(f"{name} is not supported here; leave it out", name)
    prompt = fields.get("prompt", str, "")
    system = fields.get("system", str, "")
    images = image_parts(fields.get("images", list, []), "images")
    if fields.get("raw", bool, False) or not info.has_chat_template:
        for name, given in (("system", system), ("images", images)):
            if given:
                raise BadRequest(f"{name} needs a chat template, and no raw: true", name)
        options = _options(fields, info)
        return _call(fields, GenerateRequest(prompt=prompt, tenant=tenant, **options))
    first = [{"role": "system", "content": system}] if system else []
    content = [*images, {"type": "text", "text": prompt}] if images else prompt
    messages = checked_messages([*first, {"role": "user", "content": content}], info)
    return _call(fields, _chat_request(fields, info, tenant, messages, ()))


def embed_request(fields: Fields, tenant: str, model: str) -> EmbedRequest:
    """Return the request of `/api/embed`. Raises BadRequest."""
    check_options(fields)
    given = fields.required("input")
    inputs = [given] if isinstance(given, str) else given
    if not isinstance(inputs, list) or not all(isinstance(each, str) for each in inputs):
        raise BadRequest(f"input must be text or a list of texts, not {shown(given)}", "input")
    return EmbedRequest(
        inputs=tuple(inputs),
        dimensions=fields.get("dimensions", int, 0) or None,
        truncate_prompt_tokens=-1 if fields.get("truncate", bool, True) else None,
        tenant=tenant,
        input_name="input" if isinstance(given, str) else "input[{}]",
        model=model,
    )


def check_options(fields: Fields) -> Mapping[str, Any]:
    """Return the options of a body, once `keep_alive` is checked. Raises BadRequest."""
    keep_alive = fields.values.get("keep_alive", 0)
    is_number = type(keep_alive) in (int, float)
    if not is_number and not (isinstance(keep_alive, str) and DURATION.fullmatch(keep_alive)):
        raise BadRequest(f"keep_alive must be a duration such as 5m, or seconds, not {shown(keep_alive)}", "keep_alive")
    return fields.get("options", dict, {})


def _chat_request(
    fields: Fields, info: EngineInfo, tenant: str, messages: dict[str, Any], tools: tuple[dict[str, Any], ...]
) -> GenerateRequest:
    options = _options(fields, info)
    return GenerateRequest(
        prompt=None,
        **messages,
        **options,
        tools=tools,
        tool_choice=ToolChoice(),
        template_variables=_template_variables(fields),
        tenant=tenant,
    )


def _call(fields: Fields, request: GenerateRequest) -> Call:
    return Call((request,), fields.get("stream", bool, True))


def _options(fields: Fields, info: EngineInfo) -> dict[str, Any]:
    """Return sampling parameters and the limit of the output, as fields of a request."""
    options = check_options(fields)
    sampling: dict[str, Any] = dict(info.default_sampling or OLLAMA_SAMPLING)
    for name, neutral in NEUTRAL_OPTIONS.items():
        if options.get(name) is not None and options[name] not in neutral:
            raise BadRequest(f"options.{name} is not supported here; leave it out", "options")
    for name, (own_name, kind) in OPTIONS.items():
        if options.get(name) is not None:
            sampling[own_name] = _number(f"options.{name}", options[name], kind)
    if (seed := sampling.pop("seed", RANDOM_SEED)) != RANDOM_SEED:
        sampling["seed"] = seed % SEED_RANGE
    if sampling.get("top_k") == 0:
        sampling["top_k"] = -1  # off
    if (stop := options.get("stop")) is not None:
        sampling["stop"] = (stop,) if isinstance(stop, str) else stop
    num_predict = options.get("num_predict")
    limit = 0 if num_predict is None else _number("options.num_predict", num_predict, int)
    sampling["max_tokens"] = min(limit, info.max_model_len) if limit > 0 else info.max_model_len
    sampling["structured_outputs"] = _structure(fields)
    if fields.get("logprobs", bool, False):
        sampling["logprobs"] = fields.get_between("top_logprobs", 0, MAX_ALTERNATIVES, 0)
    if fields.values.get("think") is False and info.has_reasoning:
        sampling["thinking_token_budget"] = 0
    return {"sampling_params": SamplingParams(**sampling), "fit_max_tokens": True}


def _number(name: str, value: object, kind: type) -> Any:
    allowed = (int, float) if kind is float else (int,)
    if type(value) not in allowed:
        raise BadRequest(
            f"{name} must be {'a number' if kind is float else 'an integer'}, not {shown(value)}", "options"
        )
    return value


def _structure(fields: Fields) -> StructuredOutputs | None:
    match fields.values.get("format", ""):
        case "":
            return None
        case "json":
            return StructuredOutputs(json_object=True)
        case dict(schema):
            return StructuredOutputs(json=schema)
        case other:
            raise BadRequest(f'format must be "json" or a JSON schema, not {shown(other)}', "format")


def _template_variables(fields: Fields) -> dict[str, Any]:
    match fields.values.get("think"):
        case None:
            return {}
        case bool(think):
            return {"enable_thinking": think}
        case str(level) if level in THINK_LEVELS:
            return {"enable_thinking": True, "reasoning_effort": level}
        case other:
            raise BadRequest(f"think must be true, false, {' or '.join(THINK_LEVELS)}, not {shown(other)}", "think")
