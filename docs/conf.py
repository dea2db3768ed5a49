"""Sphinx configuration."""

from importlib.metadata import version as version_of

project = "hangwatch"
author = "the hangwatch maintainers"
copyright = "the hangwatch maintainers; Apache-2.0"
version = release = version_of("hangwatch")

extensions = ["myst_parser", "sphinx_click"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "hangwatch"
nitpicky = True
