"""Reading an encoder's folder: the meaning of transformers' and sentence-transformers' files, and refusals."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quire.runtime.common.errors import CorruptCheckpoint, MissingTensor, UnsupportedModel, WrongTensor
from quire.runtime.model.config_json import ConfigTable
from quire.runtime.model.encoder import BertSpec, is_encoder, pack_encoder, read_encoder
from quire.runtime.model.encoder.modernbert import read_modernbert
from quire.runtime.model.encoder.nomic_bert import read_nomic_bert
from quire.runtime.model.encoder.sentence_transformers import read_score_activation
from quire.runtime.model.spec import DecoderSpec, LinearScaling, Rope
from safetensors.numpy import save_file

from .conftest import FOLDER, NAMES

Copy = Callable[..., Path]


def bert_of(folder: Path) -> BertSpec:
    body = read_encoder(folder).body
    assert isinstance(body, BertSpec)
    return body


def edited(**values: Any) -> Callable[[Any], object]:
    return lambda content: content.update(values)


def two_poolings(config: Any) -> None:
    config.clear()
    config.update(word_embedding_dimension=40, pooling_mode_cls_token=True, pooling_mode_mean_tokens=True)


def test_all_goldens_are_encoders_and_decoders_are_not() -> None:
    assert all(is_encoder(FOLDER / name) for name in NAMES)
    assert not is_encoder(FOLDER.parent / "qwen3")


def test_the_labels_of_classifiers(encoder_folder: Copy) -> None:
    assert read_encoder(FOLDER / "bert").labels == ()
    assert read_encoder(FOLDER / "modernbert_scores").labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    folder = encoder_folder(
        "distilbert_scores",
        edited(id2label={"1": "good", "0": "bad"}, num_labels=2, problem_type="multi_label_classification"),
    )
    spec = read_encoder(folder)
    assert (spec.labels, spec.is_multi_label) == (("bad", "good"), True)
    (folder / "config.json").write_text((folder / "config.json").read_text().replace('"good"', "[1]"))
    with pytest.raises(UnsupportedModel, match=r"id2label\.1 is \[1\]; it must be"):
        read_encoder(folder)


def test_an_unknown_classifier_is_refused_as_an_encoder(encoder_folder: Copy) -> None:
    assert is_encoder(encoder_folder("bert_scores", edited(architectures=["DebertaV2ForSequenceClassification"])))


@pytest.mark.parametrize(("name", "family"), [("bert", "Bert"), ("modernbert", "ModernBert"), ("mpnet", "MPNet")])
def test_the_body_of_a_masked_language_model_makes_vectors(encoder_folder: Copy, name: str, family: str) -> None:
    folder = encoder_folder(name, edited(architectures=[f"{family}ForMaskedLM"]))
    assert bert_of(folder) == bert_of(FOLDER / name)


def test_what_a_folder_of_sentence_transformers_means() -> None:
    spec = read_encoder(FOLDER / "bert_dense")
    assert (spec.pooling, spec.normalize, spec.dimensions, spec.hidden_size) == ("first", True, 24, 40)
    assert (spec.num_labels, spec.max_model_len) == (0, 256)
    assert spec.prompts == {"query": "find: ", "document": ""}
    assert read_encoder(FOLDER / "bert").max_model_len == 190  # limit in sentence_bert_config.json
    assert read_encoder(FOLDER / "qwen3").pooling == "last"


def test_dimensions_that_a_model_was_trained_for_are_in_order_and_each_once(encoder_folder: Copy) -> None:
    assert read_encoder(FOLDER / "bert").matryoshka == ()
    folder = encoder_folder("bert", edited(matryoshka_dimensions=[40, 8, 16, 8]))
    assert read_encoder(folder).matryoshka == (8, 16, 40)


def test_texts_are_never_longer_than_the_positions(encoder_folder: Copy) -> None:
    folder = encoder_folder("bert", edited(max_seq_length=201), "sentence_bert_config.json")
    assert read_encoder(folder).max_model_len == 200  # positions of config.json


@pytest.mark.parametrize("limit", [-1, 0, 10**30, True, "40", None], ids=str)
def test_a_tokenizer_without_a_usable_limit_allows_texts_as_long_as_the_positions(
    encoder_folder: Copy, limit: Any
) -> None:
    folder = encoder_folder("bert", edited(model_max_length=limit), "tokenizer_config.json")
    assert read_encoder(folder).max_model_len == 200


def test_heads_for_scores() -> None:
    found = {name: read_encoder(FOLDER / name) for name in NAMES if name.endswith(("scores", "answer"))}
    assert {name: (spec.num_labels, spec.score_activation) for name, spec in found.items()} == {
        "bert_scores": (1, "identity"),
        "distilbert_scores": (2, "identity"),
        "gte_scores": (3, "identity"),
        "modernbert_scores": (3, "identity"),
        "qwen3_answer": (1, "sigmoid"),
        "qwen3_scores": (2, "identity"),
        "xlm_roberta_scores": (1, "sigmoid"),
    }


@pytest.mark.parametrize(("name", "token"), [("gemma3", 0), ("phi3", 32_000), ("smollm3", 128_004), ("qwen3", None)])
def test_a_decoder_that_classifies_pads_with_the_token_that_transformers_assumes(
    decoder_with_modules: Callable[[str], Path], name: str, token: int | None
) -> None:
    folder = decoder_with_modules(name)
    (folder / "modules.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    family = config["architectures"][0].removesuffix("ForCausalLM").removesuffix("ForConditionalGeneration")
    config = {**config, "architectures": [f"{family}ForSequenceClassification"]}
    for own, expected in ({}, token), ({"pad_token_id": 7}, 7), ({"pad_token_id": None}, None):
        rest = {key: value for key, value in config.items() if key != "pad_token_id"}
        (folder / "config.json").write_text(json.dumps({**rest, **own}))
        assert read_encoder(folder).pad_token_id == expected


def test_one_label_is_a_probability_unless_a_file_says_otherwise(tmp_path: Path) -> None:
    assert [read_score_activation(tmp_path, ConfigTable({}), labels) for labels in (1, 2)] == ["sigmoid", "identity"]


def test_newer_files_say_first_what_makes_a_score(tmp_path: Path) -> None:
    """Each of these has precedence over those before it."""
    own: dict[str, Any] = {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}
    assert read_score_activation(tmp_path, ConfigTable(own), 2) == "sigmoid"
    own["sentence_transformers"] = {"activation_fn": "torch.nn.modules.linear.Identity"}
    assert read_score_activation(tmp_path, ConfigTable(own), 1) == "identity"
    settings = {"activation_fn": "torch.nn.modules.activation.Sigmoid"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    assert read_score_activation(tmp_path, ConfigTable(own), 2) == "sigmoid"


def test_a_projection_reads_what_the_one_before_it_makes(encoder_folder: Copy) -> None:
    def add_module(modules: Any) -> None:
        modules.insert(3, modules[2] | {"path": "4_Dense"})

    folder = encoder_folder("bert_dense", add_module, "modules.json")
    (folder / "4_Dense").mkdir()
    (folder / "4_Dense" / "config.json").write_text('{"in_features": 24, "out_features": 7}')
    assert read_encoder(folder).dimensions == 7
    last = read_encoder(folder).projections[-1]
    assert (last.bias, last.activation) == (True, "tanh")  # the defaults


def test_positions_of_roberta_begin_after_that_of_padding(encoder_folder: Copy) -> None:
    body = bert_of(encoder_folder("roberta"))
    assert (body.first_position, body.max_position_embeddings, body.num_positions) == (2, 256, 258)


def test_what_config_json_need_not_say(encoder_folder: Copy) -> None:
    """The defaults are those of transformers, or of the model's own code."""

    def without(*keys: str) -> Callable[[Any], object]:
        return lambda config: [config.pop(key) for key in keys]

    assert bert_of(encoder_folder("roberta", without("pad_token_id"))).first_position == 2
    nomic = encoder_folder("nomic_bert", without("rope_parameters"))
    assert [rope and rope.theta for rope in bert_of(nomic).ropes] == [1000.0] * 2
    assert read_encoder(encoder_folder("modernbert_scores", without("classifier_pooling"))).pooling == "first"
    answer = read_encoder(encoder_folder("qwen3_answer", without("tie_word_embeddings"))).answer
    assert answer is not None
    assert answer.matrix == "lm_head.weight"


