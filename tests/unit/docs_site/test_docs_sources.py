"""What the site's pages are made of: Markdown in another dialect, links to other places, notes beside fields."""

import pytest

from docs_site.dialect import as_mkdocs_reads_it
from docs_site.generated import filled
from docs_site.places import place_of, resolved, target_text
from docs_site.tables import in_cell
from perfmodel.files.base import Spec
from perfmodel.specs.json_schema import meanings_of, summary_of

LISTS = """Three things:
- one
  - nested
- two

<!-- figures of: COMMAND
one = 1
-->
`<!-- kept in code -->`

```
- a line
  - of code
<!-- kept between fences -->
```
"""


def test_lists_are_lists_as_on_a_code_host():
    markdown = pytest.importorskip("markdown", reason="the site is built with the extra `docs`")
    html = markdown.Markdown(extensions=["fenced_code"]).convert(as_mkdocs_reads_it(LISTS))
    assert html.count("<ul>") == 2
    assert html.count("<li>") == 3
    assert "- a line\n  - of code\n&lt;!-- kept between fences --&gt;" in html
    assert "figures of" not in html
    assert "kept in code" in html


@pytest.mark.parametrize(
    ("origin", "link", "place"),
    [
        ("docs/tour.md", "techniques/README.md", "techniques/README.md"),
        ("docs/techniques/attention.md", "../parity.md", "parity.md"),
        ("docs/accuracy.md", "../README.md", "index.md"),
        ("docs/accuracy.md", "../reports/", "repository/reports/README.md"),
        ("docs/cluster.md", "../reports/a.1-lines.svg", "repository/reports/a.1-lines.svg"),
        ("docs/local.md", "../hardware_specs/engines/mlx.yaml", "repository/hardware_specs/engines/mlx.yaml.md"),
        ("README.md", "docs/notebooks/plan.ipynb", "notebooks/plan.md"),
        ("README.md", "CONTRIBUTING.md", "contributing.md"),
    ],
)
def test_a_link_of_the_repository_has_a_place_on_the_site(origin, link, place):
    assert place_of(resolved(origin, link)) == place


def test_links_are_written_as_their_page_needs_them():
    text = "[a](../parity.md#b) [c](https://d.example/e) [f](#g) ![h](../../reports/i.svg)"
    found = target_text(text, "docs/techniques/attention.md", "techniques/attention.md")
    assert found == "[a](../parity.md#b) [c](https://d.example/e) [f](#g) ![h](../repository/reports/i.svg)"


class Noted(Spec):
    """Something that has notes. It is used here alone.

    first, second: two of
                   them, over two lines

    More of the class.
    """

    first: int = 1
    second: int = 2
    third: int = 3  # behind it
    # Above it,
    # over two lines
    fourth: int = 4
    fifth: int = 5


def test_notes_of_fields_are_those_of_docstring_and_comments():
    two = "two of them, over two lines"
    above = "Above it, over two lines"
    assert meanings_of(Noted) == {"first": two, "second": two, "third": "behind it", "fourth": above}
    assert summary_of(Noted) == "Something that has notes. It is used here alone.\n\nMore of the class."


def test_what_is_generated_takes_the_place_of_what_is_for_code_hosts():
    page = "# Page\n\n<!-- generated: x.py -->\n\n*Later.*\n\n<!-- end -->\nAfter.\n"
    assert filled(page, r"A \1 body." + "\n") == "# Page\n\nA \\1 body.\nAfter.\n"


def test_a_cell_is_one_line_in_which_nothing_means_more_than_itself():
    assert in_cell("a | b\n *c* <d> `e_f | g` h_i") == r"a \| b \*c\* &lt;d> `e_f \| g` h\_i"
