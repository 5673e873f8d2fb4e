"""Write docs/reference/options.md from the structs with options in `runtime/common/`.

usage: python docs/make_options.py
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from quire.runtime.common.config import EngineConfig
from quire.runtime.common.options import Option, options_of
from quire.runtime.common.server_config import ServerConfig
from quire.runtime.common.types import SamplingParams

PAGE = Path(__file__).parent / "reference" / "options.md"
INTRODUCTION = """\
# Options

<!-- Written by docs/make_options.py; a test fails if it is stale. -->

Every option can be set in three ways. A flag takes precedence over an environment variable, that over a TOML file, that
over the default.

| | example |
|---|---|
| flag | `quire serve --max-num-seqs 32 --no-enable-prefix-caching` |
| environment variable | `QUIRE_MAX_NUM_SEQS=32 QUIRE_ENABLE_PREFIX_CACHING=off quire serve` |
| TOML file, without sections | `max_num_seqs = 32` in `quire.toml`, then `quire serve --config quire.toml` |

In Python, engine options are keyword arguments: `LLM("path/to/model", max_num_seqs=32)`; files have no effect
there, and of the variables only `QUIRE_ISA`, `QUIRE_TUNE` and `QUIRE_DEBUG` have one.

A size may be a number of bytes or have a unit: `4GiB`, `512MiB`, `1.5GB`; KiB, MiB, GiB and TiB are powers of 1024, kB,
MB, GB and TB powers of 1000. `bfloat16` and `float32` are accepted for `bf16` and `f32`, `block_size` for `page_size`.
"""
SAMPLING = """\
These are the fields of `SamplingParams`, the entries of `params` in a GENERATE frame and, except for `logit_bias`,
`logprobs` and `structured_outputs`, flags of `quire generate`.
"""


def page() -> str:
    """Return the text of the page."""
    parts = [INTRODUCTION]
    for title, struct in (("Engine", EngineConfig), ("Server", ServerConfig)):
        parts.append(f"## {title}\n")
        for group, options in groupby(options_of(struct).values(), key=lambda option: option.group):
            parts.append(f"### {group}\n" if group != title else "")
            parts.append(table(options, with_range=True))
    parts += ["## Sampling parameters\n", SAMPLING, table(options_of(SamplingParams).values(), with_range=False)]
    return "\n".join(filter(None, parts))


def table(options: Iterable[Option], *, with_range: bool) -> str:
    """Return one row per option: name, default, what is allowed, meaning."""
    rows = ["| option | default | allowed | |", "|---|---|---|---|"] if with_range else []
    rows = rows or ["| option | default | |", "|---|---|---|"]
    for option in options:
        cells = [f"`{option.name}`", option.default_as_text() or "none", option.help]
        if with_range:
            allowed = option.allowed().removesuffix(", such as 4294967296 or 4GiB")
            cells.insert(2, option.unit if allowed == "text" and option.unit else allowed)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), "utf-8")