def test_a_family_whose_head_is_its_embedding_answers_by_that(encoder_folder: Copy) -> None:
    folder = encoder_folder("gemma3", lambda config: config.pop("tie_word_embeddings", None))
    modules = [{"path": "", "type": "Transformer"}, {"path": "1_LogitScore", "type": "LogitScore"}]
    (folder / "modules.json").write_text(json.dumps(modules), "utf-8")
    (folder / "sentence_bert_config.json").unlink(missing_ok=True)
    (folder / "1_LogitScore").mkdir(exist_ok=True)
    (folder / "1_LogitScore" / "config.json").write_text('{"true_token_id": 60}')
    answer = read_encoder(folder).answer
    assert answer is not None
    assert answer.matrix.endswith("embed_tokens.weight")


def test_half_of_embedding_gemmas_window_is_on_each_side() -> None:
    spec = read_encoder(FOLDER / "gemma3")
    assert isinstance(spec.body, DecoderSpec)
    assert (spec.causal, spec.body.windows) == (False, (6, 0))  # window of 12
    assert read_encoder(FOLDER / "qwen3").causal


@pytest.mark.parametrize("other", ["layers", "version 4"])
def test_layers_of_modernbert(encoder_folder: Copy, other: str) -> None:
    def edit(config: Any) -> None:
        if other == "version 4":
            del config["layer_types"], config["rope_parameters"]
            config.update(global_attn_every_n_layers=3, global_rope_theta=160_000.0, local_rope_theta=None)

    body = bert_of(encoder_folder("modernbert", edit))
    assert body.windows == (0, 5, 5, 0)
    thetas = [rope.theta for rope in body.ropes if rope is not None]
    assert thetas == [160_000.0] * 4 if other == "version 4" else [160_000.0, 10_000.0, 10_000.0, 160_000.0]


