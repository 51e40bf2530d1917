"""Figures in README.md and docs/ are those of the commands that they are quoted from.

The quick commands run here; `python benchmarks/quoted_figures.py` runs all, and with `--write` mends the pages.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.release

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("quoted_figures", ROOT / "benchmarks/quoted_figures.py")
assert _spec is not None
assert _spec.loader is not None
quoted = importlib.util.module_from_spec(_spec)
sys.modules["quoted_figures"] = quoted
_spec.loader.exec_module(quoted)

QUOTES = [quote for page in quoted.PAGES for quote in quoted.quotes_of(page)]
QUICK = [quote for quote in QUOTES if not quote.is_slow]


@pytest.mark.parametrize("quote", QUICK, ids=lambda quote: f"{quote.page.name}: {quote.command}"[:70])
def test_figures_quoted_from_quick_commands_and_from_reports_are_theirs(quote) -> None:
    assert quoted.changed(quote, quoted.run_command(quote.command)) == []


@pytest.mark.parametrize("page", quoted.PAGES, ids=lambda page: page.name)
def test_every_block_of_output_in_the_pages_is_compared(page) -> None:
    """A block with a `$ perfmodel` line begins with it."""
    shown = page.read_text(encoding="utf-8").count("\n$ perfmodel ")
    assert shown <= sum(bool(quote.lines) for quote in quoted.quotes_of(page))


PAGE = """# Page

It takes 8.4 s, for 0.12 USD.

```
$ perfmodel any
 TTFT    161.10   127.98
...
```
"""
SIDE = """
- section: Page
  command: any
  figures: |
    takes 8.4 s = answer["duration"]
    for 0.12 USD = number(r'"usd": ([0-9.]+)')
"""


@pytest.fixture
def quotes(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    page.with_suffix(".yaml").write_text(SIDE, encoding="utf-8")
    lines, figures = quoted.quotes_of(page)
    return lines, figures


def test_a_figure_within_rounding_is_as_quoted_and_another_is_not(quotes) -> None:
    _, figures = quotes
    assert quoted.changed(figures, '{"duration": 8.44, "usd": 0.1204}') == []
    differences = quoted.changed(figures, '{"duration": 9.44, "usd": 0.1604}')
    assert differences == [("takes 8.4 s", "takes 9.4 s"), ("for 0.12 USD", "for 0.16 USD")]
    assert "It takes 9.4 s, for 0.16 USD." in quoted.written(differences, PAGE)
    assert 'takes 9.4 s = answer["duration"]' in quoted.written(differences, SIDE)


def test_a_line_of_output_is_found_by_its_words_and_compared_by_its_numbers(quotes) -> None:
    lines, _ = quotes
    assert quoted.changed(lines, "Latency\n TTFT   161.10   127.98\n") == []
    assert quoted.changed(lines, "Latency\n TTFT   191.10   127.98\n") == [
        (" TTFT    161.10   127.98", " TTFT   191.10   127.98")
    ]
    assert quoted.changed(lines, "TPOT 161.10 127.98") == [(" TTFT    161.10   127.98", "(no such line)")]


def test_a_figure_whose_text_is_gone_from_its_section_is_reported(quotes) -> None:
    _, figures = quotes
    moved = quoted.Quote(figures.page, figures.command, False, (), figures.figures, "It takes long.")
    assert [new for _, new in quoted.changed(moved, '{"duration": 8.4, "usd": 0.12}')] == [
        "(stands 0 times in its section)"
    ] * 2
