"""The bundled byte-level tokenizer, and a small tokenizer in SentencePiece style."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import quire.runtime
from quire.runtime.engine.text.tokenizer import Tokenizer
from tokenizers import Regex, decoders, models, normalizers
from tokenizers import Tokenizer as FastTokenizer


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return Path(quire.runtime.__file__).parent / "demo_model"


@pytest.fixture(scope="session")
def byte_level(demo_folder: Path) -> Tokenizer:
    return Tokenizer(demo_folder)


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a tokenizer like Llama-2's: ▁ for spaces, <0xNN> for unknown bytes, one leading space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "a", "b", "é", "▁a", "▁the", "ca", "t", "▁ca", "END", "E", "N", "D", "\n", "▁cat"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("c", "a")]
    vocab |= {"c": len(vocab)}
    fast = FastTokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(Regex(" "), "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder = tmp_path_factory.mktemp("sentencepiece")
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    return Tokenizer(folder)


@pytest.fixture(scope="session")
def word_ends(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a tokenizer of the first BPE kind, whose tokens say where a word ends."""
    fast = FastTokenizer(models.BPE({"a": 0, "b</w>": 1, "c": 2, "a</w>": 3}, []))
    fast.decoder = decoders.BPEDecoder(suffix="</w>")
    folder = tmp_path_factory.mktemp("word_ends")
    fast.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)