def test_nomics_own_config(encoder_folder: Copy) -> None:
    expected = bert_of(FOLDER / "nomic_bert")
    names = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "layer_norm_eps": "layer_norm_epsilon",
    }

    def edit(config: Any) -> None:
        for key, own in names.items():
            config[own] = config.pop(key)
        del config["rope_parameters"], config["hidden_act"], config["head_dim"]
        config.update(activation_function="swiglu", rotary_emb_base=1000, rotary_emb_fraction=1.0, prenorm=False)

    folder = encoder_folder("nomic_bert", edit)
    assert bert_of(folder) == expected
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "n_inner": 0}))
    with pytest.raises(UnsupportedModel, match="n_inner is 0"):
        read_encoder(folder)
    (folder / "config.json").write_text(json.dumps({**config, "prenorm": True}))
    with pytest.raises(UnsupportedModel, match="prenorm is true; it must be false"):
        read_encoder(folder)


def test_snowflakes_copy_of_gte(encoder_folder: Copy) -> None:
    expected = bert_of(FOLDER / "gte")
    copy = encoder_folder("gte", edited(architectures=["GteModel"], model_type="gte"))
    assert bert_of(copy) == expected
    config = json.loads((copy / "config.json").read_text())
    del config["architectures"]
    (copy / "config.json").write_text(json.dumps({**config, "rope_scaling": None}))
    assert [rope and rope.theta for rope in bert_of(copy).ropes] == [500_000.0] * 2


def test_the_pooling_of_older_versions(encoder_folder: Copy) -> None:
    def edit(config: Any) -> None:
        config.clear()
        config.update(word_embedding_dimension=40, pooling_mode_cls_token=False, pooling_mode_lasttoken=True)

    assert read_encoder(encoder_folder("bert", edit, "1_Pooling/config.json")).pooling == "last"


