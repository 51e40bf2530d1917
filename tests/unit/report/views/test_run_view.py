"""A run as a document: vLLM's names, limits and intervals, what was thinned, where the numbers come from."""

from dataclasses import replace

import pytest

from perfmodel.planning.typical_step import estimate_choice
from perfmodel.report.document import Facts, Notes, Paragraph, Plot, Sentences, Span, Table, Tiles, plain
from perfmodel.report.pages import render_page
from perfmodel.report.views.run import run_view
from perfmodel.specs import load_scenario


def blocks(document, kind):
    return [block for block in document.flat if isinstance(block, kind)]


def table(document, title):
    return next(block for block in blocks(document, Table) if block.title == title)


@pytest.fixture(scope="module")
def step():
    return estimate_choice(load_scenario("llama-3.1-8b-a100"), batch=32, context=1000)


def test_plots_of_the_records_and_of_the_step(result, step):
    titles = [plot.title for plot in blocks(run_view(result, step), Plot)]
    assert titles == [
        "Latency distributions",
        "Tokens per second",
        "Requests in the system",
        "KV cache in use",
        "What bounded the time",
        "Roofline of one step",
        "Operators of that step",
        "Device memory",
    ]
    without = run_view(replace(result, requests=None, steps=None))
    assert [plot.title for plot in blocks(without, Plot)] == ["What bounded the time"]
    assert blocks(without, Tiles)


@pytest.mark.parametrize(("share", "tone"), [(0.973, "good"), (0.9, "good"), (0.894, "bad")])
def test_latencies_stand_beside_their_intervals_and_limits(result, share, tone):
    """The share of requests within the limit, of which a plan asks for nine in ten."""
    shares = {"slo_attainment_by": {"tpot": share}}
    latencies = table(run_view(replace(result, summary={**result.summary, **shares})), "Latency (ms)")
    assert [plain(row[0]) for row in latencies.rows] == ["TTFT", "TPOT", "ITL", "E2E latency"]
    tpot = dict(zip(latencies.head, latencies.rows[1], strict=True))
    assert tpot["80 % interval of mean"] == "18.00 to 23.00"
    assert tpot["SLO"] == Span(f"25: {share:.1%} met", tone)
    assert float(tpot["p99"]) == pytest.approx(result.summary["p99_tpot_ms"], abs=0.005)
    assert set(latencies.rows[2][1:7]) == {"–"}  # this run has no ITL


def test_what_the_summary_has_no_value_of_is_left_out(result):
    (summary,) = [facts for facts in blocks(run_view(result), Facts) if facts.title == "Summary"]
    shown = {fact.label: f"{fact.value} {fact.unit}".rstrip() for _, group in summary.groups for fact in group}
    assert shown["Successful requests"] == "800"
    assert shown["Model FLOP utilisation (MFU)"] == "21.0 %"
    assert shown["Total cost per million output tokens"] == "0.813 USD"
    assert not {"Energy", "Retries"} & set(shown)


def test_bounds_are_told_by_their_tones_largest_first(result):
    lines = [block.line for block in blocks(run_view(result), Paragraph)]
    bound = next(line for line in lines if plain(line).startswith("Time bound by"))
    assert [piece for piece in bound if isinstance(piece, Span)] == [
        Span("memory 71%", "memory"),
        Span("compute 20%", "compute"),
        Span("overhead 9%", "overhead"),
    ]


def test_says_what_was_thinned_and_where_numbers_come_from(result, step):
    document = run_view(result, step)
    assert "Drawn through 500 of them" in blocks(document, Plot)[0].note
    sources = next(block for block in blocks(document, Sentences) if block.title == "Where the numbers come from")
    assert "datasheet alone" in sources.lines[0]
    assert "Not confirmed in a vendor" in sources.lines[1]
    assert blocks(document, Notes)[0].lines == ("one note",)
    assert "do no counted FLOPs" not in blocks(document, Plot)[5].note or "embedding" in blocks(document, Plot)[5].note


def test_pools_and_classes_have_tables_of_their_own(result):
    pools = [{"role": "prefill", "completed": 3, "busy_share": 0.5}, {"role": "decode", "busy_share": 0.25}]
    found = table(run_view(replace(result, summary=result.summary | {"pools": pools})), "Pools")
    assert found.head == ("", "Successful requests", "Busy share, %")
    assert [list(row) for row in found.rows] == [["prefill", "3", "50"], ["decode", "–", "25"]]


def test_equal_results_give_equal_pages_with_names_escaped(result, step):
    page = render_page(run_view(result, step))
    assert render_page(run_view(result, step)) == page
    assert "by-hand &lt;&amp;&gt;" in page
    assert "<title>by-hand <" not in page
    assert page.count("<svg") == sum(isinstance(block, Plot) for block in run_view(result, step).flat)


def test_no_group_of_the_summary_is_empty_and_no_label_stands_twice(result):
    """A served run has no offline job, and its energy stands once."""
    for facts in blocks(run_view(result), Facts):
        assert all(group for _, group in facts.groups)
        if facts.title == "Summary":
            labels = [fact.label for _, group in facts.groups for fact in group]
            assert len(labels) == len(set(labels))
            assert "Offline job" not in dict(facts.groups)
