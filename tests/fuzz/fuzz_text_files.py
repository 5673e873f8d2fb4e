"""Load hostile text files of a model: each must load or be refused by a typed error, and so must every use of them.

usage: fuzz_text_files.py [--cases 20000] [--seed 1]

A case is a folder with a tokenizer.json of random parts and settings, a chat template of random statements, or a
generation_config.json and other settings of random values; a part of them is changed at random bytes. A folder that
loads encodes and decodes texts, renders a chat and recommends parameters, which a request must be able to have. Cases
run in a process of their own, which is ended after 30 s of CPU time for one. Exit status 1 on any breach, also if
memory grows by more than 500 MB.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from quire.runtime.common.errors import QuireError
from quire.runtime.common.types import SamplingParams
from quire.runtime.engine import TextProcessor
from quire.runtime.engine.validator import SAMPLING_RANGES

MAX_GROWTH = 500 << 20  # bytes of memory beyond what the process has before the first case
MAX_CPU_S = 10.0  # CPU time of a case: a template may run for 2 s, and interrupting it takes a while
HUNG_CPU_S = 30.0  # CPU time after which the system ends the process of a case
MAX_WAIT_S = 600.0  # wall time, on a machine that has no time for it
ADDRESS_SPACE = 6 << 30
REPORTED_BREACHES = 8
IN_MEMORY = "/dev/shm"  # 40 times as fast as a disk
TEXTS = (
    "",
    "a",
    "Hello world, this is a queue.",
    "a" * 3000 + "!",
    " \n\t" * 300,
    "naïve 日本語 👧\u0301\ufdfa" * 50,
    "<s>[INST] \x00",
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "x" * 2000},
]
EXTREMES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 255, 2**31, 2**32 - 1, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.0, 1e308, -1e-308,
    float("nan"), float("inf"), "", "a", "aa", "\ud800", "日本", "a" * 5000, [], [[]], [0] * 50, {}, {"a": {}},
    {"type": "X"},
)  # fmt: skip
REGEXES = (
    "",
    "a",
    "(a+)+$",
    "a*a*x",
    r"\s+",
    "(?=a)",
    "[",
    "(",
    r"(\w|\d)*!",
    ".",
    "(?s).*",
    r"\p{L}+",
    "(a{1,300}){1,300}",
)
STATEMENTS = (
    "{{ messages[0]['content'] }}",
    "{{ bos_token }}",
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "{% for i in range(10**9) %}{{ i }}{% endfor %}",
    "{{ 'x' * 10**9 }}",
    "{{ range(10**8) | list }}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% set x = namespace(s='a') %}",
    "{% for i in range(99) %}{% set x.s = x.s + x.s %}{% endfor %}{{ x.s }}",
    "{{ '%0999999999d' % 1 }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ messages | tojson(indent=99999999) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__ }}",
    "{{ raise_exception('no') }}",
    "{% include 'x' %}",
    "{% extends 'x' %}",
    "{{ 10**10**10 }}",
    "{{ (1).__add__(2) }}",
    "{% for a in messages %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}",
    "{{ strftime_now('%Y' * 99999) }}",
    "{{ 'a'.join(['b' * 999] * 99999) }}",
    "{{ messages | sum }}",
    "{% if x %}",
    "{% endif %}",
    "{{",
    "{{ cycler(*range(999999)) }}",
    "{{ dict(a=1, **{'b': 2}) }}",
    "{% generation %}a{% endgeneration %}",
    "{{ tools | tojson }}",
    "{{ 'ab' | replace('', 'x' * 9999) | replace('', 'y' * 9999) }}",
    "{{ 'a' | center(999999999) }}",
    "{{ [[]] * 10**8 }}",
    "{% set a = [1] * 9999 %}{% set b = a | map('string') | list %}{{ (b * 9999) | join }}",
    "{% call f() %}{% endcall %}",
    "{{ 'x'.ljust(10**9) }}",
    "{{ 'x' | indent(10**8, true) }}",
    "{{ ('a' * 9999) | wordwrap(1, true, 'b' * 9999) }}",
    "{{ 1 // 0 }}",
    "{{ messages[99] }}",
    "{{ undefined.a.b }}",
    "{% set ns = namespace() %}{% set ns.self = ns %}{{ ns }}",
    "{{ 'a' ~ 'b' * 10**7 }}",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)  # first case of this process
    options = parser.parse_args()
    if options.first is not None:
        run_cases(options.first, options.cases, options.seed)
        return 0
    results = Counter[str]()
    growth = 0
    slowest = 0.0
    case = 0
    while case < options.cases:
        command = [
            sys.executable,
            __file__,
            "--first",
            str(case),
            "--cases",
            str(options.cases),
            "--seed",
            str(options.seed),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as worker:
            assert worker.stdout is not None, "a pipe"
            while case < options.cases:
                line = worker.stdout.readline() if select.select([worker.stdout], [], [], MAX_WAIT_S)[0] else b""
                if not line:
                    worker.kill()
                    outcome = "breach"
                    seconds = 0.0
                    trace = "the process hung, or has crashed"
                else:
                    outcome, seconds, grown, trace = json.loads(line)
                    growth = max(growth, grown)
                    slowest = max(slowest, seconds)
                if seconds > MAX_CPU_S:
                    outcome = "breach"
                    trace = f"{seconds:.1f} s of CPU"
                results[outcome] += 1
                if outcome == "breach" and results["breach"] <= REPORTED_BREACHES:
                    print(f"case {case} ({kind_of(case)}): {trace}", file=sys.stderr)
                case += 1
                if case % 1000 == 0:
                    print(f"{case} cases, memory grew by {growth >> 20} MiB", file=sys.stderr)
                if not line:
                    break
    print(", ".join(f"{name} {count}" for name, count in results.most_common()))
    print(f"slowest case {slowest:.2f} s of CPU; memory grew by {growth >> 20} of {MAX_GROWTH >> 20} MiB allowed")
    return 1 if results["breach"] or growth > MAX_GROWTH else 0


def kind_of(case: int) -> str:
    return ("tokenizer", "template", "settings")[case % 3]


def run_cases(first: int, end: int, seed: int) -> None:
    """Run the cases, and print a line with the outcome of each."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # warnings are not answers
    with tempfile.TemporaryDirectory(dir=IN_MEMORY if os.path.isdir(IN_MEMORY) else None) as name:
        folder = Path(name)
        before = 0
        for case in range(first, end):
            random = Random(f"{seed} {case}")
            write_case(folder, random, kind_of(case))
            signal.setitimer(signal.ITIMER_PROF, HUNG_CPU_S)
            started = time.process_time()
            trace = ""
            try:
                use(TextProcessor.load(folder), random)
                outcome = "used"
            except QuireError as error:
                outcome = f"refused: {type(error).__name__}"
            except BaseException:
                outcome = "breach"
                trace = traceback.format_exc(limit=-6)
            before = before or max_rss()
            print(
                json.dumps([outcome, time.process_time() - started, max_rss() - before, trace]),
                file=answers,
                flush=True,
            )