def test_without_modules_rows_are_averaged(encoder_folder: Copy) -> None:
    folder = encoder_folder("bert_dense")
    (folder / "modules.json").unlink()
    spec = read_encoder(folder)
    assert (spec.pooling, spec.normalize, spec.dimensions) == ("mean", False, 40)
    decoder = encoder_folder("qwen3")
    (decoder / "modules.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"modules\.json of sentence-transformers"):
        read_encoder(decoder)


@pytest.mark.parametrize(
    ("name", "file", "edit", "message"),
    [
        ("bert", "config.json", edited(hidden_act="swish"), "hidden_act"),
        ("bert", "config.json", edited(position_embedding_type="relative_key"), "position_embedding_type"),
        ("bert", "config.json", edited(num_attention_heads=3), "hidden_size"),
        ("bert", "config.json", edited(is_decoder=True), "is_decoder"),
        ("bert", "config.json", edited(num_attention_heads=8), "num_attention_heads is 8; it must be such that a head"),
        ("bert", "config.json", edited(head_dim=5), r"head_dim is 5; it must be .* attention needs \(here it has 5\)"),
        ("distilbert", "config.json", edited(n_heads=8), "n_heads is 8; it must be such that a head has"),
        ("bert", "config.json", edited(type_vocab_size=0), "type_vocab_size"),
        ("bert", "config.json", edited(architectures=["T5Model"]), "architectures"),
        ("bert", "config.json", edited(architectures=[]), "architectures"),
        ("bert", "config.json", edited(matryoshka_dimensions=[0]), "matryoshka_dimensions"),
        ("roberta", "config.json", edited(pad_token_id=400), "max_position_embeddings"),
        ("modernbert", "config.json", edited(layer_types=["full_attention"]), "layer_types"),
        ("modernbert", "config.json", edited(hidden_activation="relu"), "hidden_activation"),
        ("modernbert_scores", "config.json", edited(classifier_pooling="max"), "classifier_pooling"),
        ("modernbert_scores", "config.json", edited(id2label=[1]), "id2label"),
        ("bert", "1_Pooling/config.json", edited(pooling_mode="max"), "pooling_mode"),
        ("bert", "1_Pooling/config.json", edited(pooling_mode=["mean", "cls"]), "pooling_mode"),
        ("bert", "1_Pooling/config.json", two_poolings, "pooling_mode_mean_tokens"),
        ("bert", "1_Pooling/config.json", edited(embedding_dimension=41), "embedding_dimension"),
        ("bert", "1_Pooling/config.json", edited(include_prompt=False), "include_prompt"),
        ("bert_dense", "2_Dense/config.json", edited(activation_function="os.system"), "activation_function"),
        ("bert_dense", "2_Dense/config.json", edited(in_features=39), "in_features"),
        ("bert_dense", "2_Dense/config.json", edited(use_residual=True), "use_residual"),
        ("bert", "modules.json", lambda modules: modules.pop(0), "Pooling first"),
        ("bert", "modules.json", lambda modules: modules.pop(1), "Normalize after Transformer"),
        ("distilbert", "modules.json", lambda modules: modules.pop(), "modules.json has no module Pooling"),
        ("bert_dense", "modules.json", lambda modules: modules.insert(2, modules.pop()), "Dense after Normalize"),
        ("bert", "modules.json", lambda modules: modules[1].update(type="a.WordWeights"), "WordWeights after"),
        ("bert", "modules.json", lambda modules: modules[1].update(path="../other"), r"\[1\]\.path"),
        ("bert", "modules.json", lambda modules: modules[1].pop("type"), r"\[1\]\.type"),
        ("bert", "modules.json", lambda modules: modules.clear(), "modules.json must be a list"),
        ("bert", "config_sentence_transformers.json", edited(prompts=[1]), "prompts"),
        ("bert", "config_sentence_transformers.json", edited(default_prompt_name="x"), "default_prompt_name"),
        ("bert", "config_sentence_transformers.json", edited(truncate_dim=16), "truncate_dim is 16"),
        ("nomic_bert", "config.json", edited(rotary_scaling_factor=2), "rotary_scaling_factor is 2; it must be null"),
        ("bert_scores", "config.json", edited(architectures=["DebertaV2ForSequenceClassification"]), "BertModel"),
        ("bert_scores", "config_sentence_transformers.json", edited(activation_fn="os.system"), "activation_fn"),
        ("bert", "sentence_bert_config.json", edited(max_seq_length=0), "max_seq_length"),
        ("qwen3", "config.json", edited(is_causal=False), "is_causal"),
        ("qwen3", "config.json", edited(quantization_config={"quant_method": "gptq"}), "quantization_config"),
        ("qwen3_answer", "config.json", edited(architectures=["BertModel"], hidden_act="gelu"), "needs a decoder"),
        ("qwen3", "config.json", edited(use_bidirectional_attention=True), "use_bidirectional_attention"),
        ("gemma3", "config.json", edited(sliding_window=1), "sliding_window is 1; it must be at least 2 with"),
        ("gemma3", "config.json", edited(use_bidirectional_attention="yes"), "use_bidirectional_attention"),
        ("mpnet", "config.json", edited(relative_attention_num_buckets=16), "relative_attention_num_buckets"),
        ("mpnet", "config.json", edited(max_position_embeddings=2), "max_position_embeddings"),
        ("gte", "config.json", edited(position_embedding_type="absolute"), "position_embedding_type"),
        ("gte", "config.json", edited(layer_norm_type="rms_norm"), "layer_norm_type"),
        ("gte", "config.json", edited(logn_attention_scale=True), "logn_attention_scale is true; it must be false"),
        ("gte", "config.json", edited(pack_qkv=False), "pack_qkv is false; it must be true"),
        ("gte", "config.json", edited(hidden_act="relu"), "hidden_act"),
        ("gte", "config.json", edited(rope_scaling={"type": "ntk"}), "rope_scaling.factor is missing"),
        ("gte", "config.json", edited(rope_scaling={"type": "ntk", "factor": 0.5}), "rope_scaling.factor is 0.5"),
        ("gte", "config.json", edited(rope_scaling={"type": "ntk", "factor": 2, "mixed_b": 0.6}), "mixed_b"),
        ("gte", "config.json", edited(rope_scaling={"type": "dynamic", "factor": 2}), "rope_scaling.type"),
        ("distilbert", "config.json", edited(dim=0), "dim is 0"),
        ("distilbert", "config.json", edited(n_heads=3), "dim is 40"),
        ("distilbert", "config.json", edited(activation="tanh"), "activation"),
        ("qwen3_answer", "1_LogitScore/config.json", edited(true_token_id=10**6), "true_token_id"),
        ("qwen3_answer", "1_LogitScore/config.json", edited(true_token_id=340), "the vocabulary has 340 tokens"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(
    encoder_folder: Copy, name: str, file: str, edit: Callable[[Any], object], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        pack_encoder(encoder_folder(name, edit, file), "f32")


def forwarded(output: Any, method: str = "forward") -> dict[str, Any]:
    return {"modality_config": {"text": {"method": method, "method_output_name": output}}}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("bert", {"config_args": {"num_hidden_layers": 1}}, "config_args.num_hidden_layers is 1; it must be absent"),
        ("bert", {"config_kwargs": {"num_labels": 1}}, "config_kwargs.num_labels"),
        ("bert", {"model_args": {"subfolder": "a"}}, "model_args.subfolder"),
        ("bert", {"model_kwargs": 3}, "model_kwargs is 3; it must be an object"),
        ("bert", {"tokenizer_args": {"do_lower_case": False}}, "tokenizer_args.do_lower_case"),
        ("bert", {"processor_kwargs": {"truncation_side": "left"}}, "processor_kwargs.truncation_side"),
        ("bert", {"processing_kwargs": {"text": {"add_special_tokens": False}}}, "text.add_special_tokens is false"),
        ("bert", {"processing_kwargs": {"text": {"truncation": "only_first"}}}, "text.truncation"),
        ("bert", {"processing_kwargs": {"text": {"max_length": 0}}}, "processing_kwargs.text.max_length is 0"),
        ("bert", {"processing_kwargs": {"text": {"stride": 3}}}, "text.stride"),
        (
            "bert",
            {"processing_kwargs": {"common": {"return_tensors": "np"}}},
            "processing_kwargs.common.return_tensors",
        ),
        ("qwen3_answer", {"processing_kwargs": {"text": {"logits_to_keep": 2}}}, "text.logits_to_keep is 2"),
        ("qwen3_answer", {"processing_kwargs": {"chat_template": {"tools": []}}}, "chat_template.tools"),
        ("qwen3_answer", {"processing_kwargs": {"chat_template": {"restore_suffix": False}}}, "restore_suffix"),
        (
            "qwen3_answer",
            {"processing_kwargs": {"chat_template": {"add_generation_prompt": 1}}},
            "add_generation_prompt",
        ),
        ("bert", {"transformer_task": "fill-mask"}, "transformer_task is .fill-mask.; it must be .feature-extraction."),
        ("bert_scores", {"transformer_task": "feature-extraction"}, "it must be .sequence-classification. for"),
        ("qwen3_answer", {"transformer_task": "any-to-any"}, "transformer_task is .any-to-any.; it must be .text-gen"),
        ("bert", {"module_output_name": "sentence_embedding"}, "module_output_name"),
        ("bert", forwarded(["hidden_states", -2]), r"modality_config.text.method_output_name is \[\"hidden_states"),
        ("bert_scores", forwarded("last_hidden_state"), "modality_config.text.method_output_name"),
        ("bert", forwarded("last_hidden_state", "get_text_features"), "modality_config.text.method is"),
        ("bert", {"modality_config": {"image": {}}}, "modality_config is"),
        ("bert", {"modality_config": {"message": {"method": "forward"}}}, "message.method_output_name is missing"),
        (
            "bert",
            {"modality_config": {"message": {"method": "forward", "method_output_name": "last_hidden_state"}}},
            "modality_config.message is .* must be absent: texts of a model with vectors are not made chats",
        ),
        ("bert", {"query_expansion": {"length": 32}}, "query_expansion"),
        ("bert", {"query_length": 8}, "query_length is 8"),
        ("bert", {"tokenizer_name_or_path": "other"}, "tokenizer_name_or_path"),
        ("bert", {"new_key": 1}, "sentence_bert_config.json: new_key is 1; it must be absent: it is not supported"),
    ],
    ids=str,
)
def test_settings_of_the_transformer_that_are_refused_are_named(
    encoder_folder: Copy, name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_encoder(encoder_folder(name, edited(**settings), "sentence_bert_config.json"))


def test_settings_of_the_transformer_without_an_effect_are_accepted(encoder_folder: Copy) -> None:
    settings: dict[str, Any] = {
        "config_args": {"use_cache": False},
        "document_length": None,
        "model_args": {"torch_dtype": "float16", "attn_implementation": "sdpa"},
        "modality_config": {**forwarded(["last_hidden_state"])["modality_config"], "image": {"method": "x"}},
        "processing_kwargs": {
            "image": {"size": 3},
            "chat_template": {"x": 1},
            "text": {"add_special_tokens": True, "padding": "max_length", "truncation": True},
        },
        "tokenizer_args": {"padding_side": "left", "truncation_side": "right"},
        "unpad_inputs": True,
    }
    folder = encoder_folder("bert", edited(**settings), "sentence_bert_config.json")
    assert read_encoder(folder) == read_encoder(FOLDER / "bert")


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"processing_kwargs": {"text": {"max_length": 6}}, "processor_kwargs": {"model_max_length": 7}}, 6),
        ({"processor_kwargs": {"model_max_length": 7}, "max_seq_length": 8}, 7),
        ({"tokenizer_args": {"model_max_length": 7}}, 7),
        ({"max_seq_length": 8}, 8),
    ],
)
def test_the_longest_text_of_the_settings(encoder_folder: Copy, settings: dict[str, Any], tokens: int) -> None:
    folder = encoder_folder("bert", edited(**settings), "sentence_bert_config.json")
    assert read_encoder(folder).max_model_len == tokens


