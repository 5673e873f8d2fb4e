"""Plain technical English: phrases that the style rules in CONTRIBUTING.md replace do not come back.

Every text file is searched: code with its comments, docstrings and messages, and documents.
"""

from __future__ import annotations

import re
import subprocess
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
        r"(quant|normal|optim|random|penal|organ|vector|recogn|initial|virtual|serial|summar|minim|maxim|priorit"
        r"|special|general|material|synchron|util|parametr|canonical|token)is(e|ed|es|er|ing|ation|able)(?-i:(?![a-z]))"
    ): "American spelling: -ize",
    r"(col|neighb|behavi|hon|fav|lab|flav)our": "American spelling: -or",
    r"\b(licence|grey|centre|catalogue|analyse|artefact|defence)": "American spelling",
    r"\b(travel|label|model|signal)l(ed|ing)\b": "American spelling: one l",
}


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
    return [
        (number, match.group(), advice)
        for number, line in enumerate(text.splitlines(), 1)
        for pattern, advice in BANNED.items()
        for match in re.finditer(pattern, line, re.IGNORECASE)
    ]


def test_no_banned_phrase():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {phrase!r}: {advice}"
        for path in text_files()
        for number, phrase, advice in findings(path.read_text("utf-8"))
    ]
    assert not found, f"{len(found)} banned phrases\n" + "\n".join(found)


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
