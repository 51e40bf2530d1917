"""Figures in README.md and docs/ beside the output of the commands that they are quoted from.

    python benchmarks/quoted_figures.py            # runs every command, lists what differs; exit status 1 if any does
    python benchmarks/quoted_figures.py --write    # and writes what the commands say now into the pages

A fenced block that begins with `$ perfmodel ...` holds lines of that command's output in their order; `...` stands for
lines left out. What else a page quotes stands in its side file, `tools/figures/PAGE.yaml`:

    - section: Orders                  # the heading that the quote stands under
      command: perfmodel simulate summaries-8b-offline --json
      slow: true                       # takes longer than a few seconds; tests/contract/test_quoted_figures.py skips it
      figures: |
        as given | 61.8 s = answer["duration"]
    - section: Two commands
      command: perfmodel simulate llama-3.1-8b-a100
      block: 2                         # the section's second fenced block has lines of the output; without a command
                                       # here the block begins with it

The text before ` = ` stands in the section, once; its last numbers are those of the expression, as many as it has.
The expression sees `text`, what the command prints; `answer`, the same as JSON; `number(pattern)`, what a pattern's
groups match in the text; and `cell(title, row, column)` of a report's table. A report stands for the command that wrote
it: `command: reports/study_routers_202611.md`.
"""

__all__ = ["Quote", "changed", "quotes_of", "run_command", "side_file", "written"]

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?")
_FENCE = re.compile(r"^```[a-z]*\n(?P<body>(?:(?!```)[^\n]*\n)+)```", re.MULTILINE)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_RELATIVE = 2e-3  # of a figure: how far the same sources may come out elsewhere (other math libraries)


@dataclass(frozen=True)
class Quote:
    """Lines of a page that a command printed, or figures that it gave.

    lines:    of output, as they stand in the page; () for figures
    figures:  (text in the page, expression) of each
    section:  where the figures stand: the page from the heading before them to the next
    """

    page: Path
    command: str
    is_slow: bool
    lines: tuple[str, ...] = ()
    figures: tuple[tuple[str, str], ...] = ()
    section: str = ""


def side_file(page: Path) -> Path:
    """Where the figures of a page are listed: below tools/figures/ as the page is below the root."""
    if page.is_relative_to(ROOT):
        return ROOT / "tools/figures" / page.relative_to(ROOT).with_suffix(".yaml")
    return page.with_suffix(".yaml")


def quotes_of(page: Path) -> list[Quote]:
    """All quotes of a page: its blocks of output, then the figures of its side file."""
    side = side_file(page)
    entries = yaml.safe_load(side.read_text(encoding="utf-8")) if side.is_file() else []
    sections = _sections(page.read_text(encoding="utf-8"))
    marked = {(entry["section"], entry["block"]): entry for entry in entries if "block" in entry}
    blocks = [
        quote
        for title, text in sections.items()
        for number, block in enumerate(_FENCE.finditer(text), 1)
        for quote in _output_of(page, block["body"].splitlines(), marked.pop((title, number), {}))
    ]
    if marked:
        raise ValueError(f"{side}: {page.name} has no such blocks: {sorted(marked)}")
    return blocks + [_figures_of(page, entry, sections[entry["section"]]) for entry in entries if "figures" in entry]


def _sections(text: str) -> dict[str, str]:
    """The text under each heading, headings in fenced blocks aside."""
    outside = _FENCE.sub(lambda block: "`" * len(block[0]), text)
    headings = list(_HEADING.finditer(outside))
    ends = [*(heading.start() for heading in headings[1:]), len(text)]
    return {heading[1]: text[heading.end() : end] for heading, end in zip(headings, ends, strict=True)}


def _output_of(page: Path, body: list[str], entry: dict[str, Any]) -> Iterator[Quote]:
    command = entry.get("command")
    if body[0].startswith("$ perfmodel "):
        words = [body.pop(0)[2:]]
        while words[-1].endswith("\\"):
            words[-1:] = [words[-1][:-1], body.pop(0).strip()]
        command = " ".join(word.strip() for word in words)
    if command:
        lines = tuple(line for line in body if line.strip() and line.strip() != "...")
        yield Quote(page, command, entry.get("slow", False), lines)


def _figures_of(page: Path, entry: dict[str, Any], section: str) -> Quote:
    pairs = (line.rpartition(" = ") for line in entry["figures"].splitlines() if line)
    figures = tuple((text.strip(), rule.strip()) for text, _, rule in pairs)
    return Quote(page, entry["command"], entry.get("slow", False), (), figures, section)