@pytest.mark.parametrize("file", ["modules.json", "1_Pooling/config.json", "sentence_bert_config.json"])
def test_broken_files(encoder_folder: Copy, file: str) -> None:
    folder = encoder_folder("bert")
    for content in (b"{", b"3", b"\xff", b"[" * 100_000):
        (folder / file).write_bytes(content)
        with pytest.raises((CorruptCheckpoint, UnsupportedModel), match="json"):
            read_encoder(folder)


def test_a_pipe_is_not_opened(encoder_folder: Copy) -> None:
    folder = encoder_folder("bert")
    (folder / "sentence_bert_config.json").unlink()
    os.mkfifo(folder / "sentence_bert_config.json")
    assert read_encoder(folder).max_model_len == 190  # limit in tokenizer_config.json


def test_missing_and_wrong_tensors(encoder_folder: Copy) -> None:
    with pytest.raises(MissingTensor, match=r"encoder\.layer\.2\.attention"):
        pack_encoder(encoder_folder("bert", edited(num_hidden_layers=3)), "f32")
    with pytest.raises(WrongTensor, match="word_embeddings"):
        pack_encoder(encoder_folder("bert_scores", edited(vocab_size=159)), "f32")
    with pytest.raises(WrongTensor, match="position_embeddings"):
        pack_encoder(encoder_folder("roberta", edited(max_position_embeddings=255)), "f32")
    with pytest.raises(WrongTensor, match="linear"):
        pack_encoder(encoder_folder("bert_dense", edited(out_features=25), "2_Dense/config.json"), "f32")


