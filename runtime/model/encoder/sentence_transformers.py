"""The files of a sentence-transformers folder: the modules after the transformer, and prompts.

`modules.json` lists the modules, each with a config.json in a folder of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from os.path import isfile
from pathlib import Path
from typing import Any

from ...common.errors import CorruptCheckpoint, UnsupportedModel
from ..config_json import CONFIG_FILE, MAX_VOCAB, MAX_WIDTH, ConfigTable
from .family import read_named
from .spec import Activation, Pooling, Projection, ScoreActivation

MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
MAX_MODULE_FILE_BYTES = 1 << 24
MAX_MODULES = 16
MAX_NAMED_PROMPTS = 256
MAX_PROMPT_CHARACTERS = 1 << 16

POOLINGS: dict[str, Pooling] = {"mean": "mean", "cls": "first", "lasttoken": "last"}
OLD_POOLINGS = {  # flag -> name of the mode
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
TORCH_ACTIVATIONS: dict[str, Activation] = {
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.linear.Identity": "none",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
}
SCORE_ACTIVATIONS: dict[str, ScoreActivation] = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.Identity": "identity",
    "torch.nn.Sigmoid": "sigmoid",
}


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """The tokens whose logits score a pair: the logit of `true`, less the logit of `false` if there is one."""

    true: int
    false: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Modules:
    """The modules after the transformer. A projection's tensors have its folder's prefix, as in `files`."""

    is_declared: bool = False  # True: there is a modules.json
    pooling: Pooling | None = None  # None: no module pools
    projections: tuple[Projection, ...] = ()
    normalize: bool = False
    scores: bool = False  # the last projection's columns are scores
    answer: AnswerTokens | None = None
    files: Mapping[str, str] = field(default_factory=dict)


def has_modules(folder: Path) -> bool:
    """Return whether a folder is one of sentence-transformers."""
    return isfile(folder / MODULES_FILE)


def read_modules(folder: Path, hidden_size: int) -> Modules:
    """Read modules.json and the files that it names, for a transformer of `hidden_size`.

    Raises UnsupportedModel or CorruptCheckpoint, naming file and key.
    """
    pooling = None
    normalize = scores = False
    answer = None
    projections: list[Projection] = []
    files: dict[str, str] = {}
    width = hidden_size
    for index, (kind, path) in enumerate(_listed(folder)):
        where = f"{path}/{CONFIG_FILE}"
        previous = "Normalize" if normalize else "Dense" if projections else "Pooling" if pooling else "Transformer"
        if kind == "Transformer" and index == 0 and path == "":
            continue
        config = read_table(folder, where) or ConfigTable({}, source=where)
        if kind == "Pooling" and index == 1:
            pooling = _pooling(config, hidden_size)
        elif kind == "LogitScore" and index == 1:
            answer = _answer(config)
        elif kind == "Dense" and pooling is not None and not normalize and not scores:
            projections.append(_dense(config, path, width))
            files[path] = f"{path}."
            width = projections[-1].out_features
            scores = config.text("module_output_name", "sentence_embedding") == "scores"
        elif kind == "Normalize" and pooling is not None and not scores:
            normalize = True
        elif kind != "Dropout" or pooling is None:
            place = f"after {previous}" if index else "first"
            raise UnsupportedModel(
                f"{MODULES_FILE}: module {index} is {kind:.80} {place}; it must be Transformer first, in the folder "
                "itself, then Pooling, then any Dense and Normalize, or LogitScore"
            )
    return Modules(
        is_declared=True,
        pooling=pooling,
        projections=tuple(projections),
        normalize=normalize,
        scores=scores,
        answer=answer,
        files=files,
    )


def _listed(folder: Path) -> list[tuple[str, str]]:
    """Return the class and the folder of each module."""
    modules = _load(folder / MODULES_FILE)
    if not isinstance(modules, list) or not 1 <= len(modules) <= MAX_MODULES:
        raise UnsupportedModel(f"{MODULES_FILE} must be a list of 1 to {MAX_MODULES} modules")
    found = []
    for index, module in enumerate(modules):
        table = ConfigTable(module if isinstance(module, dict) else {}, f"[{index}].", MODULES_FILE)
        path = table.text("path")
        if path != Path(path).name and path != "":
            raise table.refused("path", "the name of a folder in the model's folder")
        found.append((table.text("type").rpartition(".")[2], path))
    return found


def _pooling(config: ConfigTable, hidden_size: int) -> Pooling:
    key = "word_embedding_dimension" if "word_embedding_dimension" in config else "embedding_dimension"
    config.integer(key, hidden_size, hidden_size, hidden_size)
    if not config.flag("include_prompt", True):
        raise config.refused("include_prompt", "true: tokens of a prompt take part in pooling")
    if "pooling_mode" in config:
        return read_named(config, "pooling_mode", POOLINGS)
    chosen = [key for key in OLD_POOLINGS if config.flag(key, False)] or ["pooling_mode_mean_tokens"]
    if len(chosen) > 1 or OLD_POOLINGS[chosen[-1]] not in POOLINGS:
        allowed = [key for key, mode in OLD_POOLINGS.items() if mode in POOLINGS]
        raise config.refused(chosen[-1], f"false, and one of {', '.join(allowed)} true")
    return POOLINGS[OLD_POOLINGS[chosen[0]]]


def _dense(config: ConfigTable, path: str, width: int) -> Projection:
    if config.text("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise config.refused("module_input_name", '"sentence_embedding" or absent')
    if config.text("module_output_name", "sentence_embedding") not in ("sentence_embedding", "scores"):
        raise config.refused("module_output_name", '"sentence_embedding", "scores" or absent')
    if config.flag("use_residual", False):
        raise config.refused("use_residual", "false or absent")
    return Projection(
        tensor=f"{path}.linear",
        in_features=config.integer("in_features", width, width),
        out_features=config.integer("out_features", 1, MAX_WIDTH),
        bias=config.flag("bias", True),
        activation=read_named(config, "activation_function", TORCH_ACTIVATIONS, "torch.nn.modules.activation.Tanh"),
    )


def _answer(config: ConfigTable) -> AnswerTokens:
    if config.text("module_input_name", "causal_logits") != "causal_logits":
        raise config.refused("module_input_name", '"causal_logits" or absent')
    false = config.integer("false_token_id", 0, MAX_VOCAB) if "false_token_id" in config else None
    return AnswerTokens(config.integer("true_token_id", 0, MAX_VOCAB), false)


def read_prompts(folder: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the default one."""
    config = read_table(folder, PROMPTS_FILE)
    if config is None:
        return {}, None
    if config.values.get("truncate_dim") is not None:
        raise config.refused("truncate_dim", "null or absent; requests ask for `dimensions`")
    given = config.table("prompts")
    if len(given.values) > MAX_NAMED_PROMPTS:
        raise UnsupportedModel(f"{PROMPTS_FILE}: prompts has {len(given.values)} entries; at most {MAX_NAMED_PROMPTS}")
    prompts = {name: given.text(name, "") for name in given.values}
    if any(len(prompt) > MAX_PROMPT_CHARACTERS for prompt in prompts.values()):
        raise UnsupportedModel(f"{PROMPTS_FILE}: a prompt has more than {MAX_PROMPT_CHARACTERS} characters")
    default = config.text("default_prompt_name") if "default_prompt_name" in config else None
    if default is not None and default not in prompts:
        raise config.refused("default_prompt_name", f"one of {', '.join(prompts) or 'the prompts'}")
    return prompts, default


