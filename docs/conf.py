"""Configuration of the documentation: `make docs` writes HTML to build/docs."""

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
