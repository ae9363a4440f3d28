"""Build the documentation site with `make docs`: the guides as they stand, and API pages from docstrings."""

import specjax

project, author = "specjax", "The specjax authors"
copyright = author
release = version = specjax.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "specjax"
root_doc = "index"
default_role = "code"
myst_heading_anchors = 4
# Links to files that are no pages, such as `../examples/fork_rollout.py`, work in the repository, not on the site.
# tests/test_links.py checks them.
suppress_warnings = ["myst.xref_missing"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True, "imported-members": True}


def keep_layout(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Show the first paragraph of a docstring as text, and the rest as it is laid out in the source."""
    end = lines.index("") if "" in lines else len(lines)
    rest = lines[end:]
    first = [line.replace("*", r"\*").replace("|", r"\|").replace("_", r"\_") for line in lines[:end]]
    while rest and not rest[0]:
        rest.pop(0)
    lines[:] = [*first, ""]
    if any(rest):
        lines += ["::", "", *(f"    {line}" for line in rest), ""]


def setup(app: object) -> None:
    """Register the hook with Sphinx."""
    app.connect("autodoc-process-docstring", keep_layout)  # pyright: ignore[reportAttributeAccessIssue]
