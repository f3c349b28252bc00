"""Configure Sphinx for the site, which `tox -e docs` builds in build/site; pages.py writes its generated and copied pages."""

import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]
sys.path[:0] = [str(PROJECT / name) for name in ("docs", "backend", "frontend", ".")]

import pages  # noqa: E402
import reference  # noqa: E402
import search  # noqa: E402

project = "sonnx"
copyright = "sonnx developers"
author = "sonnx developers"
release = pages.version()

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click", "sphinx_copybutton"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_static"]
nitpicky = False
smartquotes = False  # options and strings are copied from the pages: --json, "SX105"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

default_role = "code"  # docstrings have names in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 200
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
suppress_warnings = ["ref.python"]  # a name like Tensor is public in several modules: the link leads to one of them

html_theme = "furo"
html_title = f"sonnx {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_search_scorer = str(pages.MADE / "scorer.js")
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": False}  # the arrow keys scroll tables and code
copybutton_selector = "div:not(.highlight-text) > div.highlight pre"
copybutton_prompt_text = r"\$ |>>> |\.\.\. "  # of a block with prompts, only what is typed is copied
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"
pygments_style = "default"
pygments_dark_style = "github-dark"


def setup(app):
    """Connect what makes and copies pages.

    Args:
        app: The Sphinx application.
    """
    app.connect("config-inited", pages.write)
    app.connect("source-read", pages.relink)
    app.connect("autodoc-process-docstring", reference.read_docstring, priority=400)  # before and after napoleon
    app.connect("autodoc-process-docstring", reference.escape_docstring, priority=600)
    app.connect("sphinx-click-process-description", reference.escape_help)
    app.connect("sphinx-click-process-options", reference.escape_help)
    app.connect("doctree-read", reference.note_other_names)
    app.add_search_language(search.Questions)
    app.connect("doctree-read", reference.keep_builtins)
    app.connect("doctree-read", search.add_words)
    app.connect("env-updated", search.check)
    app.connect("build-finished", pages.copy_files)
    app.connect("build-finished", pages.finish)