def read_score_activation(folder: Path, config: ConfigTable, labels: int) -> ScoreActivation:
    """Return the function from the values of `labels` to scores: the declared one, or a sigmoid for a single label."""
    settings = read_table(folder, PROMPTS_FILE) or ConfigTable({}, source=PROMPTS_FILE)
    for table, key in (
        (settings, "activation_fn"),
        (config.table("sentence_transformers"), "activation_fn"),
        (config, "sbert_ce_default_activation_function"),
    ):
        if key in table:
            return read_named(table, key, SCORE_ACTIVATIONS)
    return "sigmoid" if labels == 1 else "identity"


def read_table(folder: Path, name: str) -> ConfigTable | None:
    """Return the object in a JSON file; None if there is no such file."""
    if not isfile(folder / name):
        return None
    values = _load(folder / name)
    if not isinstance(values, dict):
        raise CorruptCheckpoint(f"{folder / name} holds a JSON {type(values).__name__}, not an object")
    return ConfigTable(values, source=name)


def _load(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_MODULE_FILE_BYTES + 1)
        if len(data) > MAX_MODULE_FILE_BYTES:
            raise CorruptCheckpoint(f"{path} has more than {MAX_MODULE_FILE_BYTES:,} bytes")
        return json.loads(data)
    except (ValueError, OSError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} cannot be read as JSON: {error}") from error
