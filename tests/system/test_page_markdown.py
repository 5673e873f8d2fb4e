"""Markdown on the chat page, in headless Chromium: the drawing of complete, streaming and hostile texts.

Expected markup is that of CommonMark and GitHub's tables, except that line breaks stay, and that HTML, images
and addresses outside of the web are not drawn.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from .chromium import OpenTab, Tab, needs_chromium

pytestmark = needs_chromium

# Draws a text that comes in pieces. Reports the markup without spans, classes and the attributes of all links.
DRAW = """async (pieces, ends) => {
  const { MarkdownView } = await import("./markdown_view.js");
  const view = new MarkdownView();
  let text = "";
  for (const piece of pieces) view.update(text += piece, true);
  if (ends) view.update(text, false);
  const shown = view.element.cloneNode(true);
  for (const each of shown.querySelectorAll(".code-head button")) each.remove();
  for (const each of shown.querySelectorAll(":is(p, h3, h4, h5, h6) > span")) each.replaceWith(...each.childNodes);
  for (const each of shown.querySelectorAll('[class=""]')) each.removeAttribute("class");
  return shown.innerHTML;
}"""
# Lists elements and attributes that are not expected, and addresses of links.
INSPECT = """async (text) => {
  const { MarkdownView } = await import("./markdown_view.js");
  const view = new MarkdownView();
  for (let at = 0; at < text.length; at += 997) view.update(text.slice(0, at + 997), true);
  view.update(text, false);
  document.body.append(view.element);
  const all = [...view.element.querySelectorAll("*")];
  const tags = [...new Set(all.map((each) => each.localName))];
  const attributes = [...new Set(all.flatMap((each) => each.getAttributeNames()))];
  const links = [...view.element.querySelectorAll("a")].map((each) => each.protocol);
  const shown = view.element.textContent;
  view.element.remove();
  return [tags, attributes, links, shown];
}"""
TAGS = {
    "a", "blockquote", "br", "button", "code", "del", "div", "em", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
    "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
}  # fmt: skip
ATTRIBUTES = {"class", "href", "rel", "start", "target", "title", "type"}
LINK = 'target="_blank" rel="noopener noreferrer nofollow"'


def code(text: str, language: str = "") -> str:
    head = f'<div class="code-head"><span>{language}</span></div>'
    return f'<div class="code">{head}<pre><code>{text}</code></pre></div>'


def table(head: str, *rows: str) -> str:
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def link(href: str, text: str) -> str:
    return f'<a href="{href}" title="{href}" {LINK}>{text}</a>'


def bare(href: str) -> str:
    return link(href, href)


async def drawn(tab: Tab, *pieces: str, ends: bool = True) -> str:
    """Return the markup that the page draws of a text in pieces."""
    return str(await tab.evaluate(f"({DRAW})({json.dumps(pieces)}, {json.dumps(ends)})"))


async def check(tab: Tab, cases: Sequence[tuple[str, str]]) -> None:
    assert [(text, await drawn(tab, text)) for text, _ in cases] == list(cases)


async def test_blocks(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    await check(
        tab,
        [
            ("# One\n###### Six ##", '<h3 class="level1">One</h3><h6 class="level6">Six</h6>'),
            ("One\n===\nTwo\n---", '<h3 class="level1">One</h3><h4 class="level2">Two</h4>'),
            ("#no heading", "<p>#no heading</p>"),
            ("a\nb\n\nc", "<p>a<br>b</p><p>c</p>"),
            ("***\na", "<hr><p>a</p>"),
            ("> a\nb\n>> c", "<blockquote><p>a<br>b</p><blockquote><p>c</p></blockquote></blockquote>"),
            ("- a\n  - b\n* c", "<ul><li><p>a</p><ul><li><p>b</p></li></ul></li></ul><ul><li><p>c</p></li></ul>"),
            ("3. a\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'),
            ("- a\n\n- b", '<ul class="loose"><li><p>a</p></li><li><p>b</p></li></ul>'),
            ("2 is\n2. no item", "<p>2 is<br>2. no item</p>"),
            ("```py\na = '<b>'\n\n\tb\n```\nc", code("a = '&lt;b&gt;'\n\n\tb", "py") + "<p>c</p>"),
            ("~~~\n```\n~~~", code("```")),
            ("````\n```\n````", code("```")),
            ("- ```\n  a\n   b\n  ```", f"<ul><li>{code('a' + chr(10) + ' b')}</li></ul>"),
            ("    a\n\n    b\nc", code("a\n\nb") + "<p>c</p>"),
            ("a | b\n:--|--:\nc", table('<th class="left">a</th><th class="right">b</th>', '<td class="left">c</td>')),
            ("|a|b|\n|-|-|\n|`c\\|d`|e|f|", table("<th>a</th><th>b</th>", "<td><code>c|d</code></td><td>e</td>")),
            ("a\nb\n-|-\nc", "<p>a<br>b<br>-|-<br>c</p>"),
            ("a\n|b|\n|-|", "<p>a</p>" + table("<th>b</th>")),
            ("a | b\n--", '<h4 class="level2">a | b</h4>'),
        ],
    )


async def test_text_within_blocks(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    texts = [
        ("*a* _b_ **c** ~~d~~", "<em>a</em> <em>b</em> <strong>c</strong> <del>d</del>"),
        ("***e***", "<em><strong>e</strong></em>"),
        ("snake_case_name 2 * 3 * 4 ~5", "snake_case_name 2 * 3 * 4 ~5"),
        ("**a *b* c**", "<strong>a <em>b</em> c</strong>"),
        ("`a` ``b`c`` `**d**`", "<code>a</code> <code>b`c</code> <code>**d**</code>"),
        (r"\*a\* \q", r"*a* \q"),
        ("` a ` `` ` `` ` `", "<code>a</code> <code>`</code> <code> </code>"),
        ("a<br>b<br/>c", "a<br>b<br>c"),
        ("&lt;b&gt; &amp;", "&amp;lt;b&amp;gt; &amp;amp;"),
        ("[a *b*](https://c.d/e_f \"t\")", link("https://c.d/e_f", "a <em>b</em>")),
        ("see https://a.b/c_d_e(f), (https://a.b)", f"see {bare('https://a.b/c_d_e(f)')}, ({bare('https://a.b')})"),
        ("<mailto:a@b.c> <https://a.b>", f"{link('mailto:a@b.c', 'a@b.c')} {bare('https://a.b')}"),
        ("[https://a.b](https://c.d)", link("https://c.d", "https://a.b")),
        ("[a](b) [c]", "[a](b) [c]"),
        ("![a](https://b.c/d.png)", link("https://b.c/d.png", "a")),
    ]  # fmt: skip
    await check(tab, [(text, f"<p>{markup}</p>") for text, markup in texts])


async def test_addresses_that_are_not_of_the_web_are_text(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    for address in (
        "javascript:alert(1)", "JaVaScRiPt:alert(1)", "java\tscript:alert(1)", "\x01javascript:alert(1)", "vbscript:x",
        "data:text/html,<script>alert(1)</script>", "file:///etc/passwd", "//evil.example", "/v1/models", "blob:x",
        "javascript://https://a.b/%0aalert(1)", "about:blank", "java&#115;cript:x", "https:evil", "ht\u200btp://a.b",
    ):  # fmt: skip
        for text in (f"[a]({address})", f"[a](<{address}>)", f"![a]({address})", f"<{address}>"):
            markup = await drawn(tab, text)
            assert 'href="javascript' not in markup.lower()
            assert "<a" not in markup or "https://a.b" in text, text


async def test_an_address_with_invisible_characters_ends_before_them(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    shown = [await drawn(tab, text.format("https://a.b/\u202egpj.exe")) for text in ("[c]({})", "<{}>", "{}")]
    begun = bare("https://a.b/") + "\u202egpj.exe"
    assert shown == [f"<p>[c]({begun})</p>", f"<p>&lt;{begun}&gt;</p>", f"<p>{begun}</p>"]


async def test_no_hostile_text_becomes_an_element_of_its_own(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    rng = random.Random(1)
    parts = [
        "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<svg onload=alert(1)>", '" onclick="alert(1)',
        "<a href=",
        "[x](javascript:alert(1))", "[x](https://a.b \" onmouseover=alert(1) \")", "<https://a.b\"onclick=alert(1)>",
        "```html\n",
        "```\" onload=\"x\n", "\n", "\n\n", "- ", "> ", "1. ", "| a | b |\n|---|---|\n|", "**", "*", "_",
        "`", "[", "](", ")", "~~",
        "\u202e", "\0", "\ud83d\ude00", "<style>*{display:none}</style>", "<iframe src=//a.b>",
        "https://a.b/<script>", "# ", "\\",
    ]  # fmt: skip
    for _ in range(60):
        text = "".join(rng.choice(parts) for _ in range(rng.randint(1, 40)))
        tags, attributes, links, _ = await tab.evaluate(f"({INSPECT})({json.dumps(text)})")
        assert (set(tags) - TAGS, set(attributes) - ATTRIBUTES) == (set(), set()), text
        assert set(links) <= {"http:", "https:", "mailto:"}, text


async def test_huge_nesting_is_drawn_as_text(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    for unit in (
        "> ", "- ", "1. ", ">", "* * ", "[", "![", "[a](", "](", "**a ", "*a", "_a_", "`a``", "~~a", "\\", "<", "<https://",
        "https://a.b(", "| ", "# ", "a ", "\t", " ", "a|", "-", "é日", "&", "\"", "[a](https://b.c \"",
    ):  # fmt: skip
        text = unit * (6000 // len(unit))
        tags, _, _, shown = await tab.evaluate(f"({INSPECT})({json.dumps(text + chr(10) + text + 'end')})")
        assert set(tags) <= TAGS
        assert shown.endswith("end") or "end" in shown, unit
    quotes = await tab.evaluate("""import("./markdown_view.js").then(({ MarkdownView }) => {
      const view = new MarkdownView();
      view.update(">".repeat(5000) + "a", false);
      return view.element.querySelectorAll("blockquote").length;
    })""")
    assert quotes == 15


STREAMED = """# Title
A **bold** word, `code`, and [a link](https://a.b/c).

- one
  - two

    more
- three

```py
def f():
\treturn "```"

```
| a | b |
|---|:-:|
| 1 | 2 |

> quote
lazy

Setext
---
1. x
2. y
"""


async def test_a_text_that_streams_is_drawn_as_the_whole_one(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    whole = await drawn(tab, STREAMED)
    assert await drawn(tab, *STREAMED) == whole
    rng = random.Random(2)
    for _ in range(8):
        cuts = [0, *sorted(rng.sample(range(1, len(STREAMED)), 12)), len(STREAMED)]
        assert await drawn(tab, *(STREAMED[a:b] for a, b in pairwise(cuts))) == whole
    for end in range(0, len(STREAMED), 7):
        assert await drawn(tab, *STREAMED[:end]) == await drawn(tab, STREAMED[:end]), end


async def test_what_has_not_ended_is_drawn_as_far_as_it_is_known(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    shown = [
        await drawn(tab, text, ends=False)
        for text in ("a\n``", "a\n```py\nx = 1", "a **b", "a ~~b", "a `b", "a\n-", "a\n- b", "|a|b|\n|-", "1", "1. b")
    ]
    assert shown == [
        "<p>a</p>",
        "<p>a</p>" + code("x = 1", "py"),
        "<p>a <strong>b</strong></p>",
        "<p>a ~~b</p>",
        "<p>a <code>b</code></p>",
        "<p>a</p>",
        "<p>a</p><ul><li><p>b</p></li></ul>",
        "<p>|a|b|</p>",
        "",
        '<ol start="1"><li><p>b</p></li></ol>',
    ]
    ended = [await drawn(tab, text) for text in ("a\n``", "a **b", "a `b", "a\n-", "1")]
    assert ended == ["<p>a<br>``</p>", "<p>a **b</p>", "<p>a `b</p>", '<h4 class="level2">a</h4>', "<p>1</p>"]


async def test_blocks_that_are_complete_are_not_drawn_again(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    count = """async (start, unit, times) => {
      const { MarkdownView } = await import("./markdown_view.js");
      const view = new MarkdownView();
      const create = document.createElement, append = Element.prototype.append;
      let made = 0, text = start;
      document.createElement = function (...given) { made += 1; return create.apply(this, given); };
      Element.prototype.append = function (...given) { made += given.length; return append.apply(this, given); };
      for (let number = 0; number < times; number += 1) view.update(text += unit, true);
      Object.assign(document, { createElement: create });
      Element.prototype.append = append;
      return made;
    }"""
    for start, unit in (
        ("", "A *line*.\n\n"), ("", "- an item\n"), ("", "  - a\n    1. b\n"), ("", "```\na\n```\n"),
        ("", "| a | b |\n|-|-|\n"),
        ("", "> a\n\n"), ("", "a word "), ("```\n", "a line\n"), ("    a\n", "    b\n\n"), ("| a |\n|-|\n", "| b |\n"),
        ("> - ", "a\n> - "),
        ("", "x" * 3000), ("- ", "a *b* " * 500),
    ):  # fmt: skip
        few, many = [await tab.evaluate(f"({count})({json.dumps(start)}, {json.dumps(unit)}, {n})") for n in (20, 40)]
        assert many <= 2.2 * few, (start, unit)


async def test_the_elements_of_complete_blocks_stay(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    script = """import("./markdown_view.js").then(({ MarkdownView }) => {
      const view = new MarkdownView();
      view.update("one\\n\\ntwo\\n\\nthr", true);
      const [first, second] = view.element.children;
      view.update("one\\n\\ntwo\\n\\nthree\\n\\nfour", true);
      return [first === view.element.children[0], second === view.element.children[1], view.element.children.length];
    })"""
    assert await tab.evaluate(script) == [True, True, 4]


async def test_code_is_copied_with_and_without_the_clipboard(system: Any, open_tab: OpenTab) -> None:
    tab = await open_tab(system.server.openai_address)
    await tab.until("!document.getElementById('send').disabled")
    await tab.evaluate("document.querySelector('#fields [name=max_tokens]').value = 2")
    await tab.evaluate("document.getElementById('question').value = 'a\\n```py\\nb = 1\\n\\tc <d>\\n```\\ne'")
    await tab.evaluate("document.getElementById('question').focus()")
    await tab.press("Enter")
    await tab.until("document.querySelector('article.done')")
    write = "async (text) => { window.copied = text; }"
    clipboard = (
        f"Object.defineProperty(navigator, 'clipboard', {{ configurable: true, value: {{ writeText: {write} }} }})"
    )
    await tab.evaluate(f"({clipboard}, 0)")
    await tab.click(".code .copy")
    assert await tab.until("window.copied") == "b = 1\n\tc <d>"
    await tab.until("document.querySelector('.code .copy').textContent === 'Copied'")
    await tab.evaluate("(window.copied = '', Object.defineProperty(navigator, 'clipboard', { value: undefined }), 0)")
    await tab.evaluate("(document.oncopy = () => { window.copied = document.activeElement.value; }, 0)")
    await tab.click("footer .copy")
    assert "```py\nb = 1" in await tab.until("window.copied")
    assert await tab.evaluate("document.querySelectorAll('body > textarea').length") == 0
