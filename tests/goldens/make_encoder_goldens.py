"""Write the golden encoders, vectors and scores that the tests compare Quire with.

Needs torch, transformers 5 and sentence-transformers 6; the tests need none of them, they read what this wrote.
Everything is seeded: running it again with the same versions gives the same files.

usage: make_encoder_goldens.py [OUT_DIR [CASE ...]]    OUT_DIR defaults to encoders/ beside this file, the cases to all

Per case a folder as sentence-transformers or transformers saves it, with random weights in bf16 and a tokenizer
trained on `TEXTS`; and golden.json with
    texts     the inputs: texts, or pairs of texts for a model that scores pairs
    prompt    the name of the prompt that the texts are embedded with, or null
    token_ids, type_ids    of each input, as the tokenizer makes them
    values    vectors, or scores before any activation, from sentence-transformers or transformers in f32
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SEED = 20261122
VOCABULARY = 160
TEXTS = [
    "a",
    "Who owns the pages of the cache?",
    "The pool owns the pages; a page table lends them to one sequence, and the prefix cache keeps some for later.",
    "Ünïcödé naïve café, 東京 and 12,345.678!",
    "word " * 40,
    "An encoder computes keys and values, uses them once and forgets them. " * 2,
]
PAIRS = [*([TEXTS[1], text] for text in (TEXTS[2], TEXTS[5], TEXTS[3])), ["a", "b"]]
SIZES: dict[str, Any] = {
    "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 72,
}  # fmt: skip
QWEN3: dict[str, Any] = {
    **SIZES, "num_key_value_heads": 1, "head_dim": 24, "max_position_embeddings": 512, "tie_word_embeddings": True,
    "rope_theta": 1e6,
}  # fmt: skip
PAIR_TEMPLATE = (
    "<s>{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}"
    " <d> {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}</s>"
)
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<d>"]


def word_piece() -> Tokenizer:
    """Return a tokenizer as BERT's: words of lower-case pieces, [CLS] text [SEP], pairs with types 0 and 1."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=special))
    cls = tokenizer.token_to_id("[CLS]")
    sep = tokenizer.token_to_id("[SEP]")
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", sep), ("[CLS]", cls))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def unigram() -> Tokenizer:
    """Return a tokenizer as XLM-RoBERTa's: <s> text </s>, pairs <s> a </s></s> b </s> of one type."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer.train_from_iterator(
        TEXTS, trainers.UnigramTrainer(vocab_size=VOCABULARY, special_tokens=special, unk_token="<unk>")
    )
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=False)
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def byte_pairs(single: str, pair: str | None = None) -> Tokenizer:
    """Return a tokenizer of byte pairs whose post-processor has the given templates."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    special = [(name, SPECIAL.index(name)) for name in SPECIAL]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


WORD_PIECE: dict[str, Any] = {
    "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]",
    "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
}  # fmt: skip
UNIGRAM: dict[str, Any] = {"pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>", "unk_token": "<unk>"}
BYTE_PAIRS: dict[str, Any] = {"pad_token": "<pad>", "cls_token": "<s>", "sep_token": "</s>", "eos_token": "</s>"}


@dataclass(frozen=True)
class Case:
    """A model, and the modules after it; without any it is saved by transformers alone, and its rows are averaged."""

    model: str  # the class in transformers
    tokenizer: Callable[[], Tokenizer]
    special: dict[str, Any]
    config: dict[str, Any]
    pooling: str | None = None
    dense: tuple[int, bool, type[torch.nn.Module]] | None = None  # columns, bias, activation
    normalize: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    prompt: str | None = None
    max_length: int | None = None
    answer: tuple[int, int] | None = None  # ids of the tokens for true and false
    activation: type[torch.nn.Module] | None = None  # activation of a cross-encoder's scores


