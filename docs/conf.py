"""Sphinx configuration."""

from importlib.metadata import version as version_of
from pathlib import Path

from hangwatch.cli.rescue import program

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


def setup(app):
    """Put the file that needs no installation beside the pages, for those who have only curl."""
    app.connect("build-finished", _write_rescue)


def _write_rescue(app, failure):
    if failure is None and app.builder.format == "html":
        Path(app.outdir, "hangwatch-rescue.py").write_text(program(), encoding="ascii")
