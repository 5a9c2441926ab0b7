"""Settings of Sphinx: `python -m sphinx -W -b html docs docs/_build`."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from generated import fill  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402

project = "diloco"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "diloco"
exclude_patterns = ["_build"]
myst_heading_anchors = 3
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
suppress_warnings = ["myst.strikethrough"]


def setup(app: Sphinx) -> None:
    """Replace `<!-- generated: NAME -->` in each page, as it is read, by what the sources say."""

    def on_read(_app: Sphinx, _page: str, source: list[str]) -> None:
        source[0] = fill(source[0])

    app.connect("source-read", on_read)
