"""`python -m quire`: the `quire` command. Installed as `quire/__main__.py`."""

from __future__ import annotations

from quire.runtime.cli.main import main

main()
