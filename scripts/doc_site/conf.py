"""Sphinx's settings for the site; build.py prepares its sources and runs it."""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any

from sphinx.ext.autodoc.mock import mock

from doc_site.docstrings import as_rst

project = "kvwarehouse"
version = release = metadata.version("kvwarehouse")
root_doc = "index"
extensions = ["myst_parser", "sphinx.ext.autodoc"]

# As GitHub reads the same files: its anchors, and no quotes or dashes but those that stand there.
myst_heading_anchors = 6
smartquotes = False
highlight_language = "none"

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
default_role = "code"
# Of two classes called Client an annotation does not say which.
suppress_warnings = ["ref.python"]

# The page of this connector needs no torch.
with mock(["torch", "transformers"]):
    import_module("kvwarehouse_connectors.transformers.prefill")

html_theme = "furo"
html_title = f"kvwarehouse {version}"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_copy_source = html_show_sourcelink = False
html_show_sphinx = html_show_copyright = False
pygments_style, pygments_dark_style = "friendly", "github-dark"


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", as_rst)
