"""A run of two requests and three steps, counted by hand: timeline, curves, tiles and tables."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.report.document import Paragraph, Span, Table, Tiles, plain
from perfmodel.report.plots.run import TimeBins, kv_figure, latency_figure, load_figure, rate, summed, throughput_figure
from perfmodel.report.runs import timeline_json
from perfmodel.report.views.run import conversation_tables, latency_table, overload, run_view, shares
from perfmodel.sim.records.columns import RequestColumns, StepColumns
from perfmodel.specs.slo import SLO

# (request, arrival, first scheduled, first token, end in s; prompt, output, cached, preemptions, replica)
REQUESTS = ((4, 0.0, 1.0, 2.0, 5.0, 100, 4, 30, 2, 0), (9, 1.0, 1.0, 4.0, 4.0, 200, 1, 60, 0, 0))
# start, end in s, steps, tokens, decodes, context, chunks, running, waiting, blocks
STEPS = ((0, 2, 1, 100, 0, 0, 1, 1, 3, 10), (2, 4, 1, 201, 1, 101, 1, 2, 1, 40), (4, 10, 3, 1, 1, 104, 0, 1, 0, 20))


@pytest.fixture
def small(result):
    columns = dict(zip(RequestColumns.__dataclass_fields__, map(np.array, zip(*REQUESTS, strict=True)), strict=False))
    start, end, num_steps, *others = map(np.array, zip(*STEPS, strict=True))
    names = ("num_tokens", "num_decodes", "decode_context", "num_chunks", "num_running", "num_waiting", "used_blocks")
    steps = StepColumns(
        replica=0 * start,
        index=np.arange(3),
        num_steps=num_steps,
        start_s=start.astype(float),
        end_s=end.astype(float),
        first_duration_s=(end - start) / num_steps,
        **dict(zip(names, others, strict=True)),
        **dict.fromkeys(("num_drafts", "num_draft_tokens", "num_accepted_tokens"), 0 * start),
    )
    return replace(result, requests=RequestColumns(**columns), steps=steps, num_blocks=80)


def test_a_timeline_has_steps_requests_and_counters_in_microseconds(small) -> None:
    events = timeline_json(small)["traceEvents"]
    steps = [event for event in events if event.get("cat") == "step"]
    assert [(step["name"], step["ts"], step["dur"]) for step in steps] == [
        ("chunk", 0.0, 2e6),
        ("mixed", 2e6, 2e6),
        ("decode x3", 4e6, 6e6),
    ]
    assert steps[1]["args"] == {
        "index": 1,
        "steps": 1,
        "tokens": 201,
        "decodes": 1,
        "chunks": 1,
        "decode_context": 101,
    }
    counters = {
        name: [e["args"] for e in events if e["name"] == name and e["ph"] == "C"] for name in ("requests", "KV cache")
    }
    assert [tuple(counts.values()) for counts in counters["requests"]] == [(1, 3), (2, 1), (1, 0)]
    assert [list(counts) for counts in counters["requests"]] == [["running", "waiting"]] * 3
    assert counters["KV cache"] == [{"% used": 12.5}, {"% used": 50.0}, {"% used": 25.0}]


def test_a_request_queues_then_prefills_then_decodes(small) -> None:
    events = [event for event in timeline_json(small)["traceEvents"] if event.get("cat") == "request"]
    first = [(event["name"], event["ts"], event["dur"]) for event in events if event["tid"] == 4]
    assert first == [("queued", 0.0, 1e6), ("prefill", 1e6, 1e6), ("decode", 2e6, 3e6)]
    second = [(event["name"], event["ts"], event["dur"]) for event in events if event["tid"] == 9]
    assert second == [("prefill", 1e6, 3e6)]
    assert next(event["args"] for event in events if event["tid"] == 4) == {
        "replica": 0,
        "cached_tokens": 30,
        "preemptions": 2,
    }


def test_curves_are_means_over_time(small) -> None:
    """Two bins of 5 s: 1 of the 6 s of the third step are in the first bin."""
    bins, steps = TimeBins(np.array([0.0, 5.0, 10.0])), small.steps
    assert summed(steps, steps.num_running.astype(float), bins) == pytest.approx([(2 + 4 + 1) / 5, 1.0])
    assert rate(steps, steps.num_tokens, bins) == pytest.approx([(100 + 201 + 3 / 6) / 5, 3 / 6])


def test_figures_show_the_named_series(small) -> None:
    def area(figure, name):
        (trace,) = [trace for trace in figure["data"] if trace.get("name") == name]
        return sum(trace["y"]) * 1.0  # ten bins of a second

    throughput = throughput_figure(small.steps)
    assert area(throughput, "decode tokens") == pytest.approx(1 + 3)
    assert area(throughput, "prefill tokens") == pytest.approx(100 + 200)
    load = load_figure(small.steps)
    assert area(load, "running") == pytest.approx(2 * 1 + 2 * 2 + 6 * 1)
    assert area(load, "waiting") == pytest.approx(2 * 3 + 2 * 1)
    (kv,) = (trace for trace in kv_figure(small.steps, 80)["data"] if trace.get("name"))  # the other trace is its band
    assert sum(kv["y"]) == pytest.approx(2 * 12.5 + 2 * 50 + 6 * 25)
    latencies = latency_figure(small.requests, SLO(ttft_ms=1500, e2el_ms=5000))
    met = [
        note["text"].rpartition("<br>")[2] for note in latencies["layout"]["annotations"] if "met by" in note["text"]
    ]
    assert met == ["met by 0.0 %", "met by 100.0 %"]
    ttft = next(trace for trace in latencies["data"] if trace.get("name") == "TTFT")
    assert (ttft["x"], ttft["y"]) == ([2000, 3000], [50, 100])


def blocks(document, kind):
    return [block for block in document.flat if isinstance(block, kind)]


def test_tiles_hold_means_with_their_p99_and_the_share_within_the_slo(result) -> None:
    own = {"mean_ttft_ms": 321.0, "median_ttft_ms": 1.0, "p99_ttft_ms": 500.0, "p99_tpot_ms": 25.2, "mean_tpot_ms": 9.5}
    own |= {"request_throughput": 8.0, "request_goodput": 6.0, "output_throughput": 844.2}
    own |= {"slo_attainment_by": {"ttft": 0.95, "tpot": 0.5}}
    (tiles,) = blocks(run_view(replace(result, summary=result.summary | own)), Tiles)
    shown = {tile.label: tile for tile in tiles.tiles}
    assert (shown["mean TTFT"].value, shown["mean TTFT"].aside) == (
        "321",
        Span("p99 500 ms, SLO 500: 95.0% met", "good"),
    )
    assert (shown["mean TPOT"].value, shown["mean TPOT"].aside) == (
        "9.50",
        Span("p99 25.2 ms, SLO 25: 50.0% met", "bad"),
    )
    assert (shown["requests"].value, shown["requests"].aside) == ("8.00", Span("75.0% within the SLO"))
    assert shown["output"].value == "844"


def test_columns_of_the_latency_table_are_their_statistics(result) -> None:
    names = ("mean", "median", "p90", "p95", "p99", "std")
    own = {f"{name}_ttft_ms": 100.0 + number for number, name in enumerate(names)}
    table = latency_table(replace(result, summary=result.summary | own))
    row = dict(zip(table.head, table.rows[0], strict=True))
    for number, name in enumerate(names):
        if name in row:
            assert row[name] == f"{100 + number}.00"
    assert {"mean", "p99"} < set(row)


def test_percentile_limits_are_in_the_row_of_their_latency(result) -> None:
    slo = SLO.model_validate({"ttft_p99_ms": 400, "tpot_p90_ms": 30, "ttft_p90_ms": 300})
    scenario = result.scenario.model_copy(update={"slo": slo})
    met = {"slo_percentiles_met": {"ttft_p99_ms": True, "tpot_p90_ms": True, "ttft_p90_ms": False}}
    table = latency_table(replace(result, scenario=scenario, summary=result.summary | met))
    cells = {plain(row[0]): dict(zip(table.head, row, strict=True))["SLO"] for row in table.rows}
    assert cells["TPOT"] == Span("30 p90 ok", "good")
    assert {cells["TTFT"].text, cells["TTFT"].tone} <= {"300 p90 over, 400 p99 ok", "400 p99 ok, 300 p90 over", "bad"}
    assert cells["E2E latency"] == Span("")


def test_an_overload_names_the_offered_and_the_sustained_rate() -> None:
    rates = {"offered_req_s": 12.0, "sustained_req_s": 7.0}
    (line,) = overload({"overload": rates})
    assert plain(line.line).startswith("Overloaded: offered 12 req/s, sustains about 7;")
    (line,) = overload({"overload": rates, "timed_out": 3})
    assert plain(line.line).startswith("Overloaded: offered 12 req/s, answers about 7;")
    assert not list(overload({}))


def test_energy_is_shown_as_shares_of_the_total() -> None:
    (line,) = (block for block in shares({"energy_split_j": {"memory": 30.0, "compute": 50.0, "idle": 20.0}}))
    assert isinstance(line, Paragraph)
    assert plain(line.line) == "Energy taken by: compute 50%  memory 30%  idle 20%"


def test_units_of_the_conversation_table() -> None:
    turn = {"turn": "2", "requests": 1234, "mean_prompt_tokens": 5678.0, "cached_share": 0.625, "mean_ttft_ms": 1.5}
    turn |= {"p99_ttft_ms": 2.5, "mean_tpot_ms": None}
    conversations = {"turns": [turn], "conversations": 12, "mean_turns": 3.5, "mean_duration_ms": 90_000.0}
    conversations |= {"p99_duration_ms": 200_000.0, "mean_waiting_ms": 4_000.0, "p99_waiting_ms": 8_000.0}
    (table,) = conversation_tables({"conversations": conversations})
    assert isinstance(table, Table)
    assert list(table.rows[0]) == ["2", "1,234", "5,678", "62.5", "1.5", "2.5", "–"]
    assert "lasts 90.0 s (p99 200.0 s)" in table.note
    assert "waits for answers 4.0 s (p99 8.0 s)" in table.note