CASES = {
    "bert": Case(  # MiniLM
        "BertModel", word_piece, WORD_PIECE, {**SIZES, "max_position_embeddings": 200}, "mean", None, True,
        max_length=190,
    ),
    "bert_dense": Case(  # BGE, with a projection
        "BertModel", word_piece, WORD_PIECE, {**SIZES, "hidden_act": "gelu_new", "max_position_embeddings": 256}, "cls",
        (24, True, torch.nn.Tanh), True, {"query": "find: ", "document": ""}, "query",
    ),
    "bert_scores": Case(
        "BertForSequenceClassification", word_piece, WORD_PIECE,
        {**SIZES, "hidden_act": "relu", "max_position_embeddings": 256, "num_labels": 1}, activation=torch.nn.Identity,
    ),
    "distilbert": Case(
        "DistilBertModel", word_piece, {**WORD_PIECE, "model_input_names": ["input_ids", "attention_mask"]},
        {"dim": 40, "n_layers": 2, "n_heads": 2, "hidden_dim": 72, "max_position_embeddings": 256}, "mean",
    ),
    "distilbert_scores": Case(
        "DistilBertForSequenceClassification", word_piece,
        {**WORD_PIECE, "model_input_names": ["input_ids", "attention_mask"]},
        {"dim": 40, "n_layers": 2, "n_heads": 2, "hidden_dim": 72, "max_position_embeddings": 256, "num_labels": 2},
    ),
    "roberta": Case("RobertaModel", unigram, UNIGRAM, {**SIZES, "max_position_embeddings": 258, "type_vocab_size": 1}),
    "xlm_roberta": Case(  # E5 and BGE-M3
        "XLMRobertaModel", unigram, UNIGRAM, {**SIZES, "max_position_embeddings": 258, "type_vocab_size": 1}, "cls",
        None, True, {"query": "query: ", "passage": "passage: "}, "passage",
    ),
    "xlm_roberta_scores": Case(
        "XLMRobertaForSequenceClassification", unigram, UNIGRAM,
        {**SIZES, "max_position_embeddings": 258, "type_vocab_size": 1, "num_labels": 1},
    ),
    "mpnet": Case(
        "MPNetModel", unigram, UNIGRAM, {**SIZES, "max_position_embeddings": 258}, "mean", None, True,
    ),
    "modernbert": Case(
        "ModernBertModel", lambda: byte_pairs("<s> $A </s>", "<s> $A </s> $B </s>"), BYTE_PAIRS,
        {**SIZES, "num_hidden_layers": 4, "local_attention": 10, "max_position_embeddings": 256}, "mean",
    ),
    "modernbert_scores": Case(
        "ModernBertForSequenceClassification", lambda: byte_pairs("<s> $A </s>", "<s> $A </s> $B </s>"), BYTE_PAIRS,
        {
            **SIZES, "num_hidden_layers": 3, "local_attention": 32, "max_position_embeddings": 256, "num_labels": 3,
            "classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True, "mlp_bias": True,
            "attention_bias": True,
        },
    ),
    "nomic_bert": Case(
        "NomicBertModel", word_piece, WORD_PIECE, {**SIZES, "max_position_embeddings": 256}, "mean", None, True,
        {"query": "search_query: ", "document": "search_document: "}, "document",
    ),
    "gemma3": Case(  # EmbeddingGemma
        "Gemma3TextModel", lambda: byte_pairs("<s> $A </s>"), BYTE_PAIRS,
        {
            **SIZES, "num_key_value_heads": 1, "head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 22,
            "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 512,
            "use_bidirectional_attention": True,
        },
        "mean", (24, False, torch.nn.Identity), True, {"query": "task: search | query: "}, "query",
    ),
    "qwen3": Case(  # Qwen3-Embedding
        "Qwen3Model", lambda: byte_pairs("$A </s>"), BYTE_PAIRS, QWEN3, "lasttoken", None, True,
        {"query": "Instruct: find it\nQuery:", "document": ""}, "query",
    ),
    "qwen3_answer": Case(  # Qwen3-Reranker
        "Qwen3ForCausalLM", lambda: byte_pairs("$A"), BYTE_PAIRS, QWEN3, answer=(60, 61),
    ),
    "qwen3_scores": Case(
        "Qwen3ForSequenceClassification", lambda: byte_pairs("$A", "$A $B"), BYTE_PAIRS, {**QWEN3, "num_labels": 2},
    ),
}  # fmt: skip


def make(name: str, folder: Path) -> None:
    """Write one case."""
    case = CASES[name]
    shutil.rmtree(folder, ignore_errors=True)
    fast = case.tokenizer()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=fast, **case.special)
    model = random_model(case, fast)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = (folder / "config.json").read_bytes()
    is_pair = case.answer is not None or case.model.endswith("ForSequenceClassification")
    inputs: list[Any] = PAIRS if is_pair else TEXTS
    if case.answer is not None:
        (folder / "chat_template.jinja").write_text(PAIR_TEMPLATE)
    if case.pooling is not None:
        values = embed(case, folder)
    elif is_pair:
        values = score(case, folder)
    else:
        values = mean_rows(model, fast, TEXTS)
    if "use_bidirectional_attention" in case.config:  # the window is halved when config.json is read, and so saved
        (folder / "config.json").write_bytes(config)
    ids, types = tokenized(case, fast, inputs)
    for path in folder.glob("**/*.safetensors"):
        save_file({key: value.bfloat16() for key, value in load_file(path).items()}, path, {"format": "pt"})
    for path in [*folder.glob("**/README.md"), *folder.glob("**/generation_config.json")]:
        path.unlink()
    golden = {"texts": inputs, "prompt": case.prompt, "token_ids": ids, "type_ids": types, "values": values}
    (folder / "golden.json").write_text(json.dumps(golden, ensure_ascii=False) + "\n")


