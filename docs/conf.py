"""Sphinx's settings: `make docs` builds the site into build/docs."""

import importlib.util

from hop_tf.version import __version__

project = "hop_tf"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = f"hop_tf {__version__}"
myst_heading_anchors = 3
# The docstrings' own sections, beside Google's.
napoleon_custom_sections = [("Blocks", "returns_style")]
autodoc_typehints = "none"  # The docstrings say it in words.
autodoc_member_order = "bysource"
# Packages that hop_tf.integrations.ray needs, if they are not installed.
autodoc_mock_imports = [name for name in ("ray",) if importlib.util.find_spec(name) is None]
