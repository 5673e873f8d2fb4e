"""A mutant: one realistic bug, as a change of one file's text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug. `text` occurs exactly once in `file`."""

    file: str  # relative to the root of the tree
    text: str
    replacement: str
    bug: str  # the bug, as a user would see it
    tests: str = ""  # paths to run, separated by spaces; empty: the default of the package
    equivalent: str = ""  # why no test can notice it

    def apply(self, root: Path) -> str:
        """Put the bug into the tree at `root` and return the file's original content.

        Raises:
            ValueError: `text` does not occur exactly once.
        """
        path = root / self.file
        content = path.read_text()
        if (times := content.count(self.text)) != 1:
            raise ValueError(f"{self.file}: the text occurs {times} times: {self.text!r}")
        path.write_text(content.replace(self.text, self.replacement))
        return content