def test_the_least_files_of_a_reranker_that_answers(encoder_folder: Copy) -> None:
    def edit(modules: Any) -> None:
        modules[:] = [{"path": "", "type": "Transformer"}, {"path": "1_LogitScore", "type": "LogitScore"}]

    folder = encoder_folder("qwen3_answer", edit, "modules.json")
    (folder / "1_LogitScore" / "config.json").write_text('{"true_token_id": 60, "false_token_id": 61}')
    (folder / "config_sentence_transformers.json").unlink()
    spec = read_encoder(folder)
    assert spec == read_encoder(FOLDER / "qwen3_answer")
    (folder / "sentence_bert_config.json").unlink()
    assert read_encoder(folder) == replace(spec, messages="auto")


@pytest.mark.parametrize("rows", [60, 61])
def test_a_head_without_the_answers_rows(encoder_folder: Copy, rows: int) -> None:
    folder = encoder_folder("qwen3_answer", edited(tie_word_embeddings=False))  # answers are tokens 60 and 61
    content = (folder / "model.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    tensors = {name: np.zeros(header[name]["shape"], np.float16) for name in header if name != "__metadata__"}
    tensors["lm_head.weight"] = np.zeros((rows, 40), np.float16)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WrongTensor, match=r"lm_head.* must have the answer tokens' rows"):
        pack_encoder(folder, "f32")


