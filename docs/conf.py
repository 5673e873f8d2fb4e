"""Configuration of the documentation: `make docs` writes HTML to build/docs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from files import markdown

project = "Quire"
author = "The Quire maintainers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.intersphinx"]
intersphinx_mapping = {}  # no page may depend on the network
html_theme = "furo"
html_title = "Quire"
html_static_path = []
exclude_patterns = ["make_pictures.py"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
default_role = "code"  # docstrings use single backticks for code
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"


def setup(app):
    """Append the list of files to the page about the architecture when it is read."""
    app.connect("source-read", add_files)


def add_files(app, docname, source):
    if docname == "architecture":
        source[0] += markdown()
