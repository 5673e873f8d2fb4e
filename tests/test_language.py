"""Plain technical English: phrases that the style rules in CONTRIBUTING.md replace do not come back.

Every text file is searched: code with its comments, docstrings and messages, and documents.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".py", ".pyx", ".pxd", ".c", ".h", ".md", ".toml", ".yaml", ".yml", ".sh", ".build", ".html", ".js", ".mjs"}
NOT_OURS = ("runtime/demo_model/", "tests/data/", "tests/goldens/", "tests/test_language.py")

BANNED = {  # pattern, case ignored -> what to write
    r"\bwho(m|ever|mever)?\b": "name the subject: the request, the client, the worker; `that` or `which` for things",
    r"\b(some|no|any|every)body\b": "name the subject",
    r"\bso (many|much more|much of)\b": "`N tokens`",
    r"\b(must not know|knows? (no|nothing|neither)\b)": "`must not import X`, `independent of X`",
    r"\bthe one (invariant|place|thing)\b": "state the invariant, or name the place",
    r"\bof ours\b": "name the package",
    r"\b(luck|lucky|accus\w+|on trial|bury|buried|buries|innocents?|to blame|his)\b": "a process is not a person",
    r"\b(is|are|was|were|be|been|being) told\b": "`receives`, `is notified of`",
    r"\bfeels?_?(the )?pulse\b": "check the heartbeat",
    r"\bin (any|whatever|which) company\b": "in any batch composition",
    r"\bthe front\b": "the API server process",
    r"\b(the house|floors|roofs|rooms|(a|the|this|each|every|which|its) room)\b": "layers, packages, roofline",
    r"\bguess(es|ed|ing)?\b": "draft tokens",
    r"\b(seats?|waiting_?room)\b": "sequence slots, request queue",
    r"\b(dealt|deal|deals) out\b": "partition",
    r"\bpulses?\b": "heartbeat",
    (
        r"(?=is)((?<=quant)|(?<=normal)|(?<=optim)|(?<=random)|(?<=penal)|(?<=organ)|(?<=vector)|(?<=recogn)"
        r"|(?<=initial)|(?<=virtual)|(?<=serial)|(?<=summar)|(?<=minim)|(?<=maxim)|(?<=priorit)|(?<=special)"
        r"|(?<=general)|(?<=material)|(?<=synchron)|(?<=util)|(?<=parametr)|(?<=canonical)|(?<=token))"
        r"is(e|ed|es|er|ing|ation|able)(?-i:(?![a-z]))"
    ): "American spelling: -ize",  # begins with letters that few words have: a search tries each place
    r"(?=our)((?<=col)|(?<=neighb)|(?<=behavi)|(?<=hon)|(?<=fav)|(?<=lab)|(?<=flav))our": "American spelling: -or",
    r"\b(licence|grey|centre|catalogue|analyse|artefact|defence)": "American spelling",
    r"\b(travel|label|model|signal)l(ed|ing)\b": "American spelling: one l",
}

WORDS = [pattern.removeprefix(r"\b") for pattern in BANNED if pattern.startswith(r"\b")]
OTHERS = [pattern for pattern in BANNED if not pattern.startswith(r"\b")]
ANY_BANNED = re.compile("|".join([rf"\b(?:{'|'.join(WORDS)})", *OTHERS]), re.IGNORECASE)  # one search of a clean file

OPENINGS = {  # pattern in a sentence of a document or docstring -> advice
    r"^What\b(?!.*\?$)": "name the thing: `The memory of a process`, not `What a process takes`",
    r"^Those (of|in|with|from|for|that|which|whose|are|were)\b": "name the things",
    r"^(Of|Beside)\b": "begin with the subject: `A text that is too long is cut`, not `Of a long text, …`",
    r"\bthose (that|which|whose)\b": "name the things: `requests that wait`",
    r"\bthat which\b": "name the thing",
    r"\b(go|goes|going|went|gone) on\b": "continue",
}
NOT_DOCUMENTS = ("tests/bench/LOG.md",)  # a log
CONTINUATIONS = (  # words that continue the sentence of the code before a trailing comment
    "of|that|whose|which|whom|and|or|those|its?|they|their|them|where|so|also|but|these|this|there|nor|than|what"
    "|in|for|by|with|from|to|into|as|at|on|until|after|before|between|without|while|since|if|when|through|under|over"
    "|beyond|within|among|against|upon|besides?|during|unless|because|though|although|then|else"
)
CONTINUED_COMMENT = re.compile(
    rf"^[ \t]*(?!#|//|/\*|\*)\S.*?\s(?:#|//|/\*) ((?:{CONTINUATIONS})(?![-\w]).*)$", re.MULTILINE
)


def text_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    names = listed or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
    return [
        ROOT / name
        for name in names
        if Path(name).suffix in SUFFIXES and not name.startswith((*NOT_OURS, ".", "build/")) and (ROOT / name).is_file()
    ]


def findings(text: str) -> list[tuple[int, str, str]]:
    """Line number, phrase and advice for each banned phrase in `text`."""
    if not ANY_BANNED.search(text):
        return []
    return [
        (text.count("\n", 0, match.start()) + 1, match.group(), advice)
        for pattern, advice in BANNED.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]


def prose(path: Path) -> Iterator[str]:
    """Yield the paragraphs, list items, table cells and headings of a document, or of the docstrings of a module."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        yield from blocks(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    elif path.suffix == ".pyx":
        yield from (block for docstring in re.findall(r'"""(.*?)"""', text, re.DOTALL) for block in blocks(docstring))
    else:
        yield from (block for docstring in docstrings(ast.parse(text)) for block in blocks(docstring))