def random_model(case: Case, fast: Tokenizer) -> Any:
    """Return a model whose weights keep the scale of rows, each exact in bf16."""
    torch.manual_seed(SEED)
    model_class = getattr(transformers, case.model)
    special = {"pad_token_id": fast.token_to_id(case.special["pad_token"]), "bos_token_id": 1, "eos_token_id": 2}
    extra = {"cls_token_id": 1, "sep_token_id": 2} if case.model.startswith("ModernBert") else {}
    config = model_class.config_class(vocab_size=fast.get_vocab_size(), **special, **extra, **case.config)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            is_norm = "norm" in key.lower() and key.endswith("weight")
            is_norm &= not case.model.startswith("Gemma")  # Gemma stores the weights of norms less 1
            scale = 0.2 if value.ndim == 1 or "embed" in key else 0.9 * value.shape[-1] ** -0.5
            value.copy_((torch.randn_like(value) * scale + is_norm).bfloat16().float())
    return model


def embed(case: Case, folder: Path) -> list[list[float]]:
    """Save the folder as sentence-transformers does, and return its vectors."""
    modules: list[Any] = [Transformer(str(folder), max_seq_length=case.max_length, model_kwargs={"dtype": "float32"})]
    modules.append(Pooling(modules[0].get_embedding_dimension(), case.pooling))
    if case.dense is not None:
        columns, bias, activation = case.dense
        dense = Dense(modules[1].get_embedding_dimension(), columns, bias, activation())
        with torch.no_grad():
            for value in dense.parameters():
                value.copy_((torch.randn_like(value) * 0.3).bfloat16().float())
        modules.append(dense)
    modules += [Normalize()] if case.normalize else []
    model = SentenceTransformer(modules=modules, prompts=case.prompts or None, device="cpu")
    model.save(str(folder))
    return model.encode(TEXTS, prompt_name=case.prompt, batch_size=1, normalize_embeddings=False).tolist()


def score(case: Case, folder: Path) -> list[list[float]]:
    """Return the values of labels before any activation; a cross-encoder's settings are saved in the folder."""
    kwargs: dict[str, Any] = {"model_kwargs": {"dtype": "float32"}, "device": "cpu"}
    if case.answer is not None:
        first = Transformer(str(folder), transformer_task="text-generation", model_kwargs={"dtype": "float32"})
        model = CrossEncoder(modules=[first, LogitScore(*case.answer)], device="cpu")
    else:
        activation = {} if case.activation is None else {"activation_fn": case.activation()}
        model = CrossEncoder(str(folder), **activation, **kwargs)
    model.save(str(folder))
    values = model.predict(PAIRS, batch_size=1, activation_fn=torch.nn.Identity())
    return values.reshape(len(PAIRS), -1).tolist()


def mean_rows(model: Any, fast: Tokenizer, texts: list[str]) -> list[list[float]]:
    rows = []
    for text in texts:
        with torch.no_grad():
            rows.append(model(torch.tensor([fast.encode(text).ids])).last_hidden_state[0].mean(0).tolist())
    return rows


def tokenized(case: Case, fast: Tokenizer, inputs: list[Any]) -> tuple[list[list[int]], list[list[int]]]:
    if case.answer is not None:
        inputs = [f"<s>{query} <d> {document}</s>" for query, document in inputs]
        encodings = fast.encode_batch(inputs, add_special_tokens=False)
    else:
        prompt = case.prompts[case.prompt] if case.prompt else ""
        encodings = fast.encode_batch([tuple(text) if isinstance(text, list) else prompt + text for text in inputs])
    limit = case.max_length or case.config["max_position_embeddings"]
    assert all(len(encoding.ids) <= limit - 2 for encoding in encodings), "no text may be truncated"
    return [encoding.ids for encoding in encodings], [encoding.type_ids for encoding in encodings]


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "encoders"
    for name in sys.argv[2:] or CASES:
        make(name, out / name)
        print(name)


if __name__ == "__main__":
    main()