@cache
def run_command(command: str) -> str:
    """What a command prints on both streams, 110 columns wide, errors first; or the text of a report."""
    if (ROOT / command).is_file():
        return (ROOT / command).read_text(encoding="utf-8")
    python = [sys.executable, *(["-m", "perfmodel"] if command.startswith("perfmodel ") else [])]
    path = os.pathsep.join([str(ROOT), str(ROOT / "executors"), os.environ.get("PYTHONPATH", "")])
    process = subprocess.run(
        [*python, *shlex.split(command)[1:]],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "110", "PYTHONPATH": path, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return process.stdout if "--json" in command else process.stderr + process.stdout


def changed(quote: Quote, output: str) -> list[tuple[str, str]]:
    """(as quoted, as the command says it) of whatever differs by more than its digits show."""
    return [*_changed_lines(quote.lines, output.splitlines()), *_changed_figures(quote, output)]


def _changed_lines(quoted: tuple[str, ...], printed: list[str]) -> Iterator[tuple[str, str]]:
    at = 0
    for line in quoted:
        wording = _wording(line)
        result = next((n for n in range(at, len(printed)) if _wording(printed[n]) == wording), None)
        if result is None:
            yield line, "(no such line)"
            continue
        at = result + 1
        if not all(map(_agree, _numbers(line), _numbers(printed[result]))):
            yield line, printed[result].rstrip()


def _wording(line: str) -> str:
    return " ".join(_NUMBER.sub("#", re.sub("─+", "─", line)).split())


def _numbers(text: str) -> list[str]:
    return [match[0] for match in _NUMBER.finditer(text)]


def _agree(quoted: str, printed: str) -> bool:
    return _is_rounded(quoted, _value(printed))


def _value(number: str) -> float:
    return float(number.replace(",", ""))


def _is_rounded(quoted: str, value: float) -> bool:
    """Whether a value is what the quoted digits show, give or take `_RELATIVE`."""
    half = 0.5 * 10.0 ** -len(quoted.partition(".")[2])
    return abs(_value(quoted) - value) <= half * (1 + 1e-9) + _RELATIVE * abs(value)


def _changed_figures(quote: Quote, output: str) -> Iterator[tuple[str, str]]:
    names = _names(output)
    for text, expression in quote.figures:
        if quote.section.count(text) != 1:
            yield text, f"(stands {quote.section.count(text)} times in its section)"
            continue
        try:
            given = eval(expression, dict(names))
        except (ValueError, StopIteration, KeyError, AttributeError) as error:  # a sentence that is said no more
            yield text, f"({type(error).__name__}: {error})"
            continue
        values = [float(item) for item in (given if isinstance(given, (tuple, list)) else (given,))]
        shown = _numbers(text)[-len(values) :]
        if len(shown) < len(values):
            yield text, f"(has {len(shown)} numbers, the expression {len(values)})"
        elif not all(map(_is_rounded, shown, values)):
            yield text, _with_values(text, values)


def _with_values(text: str, values: list[float]) -> str:
    """The text with its last numbers replaced, each with as many decimals as it had."""
    spots = list(_NUMBER.finditer(text))[-len(values) :]
    for spot, value in reversed(list(zip(spots, values, strict=True))):
        text = f"{text[: spot.start()]}{value:,.{len(spot[0].partition('.')[2])}f}{text[spot.end() :]}"
    return text


def _names(output: str) -> dict[str, Any]:
    def number(pattern: str) -> tuple[float, ...]:
        match = re.search(pattern, output)
        if match is None:
            raise ValueError(f"nothing like {pattern!r} is in the output")
        return tuple(map(_value, match.groups()))

    def cell(title: str, row: str, column: str) -> float:
        return _cell(output.splitlines(), title, row, column)

    answer = json.loads(output) if output.startswith("{") else None
    return {"answer": answer, "text": output, "number": number, "cell": cell}


def _cell(lines: list[str], title: str, row: str, column: str) -> float:
    """Of the first Markdown table below a line that begins with `title`: its first number, thousands spelled out."""
    below = lines[next(n for n, line in enumerate(lines) if line.startswith(title)) :]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in below if line.startswith("|")]
    cells = next(cells for cells in rows if cells[0] == row)
    digits, suffix = re.match(r"([\d.,]+)(k?)", cells[rows[0].index(column)]).groups()  # type: ignore[union-attr]
    return _value(digits) * (1e3 if suffix else 1)


def written(differences: list[tuple[str, str]], text: str) -> str:
    """The text of a page or of its side file with what can be written: lines and figures that the command still has."""
    for old, new in differences:
        if not new.startswith("("):
            text = text.replace(old, new)
    return text


def main(run: Callable[[str], str] = run_command) -> int:
    """Compare all pages. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="Write what commands say now into the pages.")
    parser.add_argument("pages", nargs="*", type=Path, default=PAGES)
    given = parser.parse_args()
    count = 0
    for quote in (quote for page in given.pages for quote in quotes_of(page.resolve())):
        differences = changed(quote, run(quote.command))
        count += len(differences)
        for old, new in differences:
            print(f"{quote.page.relative_to(ROOT)}: {quote.command}\n  {old}\n  {new}")
        if given.write and differences:
            for path in filter(Path.is_file, (quote.page, side_file(quote.page))):
                path.write_text(written(differences, path.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{count} figures differ")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
