"""Bugs in the page of the HTTP API: Markdown, the search, and the sampling that the page sends and shows."""

from mutant import Mutant

TESTS = "tests/system/test_page_markdown.py"
SEARCHING = "tests/system/test_page_search.py"
CHATTING = "tests/system/test_chat_page.py"
MODELS = "tests/system/test_page_models.py"
TOOLS = "tests/system/test_page_tools.py"
EMBEDDINGS = "tests/system/test_embeddings.py"
DEFAULTS = "tests/runtime/common/test_default_sampling.py"
PAGE = "runtime/server/openai/page"
BLOCKS = f"{PAGE}/markdown.js"
INLINE = f"{PAGE}/inline.js"
VIEW = f"{PAGE}/markdown_view.js"
SEARCH = f"{PAGE}/search.js"
CARDS = "runtime/server/openai/model_cards.py"

MUTANTS = [
    Mutant(INLINE, r"/^(?:https?:\/\/|mailto:)[^\s\p{C}]+$/iu", r"/^[^\s\p{C}]+$/iu", "a link runs a script"),
    Mutant(INLINE, r"mailto:)[^\s\p{C}]+$/iu", "mailto:)/iu", "a link has an address with invisible characters"),
    Mutant(INLINE, 'char !== "_" || !closes ||', 'char !== "_" ||', "words with underscores are emphasized"),
    Mutant(
        INLINE,
        'return [node.kind === "link" || !node.children ?',
        "return [!node.children ?",
        "an address as the text of a link is a link in a link",
    ),
    Mutant(
        INLINE,
        "isPadded ? inside.slice(1, -1) : inside",
        "inside",
        "code between two backticks keeps the spaces around it",
    ),
    Mutant(
        INLINE,
        'if (char !== "~" && count >= 2 &&',
        "if (count >= 2 &&",
        "struck text without an end is struck to the end",
    ),
    Mutant(INLINE, "    if (this.#isOpen) this.#closeStrong();\n", "", "bold text shows its asterisks until it ends"),
    Mutant(
        INLINE,
        'if (last === ")" && unopened-- > 0) continue;',
        'if (last === ")") continue;',
        "an address loses the bracket that it opened",
    ),
    Mutant(BLOCKS, "if (!DELIMITERS.test(line)) return false;", "return false;", "tables are text"),
    Mutant(
        BLOCKS,
        "if (header.length !== delimiters.length) return false;\n",
        "\n",
        "a line of dashes makes a table of any text",
    ),
    Mutant(BLOCKS, "found[2].length >= block.fence.length", "true", "a shorter fence inside code ends it"),
    Mutant(BLOCKS, "found[2][0] === block.fence[0]", "true", "a fence of another kind ends code"),
    Mutant(
        BLOCKS,
        "(BLANK.test(rest) || !/^(?:[-+*]|1[.)])$/.test(marker))",
        "BLANK.test(rest)",
        "a sentence with a number at the beginning of a line becomes a list",
    ),
    Mutant(
        BLOCKS, "this.#containers.length < MAX_DEPTH ?", "true ?", "ten thousand quotes in each other stop the page"
    ),
    Mutant(BLOCKS, "    if (UNDECIDED.test(this.#rest)) return undefined;\n", "", "half a fence is shown as text"),
    Mutant(BLOCKS, "Math.min(block.indent, indentOf(line))", "0", "code in a list keeps the space of its fence"),
    Mutant(
        BLOCKS,
        r"const number = /\d/.test(marker) ? Number.parseInt(marker, 10) : null;",
        r"const number = /\d/.test(marker) ? 1 : null;",
        "every list begins at 1",
    ),
    Mutant(
        BLOCKS,
        'if (this.#isAfterBlank) this.#set(last, "isLoose", true);',
        "",
        "items with space between them have none",
    ),
    Mutant(BLOCKS, "return this.#extend(text);", "return undefined;", "a paragraph stops growing until its line ends"),
    Mutant(
        BLOCKS,
        '    if (this.#undo.length && this.#leaf?.kind === "paragraph" && !text.includes("\\n")) return this.#extend(text);\n',
        "",
        "a long line is drawn again with every token",
    ),
    Mutant(VIEW, "shown && shown.block !== block", "false", "what a line turned out not to be stays"),
    Mutant(
        VIEW,
        "const numKept = Math.max(0, Math.min(shown.length, lines.length) - 2);",
        "const numKept = 0;",
        "code is drawn again with every token",
    ),
    Mutant(
        VIEW,
        "    for (; text.length - start > MAX_PIECE;",
        "    for (; false;",
        "a long paragraph is drawn again with every token",
    ),
    Mutant(
        VIEW,
        "copyButton(() => this.#code.textContent",
        "copyButton(() => this.element.textContent",
        "copied code begins with its language",
    ),
    Mutant(
        VIEW, 'rel: "noopener noreferrer nofollow"', 'rel: "nofollow"', "a linked page knows where its reader came from"
    ),
    Mutant(
        SEARCH,
        "product / Math.sqrt(squaresOfA * squaresOfB)",
        "product / squaresOfA",
        "texts are ranked by the length of their vectors",
        SEARCHING,
    ),
    Mutant(
        SEARCH,
        "sort((a, b) => b.score - a.score)",
        "sort((a, b) => a.score - b.score)",
        "the worst text comes first",
        SEARCHING,
    ),
    Mutant(
        SEARCH,
        "filter((text) => !this.#vectors.has(text))",
        "filter(() => true)",
        "every query costs all texts again",
        SEARCHING,
    ),
    Mutant(
        SEARCH,
        "this.#embedded(batch, TEXT_PROMPTS, signal)",
        "this.#embedded(batch, QUERY_PROMPTS, signal)",
        "texts get the prompt of queries",
        SEARCHING,
    ),
    Mutant(SEARCH, "first += BATCH) {", "first += BATCH + 1) {", "the sixty-fifth text has no vector", SEARCHING),
    Mutant(
        SEARCH,
        "getFloat32(4 * index, true)",
        "getFloat32(4 * index, false)",
        "vectors are read in the wrong order of bytes",
        SEARCHING,
    ),
    Mutant(SEARCH, "...TRUNCATED, ...(prompt", "...(prompt", "one long text makes the search fail", SEARCHING),
    Mutant(
        f"{PAGE}/chat.js",
        '    else show("search");\n',
        "",
        "an embedding model's page has a chat that cannot answer",
        SEARCHING,
    ),
    Mutant(
        f"{PAGE}/chat.js",
        'if (!served.can("chat") && !current.turns.length)',
        "if (false)",
        "a model without a chat template answers with an error",
        CHATTING,
    ),
    Mutant(
        f"{PAGE}/conversations.js",
        "return_timings: true, ...pageSampling }",
        "return_timings: true }",
        "a small model's answers are word salad",
        CHATTING,
    ),
    Mutant(
        f"{PAGE}/conversations.js",
        "samplingOf({ ...served.defaultSampling, ...body })",
        "samplingOf(body)",
        "the page does not show what the model recommends",
        CHATTING,
    ),
    Mutant(
        f"{PAGE}/conversations.js",
        'this.settings.mode === "chat" && !body.response_format;',
        "true;",
        "JSON and continued texts lose their asterisks",
        CHATTING,
    ),
    Mutant(
        f"{PAGE}/conversations.js",
        "results.length ? calls : []",
        "calls",
        "a question after calls without results is refused",
        TOOLS,
    ),
    Mutant(
        f"{PAGE}/api.js",
        "page.sampling[id] ?? {}",
        "Object.values(page.sampling)[0]",
        "every model is asked with the first one's sampling",
        MODELS,
    ),
    Mutant(
        f"{PAGE}/chat.js",
        "find(({ name }) => name === current.settings.model)",
        "find(() => false)",
        "every conversation has the first model",
        MODELS,
    ),
    Mutant(
        f"{PAGE}/view.js",
        'placeholder: defaults[name] ?? ""',
        'placeholder: ""',
        "the settings do not show what applies",
        CHATTING,
    ),
    Mutant(
        CARDS,
        "if not encoder.num_labels:",
        "if encoder.num_labels < 2:",
        "a reranker says that it makes vectors",
        EMBEDDINGS,
    ),
    Mutant(
        CARDS,
        'if info.has_chat_template else ["completion"]',
        'if True else ["completion"]',
        "a model without a template says that it chats",
        EMBEDDINGS,
    ),
    Mutant(CARDS, " or encoder.name == name)", ")", "a card of two models with one name tells of one", EMBEDDINGS),
    Mutant(
        "runtime/common/default_sampling.py",
        "if _DRAWING & recommended.keys() else",
        "if recommended else",
        "a recommended penalty takes the filter away",
        DEFAULTS,
    ),
]
