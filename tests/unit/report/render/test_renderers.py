"""One document with every kind of block, in every rendering; what a format has for its own is escaped."""

import io
import json
import re

import pytest
from rich.console import Console

from perfmodel.report import document as blocks
from perfmodel.report.document import (
    Commands,
    Details,
    Document,
    Fact,
    Facts,
    Heading,
    Item,
    Notes,
    Paragraph,
    Plot,
    Sentences,
    Span,
    Table,
    Tile,
    Tiles,
    document_json,
    plain,
)
from perfmodel.report.drawing.figures import line
from perfmodel.report.pages import pictures_of, render_markdown, render_page
from perfmodel.report.terminal import render_html, render_text, show_document

FIGURE = {"data": [line([1, 2], [3, 4], "", None, "")], "layout": {}}
ODD = "a|b <i>*c*</i> [red]&"
TABLE = Table(
    ("name", "kind", "ms", "why"),
    [("first|row", "x", Span("1.50", "good"), "prose <b>"), (ODD, "y", "20.00", "more")],
    "A table",
    left=2,
    note="ms: a note",
    total=("all", "", "21.50", ""),
    num_wide=1,
)
DOCUMENT = Document(
    "Title <&>",
    [
        Heading("Part"),
        Paragraph(("bound by: ", Span("memory 71%", "memory"), "  rest")),
        Sentences([f"sentence {ODD}", Item((Span("TTFT", "strong"), " is off"), ["part one", "part two"])], "Answer"),
        TABLE,
        Facts("Facts", [("Group", [Fact("label", "1,234.50", "tok/s")])]),
        Plot("Drawn <1>", lambda: FIGURE, "why", "drawn"),
        Commands("To start it", ["# two of them", "vllm serve x --flag '{\"a\": 1}'"]),
        Details(
            [
                Tiles([Tile("mean TTFT", "12", "ms", Span("p99 20 ms, SLO 10", "bad"))]),
                Plot("Plotted", lambda: FIGURE, "how"),
            ]
        ),
        Notes(["a note"]),
    ],
    "the question",
    "kind",
    "perfmodel plan x",
)


def on_terminal(document, width):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    show_document(document, console)
    return console.file.getvalue()


def test_the_document_has_every_kind_of_block():
    """So that a new kind cannot be left out of a renderer unseen."""
    kinds = set(blocks.Block.__args__)
    assert {type(block) for block in DOCUMENT.blocks} | {type(block) for block in DOCUMENT.flat} == kinds


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_shows_all_but_what_is_a_pages(width):
    text = on_terminal(DOCUMENT, width)
    for wanted in (
        "Title <&>",
        "the question",
        "Part",
        "bound by: memory 71%  rest",
        f"- sentence {ODD}",
        "- TTFT is off",
    ):
        assert wanted in text
    for wanted in (
        "A table",
        "first|row",
        "20.00",
        "21.50",
        "1,234.50   tok/s",
        "vllm serve x",
        "Note: a note",
        "part one",
    ):
        assert wanted in text
    for left_out in ("prose", "part two", "svg", "Plotted", "mean TTFT"):
        assert left_out not in text
    assert max(map(len, text.splitlines())) <= width


WIDE = [f"metric-{i:02d}" for i in range(30)]


def test_a_table_too_wide_for_a_terminal_is_turned():
    """Thirty columns of ten characters do not fit 80, thirty rows of two numbers do: every number beside its name."""
    rows = [[name, *(f"{i}.{name}" for i in range(30))] for name in ("one", "two")]
    lines = on_terminal(Document("", [Table(["", *WIDE], rows)]), 80).splitlines()
    found = [line.split() for line in lines if "metric" in line]
    assert found == [[name, f"{i}.one", f"{i}.two"] for i, name in enumerate(WIDE)]


def test_a_table_too_wide_either_way_is_stacked():
    """Thirty rows of thirty numbers: a row below the other, every number on a line with its name, none cut."""
    rows = [[f"row-{row:02d}", *(f"{row}.{column}0123456" for column in range(30))] for row in range(30)]
    lines = on_terminal(Document("", [Table(["", *WIDE], rows)]), 80).splitlines()
    assert [line for line in lines if line.startswith("row")] == [row[0] for row in rows]
    found = [line.split()[-1] for line in lines if line.startswith("  metric-")]
    assert found == [cell for row in rows for cell in row[1:]]


@pytest.mark.parametrize("width", [40, 60, 79, 80, 81, 120, 200])
def test_no_word_is_broken_and_no_line_too_long(width):
    table = Table(
        ["deployment", "a long head of words", "ms"], [["3 x h100-sxm-80gb TP2", "1.25 [0.75..2.50]", "7.25"]]
    )
    text = on_terminal(Document("", [table]), width)
    assert max(map(len, text.splitlines())) <= width
    assert {"h100-sxm-80gb", "[0.75..2.50]", "7.25"} <= set(text.split())


