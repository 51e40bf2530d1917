"""Tables for the terminal."""

import io

from rich.console import Console

from perfmodel.report.runs.tables import comparison_table, print_summary


def printed(draw, width=120):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    draw(console)
    return console.file.getvalue()


def test_summary_has_vllm_names_units_and_targets(result):
    text = printed(lambda console: print_summary(result, console))
    for wanted in (
        "Successful requests",
        "Request throughput",
        "req/s",
        "TPOT",
        "p99",
        "500 p99 ok",
        "18.00 to 23.00",
        "memory 71%",
        "datasheet",
        "one note",
    ):
        assert wanted in text
    assert "Energy" not in text  # no value, no row


def test_brackets_in_names_are_not_markup(result):
    text = printed(lambda console: print_summary(result, console))
    assert "by-hand <&>" in text


def test_comparison_gives_ratios_to_the_first(result):
    faster = result.summary | {"output_throughput": 2 * result.summary["output_throughput"]}
    text = printed(lambda console: console.print(comparison_table([("a", result.summary), ("b", faster)])))
    row = next(line for line in text.splitlines() if "Output token throughput" in line)
    assert row.split()[-1] == "2.00x"
