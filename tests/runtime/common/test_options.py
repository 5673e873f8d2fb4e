"""Every option is defined once: flags, variables, keyword arguments and the reference page follow from the structs."""

from __future__ import annotations

import runpy
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from quire import LLM
from quire.runtime.common.config import MEMORY, SCHEDULING, EngineConfig, EngineOptions
from quire.runtime.common.options import options_of
from quire.runtime.common.server_config import HOST, LIMITS, MACHINES, SERVER, ServerConfig
from quire.runtime.common.settings import resolve_settings
from quire.runtime.common.types import SamplingParams

DOCS = Path(__file__).resolve().parents[3] / "docs"
STRUCTS = (EngineConfig, ServerConfig, SamplingParams)
OPTIONS = [(struct, option) for struct in STRUCTS for option in options_of(struct).values()]


@pytest.mark.parametrize(("struct", "option"), OPTIONS, ids=lambda value: getattr(value, "name", ""))
def test_every_option_has_a_group_and_a_sentence_of_help(struct: type[Any], option: Any) -> None:
    assert option.group in (MEMORY, SCHEDULING, SERVER, LIMITS, MACHINES, HOST, "Sampling")
    assert option.help.endswith(".")
    assert option.help[0].isupper()


def test_defaults_are_accepted_as_values() -> None:
    for struct in (EngineConfig, ServerConfig):
        for option in options_of(struct).values():
            if option.default is not None:
                assert option.convert(option.default, option.name) == option.default


def test_names_are_unique() -> None:
    names = [name for struct in (EngineConfig, ServerConfig) for each in options_of(struct).values()
             for name in (each.name, each.alias) if name]  # fmt: skip
    assert len(set(names)) == len(names)


def test_every_option_can_be_set_by_a_variable() -> None:
    values = {"max_kv_share_per_tenant": "0.5", "kv_cache_share": "0.25", "weights": "q8", "kv_cache_dtype": "f32",
              "scheduling_policy": "fair", "log_format": "json", "log_level": "debug", "metrics_compat": "vllm",
              "tenant_weights": "a=3", "max_frame_bytes": "64KiB", "page_size": "64", "tune": "full",
              "tool_call_parser": "hermes", "state_dtype": "bf16", "lora": "a=b",
              "default_sampling": "top_k=3"}  # fmt: skip
    for struct, part in ((EngineConfig, "engine"), (ServerConfig, "server")):
        for option in options_of(struct).values():
            text = values.get(
                option.name, "off" if option.default is True else "on" if option.default is False else "7"
            )
            settings = resolve_settings({}, {f"QUIRE_{option.name.upper()}": text})
            is_set = getattr(getattr(settings, part), option.name) != option.default
            assert is_set != option.is_of_machine, option.name  # the process that loads a model reads the others


def test_keyword_arguments_of_llm_are_the_options_of_an_engine() -> None:
    arguments = get_type_hints(EngineOptions)
    fields = get_type_hints(EngineConfig)
    aliases = {option.alias: option.name for option in options_of(EngineConfig).values() if option.alias}
    assert arguments.keys() == fields.keys() - {"model"} | aliases.keys()
    for name, kind in arguments.items():
        field = fields[aliases.get(name, name)]
        assert members(field) <= members(kind), name
        assert members(kind) - members(field) <= {str, "bfloat16", "float16", "float32"}, name


def members(kind: Any) -> set[Any]:
    """Return the members of a union; a literal counts as its values."""
    if get_origin(kind) in (Union, types.UnionType):
        return {member for each in get_args(kind) for member in members(each)}
    return set(get_args(kind)) if get_origin(kind) is Literal else {kind}


def test_an_unknown_keyword_argument_is_a_type_error() -> None:
    with pytest.raises(
        TypeError,
        match=r"no option 'max_seqs' \(did you mean 'max_num_seqs'\?\); the options are weights, .*max_num_seqs",
    ):
        LLM(max_seqs=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"no option 'dtype' \(did you mean 'weights'\?\)"):
        LLM(dtype="bf16")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no option 'xyzzy'; the options are"):
        LLM(xyzzy=1)  # type: ignore[call-arg]


def test_the_reference_page_is_up_to_date() -> None:
    make_options = runpy.run_path(str(DOCS / "make_options.py"))
    assert make_options["PAGE"].read_text("utf-8") == make_options["page"](), "run: python docs/make_options.py"
