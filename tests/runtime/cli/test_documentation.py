"""The passages that `quire demo` searches: sections of Markdown with the headings above them."""

from __future__ import annotations

from quire.runtime.cli.demo import DOCUMENTATION
from quire.runtime.cli.documentation import MAX_PASSAGE_CHARACTERS, Passage, read_documentation, read_page

WORDS = "one two three four five six seven eight"
PAGE = f"""{WORDS} before

# The page
{WORDS} of [the page](other.md#part)

### Deep ###
too short

| a | b |
|---|---|
| {WORDS} | end |
## Next
```sh
# no heading
{WORDS}
```
"""


def test_a_page_is_its_sections_with_their_headings() -> None:
    assert list(read_page("a.md", PAGE)) == [
        Passage("a.md", "a.md", f"{WORDS} before"),
        Passage("a.md", "The page", f"{WORDS} of the page"),
        Passage("a.md", "The page: Deep", f"too short\n\n| a | b |\n\n| {WORDS} | end |"),
        Passage("a.md", "The page: Next", f"```sh\n# no heading\n{WORDS}\n```"),
    ]


def test_a_long_section_is_several_passages_that_lose_no_line() -> None:
    lines = [f"{number} {WORDS}" for number in range(100)]
    passages = list(read_page("a.md", "\n".join(["# Long", *lines])))
    assert {passage.title for passage in passages} == {"Long"}
    assert len(passages) > 1
    assert max(len(passage.text) for passage in passages) <= MAX_PASSAGE_CHARACTERS
    assert "\n".join(passage.text for passage in passages).splitlines() == lines


def test_pages_without_words_and_empty_ones() -> None:
    assert list(read_page("a.md", "")) == list(read_page("a.md", "# Only\n## Headings\nof few words")) == []


def test_the_documentation_is_installed_with_the_package() -> None:
    passages = read_documentation(DOCUMENTATION)
    assert {"embeddings.md", "reference/options.md"} <= {passage.page for passage in passages}
    assert all(passage.title and passage.text for passage in passages)
