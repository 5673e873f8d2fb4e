"""Grammars in llama.cpp's notation accept the texts that llama.cpp accepts, and no others."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from llguidance import LLMatcher
from quire.runtime.common.errors import InvalidRequest
from quire.runtime.common.types import StructuredOutputs
from quire.runtime.engine.structured.grammar_vocabulary import load_tables
from quire.runtime.engine.structured.grammars import check_structure, grammar_of
from quire.runtime.engine.text_processor import TextProcessor
from quire.runtime.model import BUNDLED_MODEL

TOKENIZER = TextProcessor.load(BUNDLED_MODEL).tokenizer
assert TOKENIZER is not None
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
CHESS = r"""
# Specifies chess moves as a list in algebraic notation, using PGN conventions
root ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle ::= "O-O" "-O"?
"""
LIST = r"""
root ::= item+

# Excludes various line break characters
item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"
"""
JAPANESE = """
root     ::= jp-char+ ([ \\t\\n] jp-char+)*
jp-char  ::= hiragana | katakana | punctuation | cjk
hiragana ::= [ぁ-ゟ]
katakana ::= [ァ-ヿ]
punctuation ::= [、-〾]
cjk      ::= [一-鿿]
"""


@cache
def tables() -> Any:
    return load_tables(BUNDLED_MODEL)


@pytest.mark.parametrize(
    ("grammar", "valid", "invalid"),
    [
        (
            JSON,
            ['{"a": [1, -2.5e+3, "x\\u00e9\\n"], "b":{}}', '{"é": null}'],
            ['{"a": 01}', '{"a"}', "[1]", '{"a":"\x7f"}'],
        ),
        (ARITHMETIC, ["a +b*(c-1)=3\n", "1=2\nx=y\n"], ["1=", "=1\n", "A=1\n"]),
        (CHESS, ["1. e4 e5\n2. Nf3 Nc6\n", "1. e4 e5\n2. O-O exd5+\n"], ["1. e4 e5\n", "1. e9 e5\n2. e4 e5\n"]),
        (LIST, ["- a\n- b é\n"], ["- a", "- \n", "- a\u2028\n", "- a\x85\n"]),
        (JAPANESE, ["これは 猫", "カ"], ["a", " これ"]),
        ("root ::= [a&&b]+", ["a&b"], ["c"]),
        ("root ::= [^&&]+", ["a", "\n"], ["&"]),
        ("root ::= [+--]", ["+", ",", "-"], ["."]),
        ("root ::= [a~~b]+ [[a]+ [\\]x-]", ["~a[a]", "b[-"], ["c[]", "a[a\\"]),
        ("root ::= [a-] [-b] [\\--/]", ["a-.", "--/"], ["ab0", "c--"]),
        ("root ::= [^^] [.] [\\n\\t] [$*]", ["a.\n$", "x.\t*"], ["^.\n$", "aa\n$"]),
        ('root ::= "\\u00e9" "\\U0001F600" "\\x41" "\\\\ \\" \\n\\t[]"', ['é\U0001f600A\\ " \n\t[]'], ["éA"]),
        ("root ::= [\\u00e0-\\u00ff] [\\U0001F600-\\U0001F64F]", ["é\U0001f601"], ["a\U0001f601", "éa"]),
        ('root ::= start\nstart ::= "a" | TEXT | rule_0\nTEXT ::= "b"\nrule_0 ::= "c"', ["a", "b", "c"], ["d"]),
        ("root ::= . .", ["a\n", "é\U0001f600"], ["a", "abc"]),
        ('root ::= "a"{2} "b"{1,} "c"{0,2} "d"{3,3}', ["aabddd", "aabbccddd"], ["abddd", "aaddd", "aabcccddd"]),
        ('root ::= ("a" | "b" "c")? [d]* ("e"+)?', ["", "a", "bcdd", "dee"], ["b", "ea"]),
        ('root ::= "a" |\n  "b" # comment "x"\n# another ::= line\nrest ::= "c"', ["a", "b"], ["c", "ab"]),
        ('root ::= "(" root ")" | [a-f]+', ["a", "((f))"], ["(a", "g", "()"]),
        ('root ::= x "." \nx ::= x "+" y | y\ny ::= "-"? [0-9]+ | "(" x ")"', ["1+-2+(3+4)."], ["1+.", "(1."]),
        ('root ::= a b\na ::= ("x" a)?\nb ::= | "y" b', ["", "xxyy", "y"], ["yx"]),
        ('root ::= a "x"\na ::= "(" a ")" | "x"+ | "xy" | "xyx"', ["xx", "xxx", "(xx)x", "xyx", "xyxx"], ["x", "xy"]),
        ('root ::= "[" list "]"\nlist ::= word ("," list)?\nword ::= [a-z]+ [a-z0-9]* "z"?', ["[a,bz0z,zz]"], ["[0a]"]),
        ('root ::= x+ "end"\nx ::= "(" x ")" | [a-z]+', ["aend", "endend", "(a)end", "a(b)end"], ["end", "ae"]),
        ('root ::= ""', [""], ["a"]),
        ('root ::= "#" [#] # [ "', ["##"], ["#"]),
        ('root ::= (\n"a"\n|\n"b"\n) "c"\n\n', ["ac", "bc"], ["a"]),
        ('root ::= "/" [/] "a//b"', ["//a//b"], ["/"]),
        ('root ::= "a"*? "b"+{2}', ["abb", "bb"], ["b", "ac"]),
        ("root ::= " + '("a")? ' * 120, ["", "aaa", "a" * 120], ["b", "a" * 121]),
        ('root ::= "a" "b"? x\nx ::= "b" x "c" | "d"', ["ad", "abd", "abdc", "abbdc", "abbdcc"], ["abc", "abbd", "d"]),
        ('root ::= "a" ("b" "e"?)* x\nx ::= "b" x "c" | "d"', ["abed", "abebdc", "abbdcc"], ["aed", "dc", "abdcc"]),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_texts_of_a_grammar(grammar: str, valid: list[str], invalid: list[str]) -> None:
    structure = StructuredOutputs(gbnf=grammar)
    check_structure(structure)
    matcher = LLMatcher(tables(), grammar_of(structure), log_level=0)

    def is_complete(text: str) -> bool:
        tokens = TOKENIZER.encode(text, add_special_tokens=False)
        reader = matcher.deep_copy()
        return reader.try_consume_tokens(tokens) == len(tokens) and reader.is_accepting()

    assert [text for text in valid if not is_complete(text)] == []
    assert [text for text in invalid if is_complete(text)] == []


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("# nothing", "needs a rule named root"),
        ('a ::= "b"', "needs a rule named root"),
        ("root ::= x", "the rule 'x', to which the rule 'root' refers, is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2 .*the rule 'root' is defined twice"),
        ('root = "a"', "line 1 .*::= must follow the name of the rule 'root'"),
        ('root ::= "a', "line 1 .*a quotation mark is missing"),
        ("root ::= [a", "a closing bracket is missing"),
        ("root ::= []", "a class has no characters"),
        ("root ::= [z-a]", "a range of characters ends before it begins"),
        ('root ::= ("a"', "a closing parenthesis is missing"),
        ('root ::= "a")', "expected the end of the line"),
        ("root ::= *", "a repetition must follow what it repeats"),
        ('root ::= "a"{x}', r"expected a number of repetitions, as in \{2\}"),
        ('root ::= "a"{3,2}', "repetitions are at most 2000"),
        ('root ::= "a"{2001}', "repetitions are at most 2000"),
        ('root ::= "a"{2001,}', "repetitions are at most 2000"),
        ('root ::= "a"{1,2001}', "repetitions are at most 2000"),
        ('root ::= "a"{0,999999999}', "repetitions are at most 2000"),
        (r'root ::= "\q"', r"expected an escape: \\n"),
        (r'root ::= "\ud800"', "there is no character with the code 0xd800"),
        (r'root ::= "\UFFFFFFFF"', "there is no character with the code 0xffffffff"),
        ("root ::= <think>", "tokens in angle brackets are not supported"),
        ("root ::= " + "(" * 101, "more than 100 parentheses are open"),
        ('\n\nroot ::= "a" %', "line 3 "),
        ("# " + "x" * 40_000, "at most 32768 characters"),
    ],
)
def test_a_grammar_that_llama_cpp_cannot_read_is_refused_with_the_reason(grammar: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^structured_outputs: .*{reason}"):
        check_structure(StructuredOutputs(gbnf=grammar))


def test_rules_that_use_each_other_many_times_stay_short() -> None:
    rules = [f"r{index} ::= r{index + 1} r{index + 1}" for index in range(40)]
    structure = StructuredOutputs(gbnf="\n".join(["root ::= r0", *rules, 'r40 ::= "abc"']))
    assert len(grammar_of(structure)) < 100_000
