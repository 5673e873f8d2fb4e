"""The settings of sentence-transformers' first module: the making of token ids, and the transformer's result.

Keys that cannot change a result are skipped; every other key is honored, or refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..config_json import MAX_POSITIONS, ConfigTable
from .family import read_named
from .sentence_transformers import has_modules, read_table
from .spec import MessageFormat

TRANSFORMER_FILES = tuple(  # the name depends on the version that wrote it
    f"sentence_{name}_config.json" for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta")
)
Task = Literal["feature-extraction", "sequence-classification", "text-generation"]
TASK_OUTPUTS: Mapping[Task, tuple[str, str]] = {  # task -> result of the transformer, and its name in the module
    "feature-extraction": ("last_hidden_state", "token_embeddings"),
    "sequence-classification": ("logits", "scores"),
    "text-generation": ("logits", "causal_logits"),
}
MESSAGE_FORMATS: dict[str, MessageFormat] = {"auto": "auto", "flat": "flat", "structured": "structured"}
NOT_VARIABLES = (  # arguments of transformers' apply_chat_template
    "chat_template", "continue_final_message", "documents", "max_length", "messages", "padding", "return_dict",
    "return_assistant_tokens_mask", "return_tensors", "sanitize_control_tokens", "tokenize", "tokenizer_kwargs",
    "tools", "truncation",
)  # fmt: skip

Allowed = Mapping[str, Callable[[Any], bool]]  # key -> whether a value changes no result


def _anything(value: Any) -> bool:
    return True


def _is_null(value: Any) -> bool:
    return value is None


HUB: Allowed = dict.fromkeys(("cache_dir", "local_files_only", "token", "trust_remote_code"), _anything)
MODEL_KEYS: Allowed = {
    **HUB,
    **dict.fromkeys(
        ("add_pooling_layer", "attn_implementation", "device_map", "dtype", "low_cpu_mem_usage", "torch_dtype"),
        _anything,
    ),
    "use_safetensors": _anything,
}
CONFIG_KEYS: Allowed = {
    **HUB,
    **dict.fromkeys(("dtype", "output_attentions", "output_hidden_states", "torch_dtype", "use_cache"), _anything),
}
TOKENIZER_KEYS: Allowed = {
    **HUB,
    "model_max_length": _anything,  # read below
    "padding_side": _anything,
    "truncation_side": lambda value: value == "right",
    "use_fast": _anything,
}
TEXT_KEYS: Allowed = {
    "add_special_tokens": lambda value: value is True,
    "logits_to_keep": lambda value: value == 1,
    "max_length": _anything,  # read below
    "pad_to_multiple_of": _anything,
    "padding": _anything,
    "truncation": lambda value: value in (True, False, "longest_first"),
}
READ_KEYS: Allowed = {
    **dict.fromkeys(("max_seq_length", "do_lower_case", "modality_config", "module_output_name"), _anything),
    **dict.fromkeys(("config_args", "config_kwargs", "model_args", "model_kwargs"), _anything),
    **dict.fromkeys(("processing_kwargs", "processor_kwargs", "tokenizer_args", "transformer_task"), _anything),
    "backend": _anything,
    "unpad_inputs": _anything,
    "document_length": _is_null,
    "query_expansion": _is_null,
    "query_length": _is_null,
    "tokenizer_name_or_path": _is_null,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSettings:
    """The preparation of texts for the transformer; fields mean the same as in `EncoderSpec`."""

    max_length: int | None = None  # tokens; None: as many as the transformer has positions for
    lower_case: bool = False
    messages: MessageFormat | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)


def read_transformer_settings(folder: Path, task: Task) -> TransformerSettings:
    """Read the settings of a folder whose transformer has a task.

    Without modules.json there are none, as in sentence-transformers. Raises UnsupportedModel or CorruptCheckpoint.
    """
    if not has_modules(folder):
        return TransformerSettings(max_length=_tokenizer_limit(folder), messages="auto")
    configs = ((name, read_table(folder, name)) for name in TRANSFORMER_FILES)
    found = next(((name, config) for name, config in configs if config is not None), None)
    config = found[1] if found else ConfigTable({}, source=TRANSFORMER_FILES[0])
    _check(config, READ_KEYS)
    if config.text("transformer_task", task) != task:
        raise config.refused("transformer_task", f'"{task}" for this architecture with these modules')
    for keys, allowed in (
        (("config_args", "config_kwargs"), CONFIG_KEYS),
        (("model_args", "model_kwargs"), MODEL_KEYS),
        (("tokenizer_args", "processor_kwargs"), TOKENIZER_KEYS),
    ):
        for key in keys:
            _check(config.table(key), allowed)
    processing = config.table("processing_kwargs")
    _check(processing.table("common"), {})
    _check(processing.table("text"), TEXT_KEYS)
    messages = _messages(config, task)
    return TransformerSettings(
        max_length=_max_length(folder, config),
        lower_case=config.flag("do_lower_case", False),
        messages=messages,
        template_variables={} if messages is None else _variables(processing.table("chat_template")),
    )


def _check(config: ConfigTable, allowed: Allowed) -> None:
    """Refuse keys and values that are not allowed."""
    for key, value in config.values.items():
        if key not in allowed:
            raise config.refused(key, "absent: it is not supported")
        if value is not None and not allowed[key](value):
            raise config.refused(key, "absent: this value is not supported")


def _max_length(folder: Path, config: ConfigTable) -> int | None:
    """Return the tokens to which sentence-transformers truncates texts."""
    for table, key in (
        (config.table("processing_kwargs").table("text"), "max_length"),
        (config.table("processor_kwargs"), "model_max_length"),
        (config.table("tokenizer_args"), "model_max_length"),
        (config, "max_seq_length"),
    ):
        if key in table:
            return table.integer(key, 1, MAX_POSITIONS)
    return _tokenizer_limit(folder)


def _tokenizer_limit(folder: Path) -> int | None:
    tokenizer = read_table(folder, "tokenizer_config.json") or ConfigTable({})
    limit = tokenizer.values.get("model_max_length")
    known = isinstance(limit, int) and not isinstance(limit, bool) and 1 <= limit <= MAX_POSITIONS
    return limit if known else None


def _messages(config: ConfigTable, task: Task) -> MessageFormat | None:
    """Return the form of the messages that the chat template receives; None if texts do not become messages."""
    output, name = TASK_OUTPUTS[task]
    if config.text("module_output_name", name) != name:
        raise config.refused("module_output_name", f'"{name}" or absent')
    modalities = config.table("modality_config")
    if not {"transformer_task", "modality_config"} & config.values.keys() and task != "feature-extraction":
        return "auto"  # sentence-transformers does not load such a folder
    if "modality_config" in config and not {"text", "message"} & modalities.values.keys():
        raise config.refused("modality_config", 'an object with "text" or "message"')
    for modality in sorted({"text", "message"} & modalities.values.keys()):
        entry = modalities.table(modality)
        if entry.text("method") != "forward":
            raise entry.refused("method", '"forward"')
        if entry.values.get("method_output_name") not in (output, [output]):
            raise entry.refused("method_output_name", f'"{output}"')
    if "message" not in modalities:
        return None
    if task == "feature-extraction":
        raise modalities.refused("message", "absent: texts of a model with vectors are not made chats")
    return read_named(modalities.table("message"), "format", MESSAGE_FORMATS, "auto")


def _variables(config: ConfigTable) -> Mapping[str, Any]:
    for key in NOT_VARIABLES:
        if key in config:
            raise config.refused(key, "absent: only variables of the template are supported")
    config.flag("add_generation_prompt", False)
    if not config.flag("restore_suffix", True):
        raise config.refused("restore_suffix", "true or absent")
    return {key: value for key, value in config.values.items() if key != "restore_suffix"}