def docstrings(node: ast.AST) -> Iterator[str]:
    """Yield the docstrings of a statement and of the statements inside it. Expressions, most nodes, have none."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield ast.get_docstring(node) or ""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from docstrings(child)


def blocks(text: str) -> Iterator[str]:
    """Yield the parts of a text between blank lines, in which list items, cells and headings are parts of their own."""
    begin = re.compile(r"\s*(\* |- |\d+\. |#+ |\|)")
    block = ""
    for line in [*text.splitlines(), ""]:
        if not line.strip() or begin.match(line) or block.startswith("#"):
            yield from filter(None, re.split(r"\s*\|\s*", block))
            block = ""
        block = f"{block} {line.strip()}".strip()


def openings(block: str) -> Iterator[tuple[str, str]]:
    """Yield the sentences of a block that an opening is banned from, with the advice."""
    text = re.sub(r"``[^`]+``|`[^`]*`", "`…`", re.sub(r"^(\* |- |\d+\. |#+ )", "", block).replace("**", ""))
    for sentence in re.split(r"(?<=[.;:?!]) +", text):
        yield from ((sentence, advice) for pattern, advice in OPENINGS.items() if re.search(pattern, sentence))


def test_no_banned_phrase():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {phrase!r}: {advice}"
        for path in text_files()
        for number, phrase, advice in findings(path.read_text("utf-8"))
    ]
    assert not found, f"{len(found)} banned phrases\n" + "\n".join(found)


def test_sentences_of_documents_and_docstrings_name_their_nouns():
    found = []
    for path in text_files():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in (".md", ".py", ".pyx") and name not in NOT_DOCUMENTS:
            found += [f"{name}: {sentence}: {advice}" for block in prose(path) for sentence, advice in openings(block)]
    assert not found, f"{len(found)} sentences\n" + "\n".join(found)


def test_a_trailing_comment_is_a_noun_phrase_or_a_sentence_of_its_own():
    found = [
        f"{path.relative_to(ROOT)}: {comment}"
        for path in text_files()
        if path.suffix not in (".md", ".html", ".css")
        for comment in CONTINUED_COMMENT.findall(path.read_text("utf-8"))
    ]
    assert not found, f"{len(found)} trailing comments\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("    MAX_TEXTS = 64  # of one batch", ["of one batch"]),
        ("cdef int64_t next     # what comes after", ["what comes after"]),
        ("  int at;  // in the rows", ["in the rows"]),
        ("  int at;  /* with the first one */", ["with the first one */"]),
        ("replicas: 1 # as in the base", ["as in the base"]),
        ("MAX_TEXTS = 64  # texts of one batch", []),
        ("    # of one batch", []),
        ("    const int a;  // in-place result", []),
        (" * in the rows // of a comment", []),
    ],
)
def test_a_trailing_comment_that_continues_the_code_is_found(line: str, found: list[str]):
    assert CONTINUED_COMMENT.findall(line) == found


@pytest.mark.parametrize(
    "text",
    [
        "What nothing refers to any more does not count.",
        "The log has them. What is left is sent.",
        "* Those of the last image are kept.",
        "| rows | Of a long text, the model gets as much as it takes. |",
        "### Beside llama.cpp",
        "Its requests go on at others.",
        "It keeps those that ended, and\ndrops the rest.",
        "A row is that which a step computes.",
    ],
)
def test_an_opening_without_its_noun_is_found(text: str):
    assert [advice for block in blocks(text) for _, advice in openings(block)]


@pytest.mark.parametrize(
    "text",
    [
        "What does scheduling cost per sequence?",
        "Those two requests run. The rest of the text follows, of course.",
        "The log says what is left. `What it is` and `those that` are quoted.",
        "Speed beside llama.cpp, one page at a time.",
        "It is going to be sent; it went to the next one.",
    ],
)
def test_a_sentence_that_names_its_noun_is_accepted(text: str):
    assert [advice for block in blocks(text) for _, advice in openings(block)] == []


@pytest.mark.parametrize(
    "text",
    [
        "Whom `request` could take pages from.",
        "So many more of its sequences run, which may come to hold so many pages; fewer where negative.",
        "It asks nobody for a key: keep it inside.",
        "whoever works on a query tile norms, rotates and scales its queries on his own desk",
        "De-quantises each NormalisedRow of labelled neighbours.",
        "says what it is, what it must not know, the one invariant it keeps",
    ],
)
def test_the_list_finds_what_it_is_for(text: str):
    assert findings(text)