@pytest.mark.parametrize(
    "name",
    [
        "gemma2", "gpt_oss", "lfm2", "olmo2", "granite_hybrid", "falcon_h1", "qwen3_next", "cohere", "hunyuan_v1_dense",
        "ministral3", "gemma4", "deepseek_v3",
    ],
)  # fmt: skip
def test_decoders_whose_attention_has_more_are_refused(name: str, decoder_with_modules: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedModel, match=r"no attention sinks, no soft cap .*, .* and no layers with states"):
        read_encoder(decoder_with_modules(name))


SMALL = {
    "vocab_size": 9,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 8,
    "max_position_embeddings": 64,
}


def test_nomic_bert_has_the_rotary_embedding_of_either_style_of_config() -> None:
    for keys, theta in (
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}, 5e3),
        ({"rotary_emb_base": 2e4}, 2e4),
        ({}, 1e3),
    ):
        assert read_nomic_bert(ConfigTable({**SMALL, **keys})).ropes == (Rope(theta),) * 4


def test_modernbert_scales_each_kind_of_layer_as_its_config_says() -> None:
    full = {"rope_type": "linear", "factor": 2.0, "rope_theta": 8e4}
    parameters = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 3e4}}
    spec = read_modernbert(ConfigTable({**SMALL, "rope_parameters": parameters}))
    scaled = Rope(8e4, LinearScaling(2.0))
    plain = Rope(3e4)
    assert spec.ropes == (scaled, plain, plain, scaled)