def max_rss() -> int:
    """Return the most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def use(texts: TextProcessor, random: Random) -> None:
    """Use the files as requests do. A failure is a QuireError of its request, and the next request is served."""
    for name, value in texts.default_sampling.items():
        check, low, high = SAMPLING_RANGES[name]
        check(name, value, low, high)
    assert texts.tokenizer is not None, "each case has a tokenizer.json"
    assert texts.longest_token >= 0
    refused: QuireError | None = None
    for text in TEXTS:
        try:
            token_ids = texts.encode(text)
            texts.decode(token_ids[:4096])
            detokenizer = texts.detokenizer(SamplingParams(stop=("!", "ab")), prompt=token_ids[:5])
            assert detokenizer is not None
            ids = [*token_ids[:300], *(random.randrange(500) for _ in range(100))]
            assert len(detokenizer.push(ids) + detokenizer.finish()) <= 1 << 24
            for token_id in range(0, 400, 7):
                texts.token(token_id)
        except QuireError as error:
            refused = error
    if texts.chat_template is not None:
        for tools in ((), ({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},)):
            try:
                texts.render(CHAT, tools)
            except QuireError as error:
                refused = error
    if refused is not None:
        raise refused


# Cases


def write_case(folder: Path, random: Random, kind: str) -> None:
    """Write the files of one case."""
    for path in folder.iterdir():
        path.unlink()
    files: dict[str, Any] = {"tokenizer.json": tokenizer(random, is_hostile=kind == "tokenizer")}
    files["config.json"] = {"vocab_size": 400, "eos_token_id": 0}
    if kind == "template":
        parts = "".join(random.choice(STATEMENTS) for _ in range(random.randint(1, 4)))
        files["tokenizer_config.json"] = {"chat_template": parts, "bos_token": "<s>", "eos_token": "</s>"}
    if kind == "settings":
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "eos_token_id", "do_sample")
        files["generation_config.json"] = values_of(random, names)
        names = (
            "eos_token",
            "bos_token",
            "add_bos_token",
            "add_eos_token",
            "additional_special_tokens",
            "tokenizer_class",
            "added_tokens_decoder",
            "extra_special_tokens",
            "image_token",
            "chat_template",
        )
        files["tokenizer_config.json"] = values_of(random, names)
        files["special_tokens_map.json"] = values_of(random, names[:5])
        files["added_tokens.json"] = values_of(random, ("<x>", "a", "", "<y>"))
        if random.random() < 0.2:
            files["config.json"] = {"vocab_size": random.choice(EXTREMES), "eos_token_id": random.choice(EXTREMES)}
    for name, content in files.items():
        data = json.dumps(content).encode(errors="surrogatepass")
        if random.random() < 0.04:
            data = changed(data, random)
        (folder / name).write_bytes(data)


def values_of(random: Random, names: tuple[str, ...]) -> dict[str, Any]:
    """Return some settings: extreme values, and declarations of tokens."""
    token = {"content": random.choice(("<s>", "a", "<new>", "é")), "special": random.random() < 0.5, "lstrip": True}
    valid = (token, "<s>", "<new>", [token], {"5": token}, {"398": token}, ["a", "b"], 0.7, 3, "LlamaTokenizer", True)
    chosen = random.sample(names, random.randint(1, len(names)))
    return {name: random.choice(valid if random.random() < 0.6 else EXTREMES) for name in chosen}


def changed(data: bytes, random: Random) -> bytes:
    """Return the bytes with one to three changes: flipped, removed, repeated, or cut off."""
    content = bytearray(data)
    for _ in range(random.randint(1, 3)):
        start = random.randrange(len(content) or 1)
        end = start + random.randint(1, 64)
        match random.randrange(4):
            case 0 if content:
                content[min(start, len(content) - 1)] ^= 1 << random.randrange(8)
            case 1:
                del content[start:end]
            case 2:
                content[start:start] = content[start:end] * random.randint(1, 50)
            case _ if random.random() < 0.3:
                del content[start:]
    return bytes(content)


def tokenizer(random: Random, *, is_hostile: bool) -> dict[str, Any]:
    """Return a small tokenizer.json, whose parts and settings are random if it is hostile."""
    letters = [*map(chr, range(33, 127)), "Ġ", "▁", "é", "aa", "ab", "##a", "b</w>", "a" * 200]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocab = {token: index for index, token in enumerate(tokens)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [{"id": index, "content": tokens[index], **flags} for index in range(3)],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "unk_token": "<unk>", "vocab": vocab, "merges": [["a", "a"], ["a", "b"]]},
    }
    if not is_hostile:
        return content
    content["model"] = model(random, tokens)
    for name, sequence, part in (
        ("normalizer", "normalizers", normalizer),
        ("pre_tokenizer", "pretokenizers", pre_tokenizer),
        ("decoder", "decoders", decoder),
        ("post_processor", "processors", post_processor),
    ):
        if random.random() < 0.7:
            count = random.choice((1, 1, 1, 2, 2, 3, 3, 5, 70))
            parts = [part(random) for _ in range(count)]
            content[name] = parts[0] if count == 1 else {"type": "Sequence", sequence: parts}
    for name in ("padding", "truncation"):
        if random.random() < 0.1:
            content[name] = {"strategy": "LongestFirst", "direction": "Right", "pad_id": 0, "pad_type_id": 0}
            content[name] |= {"max_length": 2, "stride": random.choice((0, 1, 9)), "pad_token": "a"}
            if name == "padding":
                content[name]["strategy"] = {"Fixed": random.choice((9, 10**7, 2**60))}
                content[name]["pad_to_multiple_of"] = random.choice((None, 0, 8))
    if random.random() < 0.4:
        for _ in range(random.randint(1, 4)):
            replace_value(content, random)
    return content


def replace_value(content: Any, random: Random) -> None:
    """Replace a value somewhere within lists and objects by an extreme one."""
    while isinstance(content, list | dict) and content:
        key = random.choice(list(content) if isinstance(content, dict) else range(len(content)))
        if not isinstance(content[key], list | dict) or random.random() < 0.2:
            content[key] = copy.deepcopy(random.choice(EXTREMES))  # a later change must not reach the constant
            return
        content = content[key]


def model(random: Random, tokens: list[str]) -> dict[str, Any]:
    vocab = {token: index for index, token in enumerate(tokens)}
    if random.random() < 0.1:
        vocab["far"] = random.choice((2**31, 2**32 - 1, 10**6))
    kind = random.choice(("BPE", "BPE", "BPE", "WordPiece", "WordLevel", "Unigram"))
    if kind == "Unigram":
        scores = [[token, -random.choice((1.0, 3.5, 1e300))] for token in tokens]
        return {
            "type": kind,
            "unk_id": random.choice((0, None, 10**6)),
            "vocab": scores,
            "byte_fallback": random.random() < 0.5,
        }
    if kind == "WordLevel":
        return {"type": kind, "vocab": vocab, "unk_token": random.choice(("<unk>", "none"))}
    if kind == "WordPiece":
        limit = random.choice((100, 0, 1000, 10**12))
        prefix = random.choice(("##", ""))
        return {
            "type": kind,
            "vocab": vocab,
            "unk_token": "<unk>",
            "continuing_subword_prefix": prefix,
            "max_input_chars_per_word": limit,
        }
    return {
        "type": kind,
        "vocab": vocab,
        "merges": random.choice(([], [["a", "a"], ["a", "b"]], [["a", "none"]], ["a a", "a"])),
        "unk_token": random.choice(("<unk>", None, "none")),
        "dropout": random.choice((None, None, 0.5, 1.0, 2.0)),
        "continuing_subword_prefix": random.choice((None, "", "##", "#######")),
        "end_of_word_suffix": random.choice((None, "", "</w>")),
        "fuse_unk": random.random() < 0.5,
        "byte_fallback": random.random() < 0.5,
        "ignore_merges": random.random() < 0.5,
    }


def replace(random: Random) -> dict[str, Any]:
    pattern = (
        {"Regex": random.choice(REGEXES)}
        if random.random() < 0.5
        else {"String": random.choice(("a", " ", "▁", "", "aa"))}
    )
    return {
        "type": "Replace",
        "pattern": pattern,
        "content": random.choice(("", " ", "a", "aa", "▁", "aaa", "a" * 100)),
    }


def normalizer(random: Random) -> dict[str, Any]:
    charsmap = random.choice(("", "AAAA", "BAAAAAAAAABhYQA=", "//////////8=", "AAQAAA" + "A" * 1400))
    return random.choice(
        (
            replace(random),
            replace(random),
            {"type": random.choice(("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "ByteLevel"))},
            {"type": "Prepend", "prepend": random.choice(("▁", "", "a" * 900, "a" * 5000))},
            {"type": "Strip", "strip_left": random.random() < 0.5, "strip_right": random.random() < 0.5},
            {"type": "Precompiled", "precompiled_charsmap": charsmap},
            {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True},
        )
    )


def metaspace(random: Random) -> dict[str, Any]:
    scheme = random.choice(("always", "first", "never"))
    return {
        "type": "Metaspace",
        "replacement": random.choice("▁_a"),
        "prepend_scheme": scheme,
        "split": random.random() < 0.5,
    }


def byte_level(random: Random) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": random.random() < 0.5,
        "trim_offsets": True,
        "use_regex": random.random() < 0.5,
    }


def pre_tokenizer(random: Random) -> dict[str, Any]:
    behavior = random.choice(("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"))
    pattern = {"Regex": random.choice(REGEXES)} if random.random() < 0.8 else {"String": random.choice(("a", "", " "))}
    return random.choice(
        (
            metaspace(random),
            byte_level(random),
            {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": random.random() < 0.5},
            {"type": random.choice(("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "UnicodeScripts"))},
            {"type": "Digits", "individual_digits": random.random() < 0.5},
            {"type": "Punctuation", "behavior": behavior},
        )
    )


def decoder(random: Random) -> dict[str, Any]:
    counts = (0, 1, 2**60)
    return random.choice(
        (
            replace(random),
            metaspace(random),
            byte_level(random),
            {"type": random.choice(("ByteFallback", "Fuse"))},
            {"type": "Strip", "content": random.choice((" ", "a")), "start": random.choice(counts), "stop": 1},
            {"type": "Strip", "content": " ", "start": 0, "stop": random.choice(counts)},
            {"type": "WordPiece", "prefix": random.choice(("##", "")), "cleanup": random.random() < 0.5},
            {"type": "BPEDecoder", "suffix": random.choice(("</w>", ""))},
            {"type": "CTC", "pad_token": "a", "word_delimiter_token": random.choice(("|", "")), "cleanup": True},
        )
    )


def post_processor(random: Random) -> dict[str, Any]:
    special = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    ids = [1] * random.choice((1, 1, 3, 900, 5000))
    known = {"<s>": {"id": "<s>", "ids": ids, "tokens": ["<s>"] * random.choice((1, len(ids)))}}
    template = {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [first, second, special],
        "special_tokens": known,
    }
    return random.choice(
        (
            template,
            {**template, "single": []},
            {**template, "special_tokens": {}},
            byte_level(random),
            {"type": "BertProcessing", "sep": ["</s>", 2], "cls": ["<s>", 2**32 - 1]},
            {
                "type": "RobertaProcessing",
                "sep": ["</s>", 2],
                "cls": ["<s>", 1],
                "trim_offsets": True,
                "add_prefix_space": True,
            },
        )
    )


if __name__ == "__main__":
    sys.exit(main())