def test_text_for_python_has_no_colours_and_html_for_notebooks_has():
    assert "\x1b" not in render_text(DOCUMENT)
    assert render_html(DOCUMENT).startswith("<pre")
    assert "&lt;&amp;&gt;" in render_html(DOCUMENT)


def test_markdown_escapes_what_it_takes_for_its_own():
    text = render_markdown(DOCUMENT, "Generated today.", lambda name: f"report.{name}.svg")
    assert "| a\\|b \\<i>\\*c\\*\\</i> [red]& | y | 20.00 | more |" in text
    assert "| name | kind | ms | why |\n|---|---|---:|---|" in text
    assert "![report.drawn.svg](report.drawn.svg)\n\nwhy\n" in text
    assert "Plotted: see the HTML report. how" in text
    assert "- **TTFT** is off\n  - part one\n  - part two\n" in text
    assert "```\nperfmodel plan x\n```\n\nGenerated today.\n\n**the question**" in text
    assert "```sh\n# two of them\nvllm serve x" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    columns = {len(re.findall(r"(?<!\\)\|", row)) for row in rows if "name" in row or "first" in row}
    assert columns == {5}  # four cells, however many pipes stand in them


def test_code_in_a_sentence_stays_code():
    assert "`a*b<c>` and a\\*b" in render_markdown(Document("x", [Paragraph("`a*b<c>` and a*b")]))


def test_a_page_is_escaped_and_opens_without_a_network():
    page = render_page(DOCUMENT)
    assert "<script" not in page
    assert "a|b &lt;i&gt;*c*&lt;/i&gt; [red]&amp;" in page
    assert "<b>" not in page.replace("<body>", "")
    assert '<td class="text">x</td><td><span class="good">1.50</span></td><td class="text">prose' in page
    assert '<tr class="total"><td>all</td>' in page
    assert page.count("<title>Drawn &lt;1&gt;</title>") == page.count("<title>Plotted</title>") == 1
    assert '<div class="aside bad">p99 20 ms, SLO 10</div>' in page
    assert not re.search(r"""(?:src|href)\s*=\s*["']|@import|url\(|https?://""", page)
    assert render_page(DOCUMENT) == page


def test_a_picture_fills_its_card_and_a_number_stays_in_one_line():
    """On a phone, too, where a picture is scrolled rather than shrunk until nothing can be read."""
    page = render_page(DOCUMENT)
    assert page.count('<div class="scroll figure"><svg') == 2
    rule = re.search(r"\.figure svg \{([^}]*)\}", page)[1]
    assert {"width: 100%", "height: auto", "min-width: 760px"} <= {part.strip() for part in rule.split(";")}
    assert '<dd class="number">1,234.50 tok/s</dd>' in page
    assert re.search(r"\.number \{([^}]*)\}", page)[1].strip() == "white-space: nowrap;"


def test_what_stands_in_backticks_is_code_and_what_is_scrolled_shows_it():
    page = render_page(Document("x", [Notes(["give `price: {usd: <1>}`"])]))
    assert "give <code>price: {usd: &lt;1&gt;}</code>" in page
    assert page.count(" scroll;") + page.count(" scroll,") == 2  # a shade at either end that has more


def test_json_has_every_block_as_plain_data():
    found = json.loads(json.dumps(document_json(DOCUMENT)))
    kinds = [block["kind"] for block in found["blocks"]]
    assert kinds == [type(block).__name__.lower() for block in DOCUMENT.blocks]
    table = found["blocks"][kinds.index("table")]
    assert table["rows"][0][2] == {"text": "1.50", "tone": "good"}
    assert table["is_text"] == [True, True, False, True]
    tiles, plot = found["blocks"][kinds.index("details")]["blocks"]
    assert plot["figure"]["data"][0]["y"] == [3, 4]
    assert tiles["tiles"][0]["unit"] == "ms"


def test_nothing_is_drawn_before_it_is_asked_for():
    calls = []
    lazy = Document(
        "x", [Plot("p", lambda: calls.append("p") or FIGURE, name="file"), Plot("q", lambda: calls.append("q") or {})]
    )
    on_terminal(lazy, 80)
    assert not calls
    (drawn,) = pictures_of(lazy).items()
    assert drawn[0] == "file"
    assert drawn[1].startswith('<svg xmlns="http://www.w3.org/2000/svg"') or "xmlns" in drawn[1][:200]
    assert ">p</text>" in drawn[1]  # its title, which a page has above it
    document_json(lazy)
    assert calls == ["p", "p", "q"]


def test_a_line_without_its_tones_is_its_text():
    assert plain(("a ", Span("b", "bad"), "c")) == "a bc"
