"""Read outputs of every family of tool calls in pieces, and cut off anywhere: the deltas depend on the text alone.

usage: python -m tests.fuzz.parser_divisions [--groupings 1000] [--outputs 8] [--seed 1]

The outputs are the samples of tests/runtime/engine/markup/test_markup.py, and texts that the grammar of each markup
allows. Each is read as a whole, one character at a time, in all divisions into two pieces, and in random ones. Cut
after any character, it must show the beginning of what it shows as a whole, and so no markup. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator

from quire.runtime.engine.markup.argument_streams import SPACE
from quire.runtime.engine.markup.markup_parser import OutputParser
from quire.runtime.engine.structured.tool_calls import ToolCalls

from tests.runtime.engine.markup.test_markup import BOTH, Read, parser, read
from tests.runtime.engine.structured.test_tool_calls import MARKUPS, TOOLS, choices, outputs

NewParser = Callable[[], OutputParser]


def texts(num_outputs: int, seed: int) -> Iterator[tuple[str, NewParser, str, bool]]:
    """Yield a name, the constructor of a parser, a text, and whether the text is cut."""
    for number, (markup, text, _) in enumerate(BOTH):
        yield f"sample {number}", lambda markup=markup: parser(markup), text, False
    for number, markup in enumerate(MARKUPS):
        for choice in choices():
            calls = ToolCalls(markup, TOOLS, choice)
            structure = calls.structure("prompt", None)
            new_parser = calls.new_parser("prompt", None)
            for each in range(num_outputs if new_parser is not None else 0):
                text, is_cut = outputs(structure, seed * 10_000 + each)
                yield f"markup {number}, {choice.needed}, {each}", new_parser, text, is_cut


def divisions(text: str, num_groupings: int, chance: random.Random) -> Iterator[list[str]]:
    """Yield the text as pieces."""
    yield list(text)
    yield from ([text[:at], text[at:]] for at in range(1, len(text)))
    for _ in range(num_groupings):
        cuts = sorted(chance.choices(range(len(text) + 1), k=chance.randint(2, 30)))
        yield [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def is_beginning(part: Read, whole: Read) -> bool:
    """Return whether the output for a cut text begins the output for the whole, except for white space at the end."""
    if part and not part[-1][1].strip(SPACE):
        part = part[:-1]
    if len(part) > len(whole):
        return False
    for index, ((kind, text), (whole_kind, whole_text)) in enumerate(zip(part, whole, strict=False)):
        is_last = index == len(part) - 1
        if kind != whole_kind or (not whole_text.startswith(text.rstrip(SPACE)) if is_last else text != whole_text):
            return False
    return True


def faults(new_parser: NewParser, text: str, is_cut: bool, pieces: Iterator[list[str]]) -> Iterator[str]:
    """Yield the faults in the reading of a text."""
    whole = read(new_parser(), [text], is_cut=is_cut)
    for each in pieces:
        if (found := read(new_parser(), each, is_cut=is_cut)) != whole:
            yield f"{each} reads {found}, the whole {whole}"
    for end in range(len(text)):
        if not is_beginning(found := read(new_parser(), [text[:end]], is_cut=True), whole):
            yield f"{text[:end]!r} reads {found}, the whole {whole}"


def main() -> int:
    """Read and report; return the exit status."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--groupings", type=int, default=1000)
    arguments.add_argument("--outputs", type=int, default=8)
    arguments.add_argument("--seed", type=int, default=1)
    options = arguments.parse_args()
    chance = random.Random(options.seed)
    started = time.monotonic()
    num_texts = num_faults = 0
    for name, new_parser, text, is_cut in texts(options.outputs, options.seed):
        num_texts += 1
        for fault in faults(new_parser, text, is_cut, divisions(text, options.groupings, chance)):
            num_faults += 1
            if num_faults <= 20:
                print(f"{name}: {fault}")
    print(f"{num_texts} outputs, {num_faults} faults, {time.monotonic() - started:.0f} s")
    return 1 if num_faults or not num_texts else 0


if __name__ == "__main__":
    raise SystemExit(main())
