r"""The named pre-tokenizers of GGUF files: how `tokenizer.ggml.pre` splits a text before byte pairs are merged.

A GGUF file has only the name, so this table has the meaning of each name: the patterns of the original Hugging Face
tokenizers, in the syntax of Oniguruma, applied one after another. A match is a separate piece, and so is the text
between two matches; therefore patterns do not need the `|\s+` at their end that they have upstream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_OPTIONAL_LEAD = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HAN_KANA = r"[一-龥぀-ゟ゠-ヿ]+"

# Groups of three digits from the right: 1 234 567. The original patterns look at all digits ahead for each group, which
# takes minutes for a million digits; these patterns do so for the first group only.
_THREE_NUMERALS = r"(?<!\p{N})\p{N}{1,2}(?=(?:\p{N}{3})*(?!\p{N}))|\p{N}{3}"
_THREE_DIGITS_OF_A_WORD = r"(?<!\d)\d{1,2}(?=(?:\d{3})*\b)|\d{3}"
_THREE_DIGITS_OF_NUMERALS = r"(?<!\p{N})[\p{Nl}\p{No}]*+\d{1,2}(?=(?:\d{3})+(?!\d))|\d{3}"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEEPSEEK_LLM_WORD = (
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
    r"Ὗ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃ"
    r"ↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True)
class PreTokenizer:
    """The pre-tokenizer with one name. The flags apply to all tokenizers with this name."""

    patterns: tuple[str, ...]
    nfc: bool = False  # the text is composed first (Unicode NFC)
    ignore_merges: bool = False  # a piece that is a token is that token, without merging
    add_bos: bool = False  # default for files that do not declare add_bos_token
    byte_level: bool = True  # GPT-2's alphabet of bytes; else ▁ for spaces and <0xNN> for unknown bytes


def _cl100k(digits: str, word: str = r"\p{L}+", marks: str = _MARKS, spaces: str = _SPACES) -> str:
    return "|".join([_CONTRACTION, _OPTIONAL_LEAD + word, digits, marks, spaces])


def _o200k(digits: str, contraction: str = f"{_CONTRACTION}?", marks: str = r" ?[^\s\p{L}\p{N}]+[\r\n/]*") -> str:
    words = [f"{_OPTIONAL_LEAD}{_UPPER}*{_LOWER}+", f"{_OPTIONAL_LEAD}{_UPPER}+{_LOWER}*"]
    return "|".join([*(word + contraction for word in words), digits, marks, _SPACES])


def _deepseek(tail: str) -> str:
    return (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
        + tail
    )


_DEEPSEEK_V3 = (r"\p{N}{1,3}", _HAN_KANA, _deepseek(rf"[\r\n]*|{_SPACES}"))
_KIMI_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_K2 = "|".join(
    [
        r"\p{Han}+",
        f"{_OPTIONAL_LEAD}{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTION}?",
        f"{_OPTIONAL_LEAD}{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTION}?",
        r"\p{N}{1,3}",
        _MARKS,
        _SPACES,
    ]
)
_AFMOE_SCRIPTS = "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"

_LLAMA3 = _cl100k(r"\p{N}{1,3}")
_QWEN2 = _cl100k(r"\p{N}")
_QWEN35 = _cl100k(r"\p{N}", word=r"[\p{L}\p{M}]+", marks=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")
_DIGITS_GPT2 = PreTokenizer((r"\p{N}", _GPT2))


def _table() -> Iterator[tuple[str, PreTokenizer]]:
    """Yield the space-separated names that share a meaning, and the meaning."""
    yield "default", PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
    yield (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    )
    yield "dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA3,))
    yield "glm4 glm5", PreTokenizer((_LLAMA3,), ignore_merges=True)
    yield "minicpm5", PreTokenizer((r"\p{N}{1,3}", _cl100k(r"\p{N}+")), ignore_merges=True)
    yield "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan", PreTokenizer((_QWEN2,), nfc=True)
    yield "kormo f2llmv2 grok-2 solar-open", PreTokenizer((_QWEN2,))
    yield "qwen35", PreTokenizer((_QWEN35,))
    yield "laguna", PreTokenizer((r"[^\n]+|\n+", _QWEN2))
    yield "ufakzeka", PreTokenizer((_QWEN2.removeprefix(_CONTRACTION + "|"),))
    yield "seed-coder", PreTokenizer((_cl100k(r"\p{N}", marks=r" ?[^\s\p{L}\p{N}\r\n]+"),))
    yield (
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer(
            (
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|"
                r"\s+",
            )
        ),
    )
    yield (
        "exaone-moe",
        PreTokenizer(
            (
                _cl100k(
                    r"\p{N}",
                    word=r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                    marks=r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
                    spaces=r"\s*[\r\n]|\s+(?!\S)|\s+",
                ),
            )
        ),
    )
    runs = "|".join(rf"\s{{{length}}}(?!\S)" for length in (512, 256, 128, 64, 32, 16, 8, 4))
    yield "jais-2", PreTokenizer((_cl100k(r"\p{N}{1,3}", spaces=rf"\s*[\r\n]+|{runs}|\s{{1,2}}(?!\S)|\s"),))
    yield "gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_o200k(r"\p{N}{1,3}"),))
    yield "granite-embed-multi-97m", PreTokenizer((_o200k(r"\p{N}{1,3}"),), ignore_merges=True)
    yield "tiny_aya cohere2moe", PreTokenizer((_THREE_DIGITS_OF_A_WORD, _o200k(r"\p{N}{1,3}")), nfc=True)
    yield "tekken", PreTokenizer((_o200k(r"\p{N}", contraction=""),), ignore_merges=True, add_bos=True)
    yield (
        "youtu",
        PreTokenizer(
            (
                rf"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{_HAN_KANA}",
                _o200k(r"\p{N}"),
            ),
            ignore_merges=True,
        ),
    )
    yield "kimi-k2", PreTokenizer((_KIMI_K2,))
    yield (
        "deepseek-llm",
        PreTokenizer(
            (r"[\r\n]", _DEEPSEEK_LLM_WORD, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-퟿]+", r"\p{N}+")
        ),
    )
    yield "deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"))
    yield "deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(_DEEPSEEK_V3)
    yield "spark2_5", PreTokenizer((*_DEEPSEEK_V3[:2], _deepseek(r"|[\r\n]|\s+(?!\S)|\s+"), r"\p{N}"))
    yield "afmoe", PreTokenizer((_THREE_NUMERALS, _AFMOE_SCRIPTS, _DEEPSEEK_V3[2]))
    yield "falcon", PreTokenizer((r"[\p{P}$+<=>^~|`]+", _GPT2, r"[0-9][0-9][0-9]"))
    yield "starcoder refact smollm codeshell exaone minerva-7b mellum2", _DIGITS_GPT2
    yield "command-r", PreTokenizer(_DIGITS_GPT2.patterns, nfc=True)
    yield (
        "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
        "exaone4 jais trillion granite-docling",
        PreTokenizer((_GPT2,)),
    )
    yield "mpt olmo modern-bert", PreTokenizer((_GPT2,), nfc=True)
    yield "bloom poro-chat gpt3-finnish", PreTokenizer((_BLOOM,))
    yield "viking", PreTokenizer((_BLOOM, r"\p{N}"))
    yield "superbpe", PreTokenizer((r"\p{N}+", _THREE_DIGITS_OF_NUMERALS))
    yield (
        "chameleon",
        PreTokenizer(
            (
                r"<sentinel:[0-9]+>",
                r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
    )
    yield "gemma4 granite-embed-multi-311m", PreTokenizer((), add_bos=True, byte_level=False)
    yield "sarvam-moe", PreTokenizer((), byte_level=False)


PRE_TOKENIZERS = {name: meaning for names, meaning in _table() for name in names.split()}
