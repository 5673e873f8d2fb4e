"""The documents match the code: snippets run, commands print the shown output, links and named files exist.

Snippets that need a server run against one started here; only the address in them is replaced.
"""

import ast
import json
import os
import re
import select
import subprocess
import sys
import urllib.request
from itertools import pairwise
from pathlib import Path

import pytest
import quire
from quire.runtime.tools.planning.kv_sizes import describe_sizes

from docs import files
from tests.bench import many_cores

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = PAGES[0].read_text("utf-8")
ADDRESS = "127.0.0.1:7070"
API = "http://127.0.0.1:8000/v1"
TESTS_OF_THE_TREE = ("tests/test_imports.py", "tests/test_lint.py")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")} | {
    "QUIRE_TUNE": "off"
}

BLOCKS = [
    (kind, text)
    for path in PAGES
    for kind, text in re.findall(r"^```([\w{}-]*)\n(.*?)^```", path.read_text("utf-8"), re.M | re.S)
]
SNIPPETS = [text for kind, text in BLOCKS if kind == "python"]
COMMANDS = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
QUICK_COMMANDS = [line for line in COMMANDS if re.match(r"quire (plan|info)\b", line)]

QWEN3_06B = {  # the only file of a model folder that `quire plan` reads
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def addresses():
    """Start a server with the bundled model on free ports; yield its address, and the URLs of HTTP API and metrics."""
    ports = ("--port", "0", "--operator-port", "0", "--openai-port", "0")
    dtypes = ("--weights", "q8", "--kv-cache-dtype", "int8")  # the tutorial's; the same text on every processor
    command = [*quire_command(), "serve", *ports, *dtypes, "--threads", "1", "--tool-call-parser", "hermes"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=ENVIRONMENT, text=True
    ) as server:
        try:
            assert select.select([server.stdout], [], [], 60)[0], "the server printed nothing"
            ready = server.stdout.readline()
            client, metrics, api = re.search(r"clients (\S+) +metrics (\S+) +api (\S+)", ready).groups()
            yield client, api, metrics
        finally:
            server.terminate()


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_snippet_runs_unchanged_and_prints(snippet, addresses):
    done = run(sys.executable, "-W", "error", "-c", snippet.replace(ADDRESS, addresses[0]).replace(API, addresses[1]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_snippets_show_both_clients_and_llm():
    assert sum(ADDRESS in snippet for snippet in SNIPPETS) >= 2
    for name in ("AsyncClient", "Client", "LLM"):
        assert any(re.search(rf"\b{name}\(", snippet) for snippet in SNIPPETS), name


@pytest.mark.parametrize("line", QUICK_COMMANDS)
def test_a_command_prints_the_output_that_its_page_shows(line, tmp_path):
    (tmp_path / "Qwen3-0.6B").mkdir()
    (tmp_path / "Qwen3-0.6B" / "config.json").write_text(json.dumps(QWEN3_06B))
    done = run(*quire_command(), *line.split()[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == block_after(line)


def test_the_sizes_table_matches_the_code():
    assert f"```\n{describe_sizes()}\n```" in page("planning.md")


def test_the_sizes_table_contains_well_known_figures():
    rows = {line[:18].rstrip(): line for line in reversed(describe_sizes().splitlines())}
    assert "234,881,024    224 MiB" in rows["Qwen3-0.6B"]
    assert "196 MiB" in rows["Gemma-3-4B"]
    assert "544 MiB" in rows["  were all full"]
    assert "896 MiB for Gemma-3-4B" in page("planning.md")


def test_the_tables_of_many_cores_have_a_row_per_model_or_number_of_threads():
    assert [table.count("\n") - 1 for table in many_cores.tables()] == [7, 7, 7, 8, 3]


def test_the_advice_for_many_cores_follows_from_the_model():
    threads = {row.split(" | ")[0]: row.split(" | ")[2] for row in many_cores.tables()[3].splitlines()[2:]}
    assert max(threads.values(), key=int) == threads["| 16"]  # tokens per second of one user of a 0.6 B model


def test_the_api_reference_lists_every_public_name():
    listed = re.findall(r"^\.\. auto\w+:: quire\.(\w+)$", page("reference/api.md"), re.M)
    assert sorted(listed) == sorted(quire.__all__)


@pytest.mark.parametrize(("document", "words"), [("README.md", 900), ("ARCHITECTURE.md", 3500), ("CHANGELOG.md", 700)])
def test_a_document_is_short(document, words):
    assert len((ROOT / document).read_text("utf-8").split()) <= words


def test_the_documentation_has_few_pages_and_each_is_in_the_table_of_contents():
    pages = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in PAGES[1:]}
    assert len(pages) <= 18
    listed = re.findall(r"```{toctree}\n(?::[^\n]*\n)+\n(.*?)```", page("index.md"), re.S)
    assert sorted("\n".join(listed).split()) == sorted(pages - {"index"})


def test_the_answer_in_the_tutorial_is_the_answer_of_a_server(addresses):
    command, shown = command_and_output("curl http://127.0.0.1:8000/v1/completions")
    body = re.search(r"-d '(.*)'", command)[1]
    request = urllib.request.Request(f"{addresses[1]}/completions", body.encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        given = json.load(answer)
    expected = json.loads(shown)
    assert given["choices"] == expected["choices"]
    assert given["usage"]["timings"].keys() == expected["usage"]["timings"].keys()
    for usage in (given["usage"], expected["usage"]):
        del usage["timings"], usage["prompt_tokens_details"]  # another test may have sent the prompt before
    assert given["usage"] == expected["usage"]
    assert given.keys() == expected.keys()


def test_every_metric_that_the_tutorial_shows_is_exposed(addresses):
    command, shown = command_and_output("curl -s http://127.0.0.1:7071/metrics")
    with urllib.request.urlopen(addresses[2], timeout=60) as answer:
        exposed = answer.read().decode()
    names = re.findall(r"^quire_\S+(?= )", shown, re.M)
    assert len(names) == 6
    for name in names:
        assert f"\n{name} " in exposed, name
    pattern = re.search(r"grep -E '(.*)'", command)[1]
    assert all(re.match(pattern, name) for name in names)


def test_the_first_sentence_of_every_file_of_code_is_found():
    listed = dict(files.code_files())
    code = {path.relative_to(ROOT).as_posix() for path in files.code_paths() if path.name != "__init__.py"}
    assert code - set(listed) == set()
    assert listed["pager/pool.py"] == (
        "The page pool: reference counts, the free list, and unowned pages whose content can still be found."
    )
    assert listed["kernels/sample.pyx"] == (
        "Sampling: a token from each row of logits, as a pure function of (logits, parameters, seed, position)."
    )
    assert listed["kernels/simd/experts.c"] == (
        "Mixtures of experts: the choice of a row's experts, and the weighted sum of their results."
    )


def test_the_documentation_builds_without_warnings(tmp_path):
    done = run(sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", ROOT / "docs", tmp_path)
    assert done.returncode == 0, done.stderr


def test_every_command_in_the_documents_exists():
    known = set(re.findall(r"^│ ([a-z-]+) ", run(*quire_command(), "--help").stdout, re.M))
    named = {name for path in PAGES for name in re.findall(r"`quire ([a-z-]+)", path.read_text("utf-8"))}
    shown = {line.split()[1] for line in COMMANDS if line.startswith("quire ")}
    assert named
    assert shown
    assert named | shown <= known


DOCUMENTS = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "kernels/DESIGN.md", "deploy/README.md")
LINKED = [*PAGES, *(ROOT / name for name in DOCUMENTS)]


@pytest.mark.parametrize("document", LINKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_in_a_document_has_a_target(document):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text("utf-8")):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "CONTRIBUTING.md", "kernels/DESIGN.md"])
def test_every_file_named_in_a_document_exists(document):
    text = (ROOT / document).read_text("utf-8")
    named = set(re.findall(r"`((?:deploy|docs|kernels|pager|scheduler|runtime|tests)/[\w./-]*)`", text))
    assert named
    for path in sorted(named):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "CONTRIBUTING.md", "kernels/DESIGN.md"])
def test_every_member_named_in_a_document_belongs_to_its_class(document):
    members = {}
    for path in sources():
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef):
                    members[node.name] = {*names_bound_in(node), *members.get(node.name, ())}
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)`", (ROOT / document).read_text("utf-8")))
    assert {pair for pair in named if pair[0] in members and pair[1] not in members[pair[0]]} == set()


def names_bound_in(class_node):
    """Yield the names of methods, fields and attributes of `self`, in the class itself."""
    for node in ast.walk(class_node):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


ENTRANCES = [  # questions of a newcomer, and the file and the name that answer them
    ("Which code admits a request?", "scheduler/planning.py", "Planner._admit"),
    ("Which code decides how many tokens a step prefills?", "scheduler/planning.py", "Planner._grow_prefill"),
    ("Which code frees a page?", "pager/table.py", "PageTable.release"),
    ("Which code restarts an engine process?", "runtime/workers/supervisor.py", "Supervisor"),
    ("Which code makes masks of a grammar?", "runtime/engine/structured/masks.py", None),
    ("Which code makes a grammar of a JSON schema?", "runtime/engine/json_schema/schema.py", None),
    ("Which code reads the header of a GGUF file?", "runtime/model/weights/gguf.py", None),
    ("Which code packs weights into 4 bits?", "kernels/simd/q4.c", None),
    ("Which code chooses AMX?", "kernels/isa.pyx", "pick_level"),
    ("Which code sends server-sent events?", "runtime/server/http/request_cycle.py", None),
    ("Which code routes a request to a host?", "runtime/workers/router.py", "Router"),
    ("Which code holds a tenant's quota of pages?", "scheduler/queue.py", "_has_quota"),
    ("Which code turns an image into tokens?", "runtime/engine/images/reader.py", None),
    ("Which code decides which requests are replayed?", "runtime/workers/token_log.py", "next_to_send"),
    ("Which code opens page tables?", "pager/pager.py", "Pager"),
    ("Which code runs the ops of a step?", "kernels/replay.pyx", "replay_ops"),
    ("Where does the server begin?", "runtime/server/server.py", "Server"),
]


@pytest.mark.parametrize(("question", "file", "name"), ENTRANCES)
def test_the_map_answers_a_question_of_a_newcomer_by_name(question, file, name):
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    assert f"`{file}`" in text, question
    if name is not None:
        assert f"`{name}`" in text, question
        definition = rf"\b(def|class|void)\s+{name.split('.')[-1]}\b"
        assert re.search(definition, (ROOT / file).read_text("utf-8")), question


@pytest.mark.parametrize(("question", "section"), [("parameter", "A sampling parameter"), ("family", "A model family")])
def test_contributing_says_which_files_to_change(question, section):
    assert f"### {section}\n" in (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert question in (ROOT / "ARCHITECTURE.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("document", "at_least"), [("ARCHITECTURE.md", 50), ("CONTRIBUTING.md", 30), ("kernels/DESIGN.md", 50)]
)
def test_every_name_in_a_document_is_in_the_code(document, at_least):
    text = re.sub(r"^```.*?^```", "", (ROOT / document).read_text("utf-8"), flags=re.M | re.S)
    named = {name.split(".")[-1] for name in re.findall(r"`([A-Za-z_]\w+(?:\.\w+)*)`", text)}
    words = set(re.findall(r"\w+", "\n".join(path.read_text("utf-8") for path in sources())))
    assert len(named) > at_least
    assert named - words == set()


def test_the_files_about_some_words_are_found():
    found = {file.path for file in files.files_about(["Prefix", "cache"])}
    assert {"pager/prefix.py", "pager/snapshot.py", "runtime/engine/kv_events.py"} <= found
    assert "pager/pool.py" not in found


def sources():
    """Yield the files that may define the names in a document: the code and its build files."""
    yield from (
        ROOT / name for name in ("Makefile", "meson.build", "kernels/meson.build", "pyproject.toml", *TESTS_OF_THE_TREE)
    )
    for folder in ("kernels", "pager", "scheduler", "runtime"):
        for kind in ("py", "pyi", "pyx", "pxd", "c", "h"):
            yield from (ROOT / folder).rglob(f"*.{kind}")


def quire_command():
    return sys.executable, "-P", "-m", "quire.runtime.cli.main"


def page(name):
    """Return the text of a page in docs/."""
    return (ROOT / "docs" / name).read_text("utf-8")


def run(*command, cwd=None):
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)


def command_and_output(begin):
    """Return the only command block that begins so, and the block that follows it on its page."""
    ((command, shown),) = [
        (command, shown) for (_, command), (_, shown) in pairwise(BLOCKS) if command.startswith(begin)
    ]
    return command, shown


def block_after(line):
    """Return the block that follows the command block `line` on its page: its output."""
    index = BLOCKS.index(("sh", f"{line}\n"))
    return BLOCKS[index + 1][1]
