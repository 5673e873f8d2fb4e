"""The documents match the code: snippets run, commands print the shown output, links and named files exist.

Snippets that need a server run against one started here; only the address in them is replaced.
"""

import json
import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
import quire
from quire.runtime.model import describe_sizes

from tests.bench import many_cores

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = PAGES[0].read_text("utf-8")
ADDRESS = "127.0.0.1:7070"
API = "http://127.0.0.1:8000/v1"
TESTS_OF_THE_TREE = ("tests/test_imports.py", "tests/test_lint.py")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}

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
    """Start a server with the bundled model on free ports; yield its address and the URL of its HTTP API."""
    ports = ("--port", "0", "--operator-port", "0", "--openai-port", "0")
    command = [*quire_command(), "serve", *ports, "--threads", "1", "--tool-call-parser", "hermes"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=ENVIRONMENT, text=True
    ) as server:
        try:
            assert select.select([server.stdout], [], [], 60)[0], "the server printed nothing"
            ready = server.stdout.readline()
            yield re.search(r"clients (\S+) .* api (\S+)", ready).groups()
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
    assert f"```\n{describe_sizes()}\n```" in page("kv-cache.md")


def test_the_sizes_table_contains_well_known_figures():
    rows = {line[:18].rstrip(): line for line in reversed(describe_sizes().splitlines())}
    assert "234,881,024    224 MiB" in rows["Qwen3-0.6B"]
    assert "196 MiB" in rows["Gemma-3-4B"]
    assert "544 MiB" in rows["  were all full"]
    assert "896 MiB for Gemma-3-4B" in page("kv-cache.md")


def test_the_tables_of_many_cores_are_those_of_the_model():
    for table in many_cores.tables():
        assert table in page("many-cores.md")


def test_the_api_reference_lists_every_public_name():
    listed = re.findall(r"^\.\. auto\w+:: quire\.(\w+)$", page("reference/api.md"), re.M)
    assert sorted(listed) == sorted(quire.__all__)


def test_the_readme_is_short():
    assert len(README.split()) <= 900


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


LINKED = [*PAGES, *(ROOT / name for name in ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "deploy/README.md"))]


@pytest.mark.parametrize("document", LINKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_in_a_document_has_a_target(document):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text("utf-8")):
        assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_file_named_in_a_document_exists(document):
    text = (ROOT / document).read_text("utf-8")
    named = set(re.findall(r"`((?:deploy|docs|kernels|pager|scheduler|runtime|tests)/[\w./-]*)`", text))
    assert named
    for path in sorted(named):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(("document", "at_least"), [("ARCHITECTURE.md", 50), ("CONTRIBUTING.md", 30)])
def test_every_name_in_a_document_is_in_the_code(document, at_least):
    text = re.sub(r"^```.*?^```", "", (ROOT / document).read_text("utf-8"), flags=re.M | re.S)
    named = {name.split(".")[-1] for name in re.findall(r"`([A-Za-z_]\w+(?:\.\w+)*)`", text)}
    words = set(re.findall(r"\w+", "\n".join(path.read_text("utf-8") for path in sources())))
    assert len(named) > at_least
    assert named - words == set()


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


def block_after(line):
    """Return the block that follows the command block `line` on its page: its output."""
    index = BLOCKS.index(("sh", f"{line}\n"))
    return BLOCKS[index + 1][1]
