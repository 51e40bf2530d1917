"""Plans: choices by hand, intervals, and a whole plan from the file to the command line that serves it."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.cli.terminal import progress_lines
from perfmodel.errors import SpecError
from perfmodel.planning.choice import deployed, finalists, objective_key, pick_replicas, shortfalls
from perfmodel.planning.finalist import Preliminary, Screened
from perfmodel.planning.result import PlanResult
from perfmodel.planning.search import make_plan
from perfmodel.planning.service import wanted_rate
from perfmodel.planning.space import Base
from perfmodel.planning.spec import PlanSpec
from perfmodel.report.document import Table, plain
from perfmodel.report.terminal import render_text
from perfmodel.report.views.plan import brief_view, plan_sentences, preliminary_sentence
from perfmodel.specs import load_scenario
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.scenario import Scenario

SPACE = (
    "plan={finalists: 3, seeds: 2, num_requests: 200, max_gpus: 4, space: {hardware: [a100-sxm-80gb, h100-sxm-80gb], "
    "tensor_parallel_size: [1, 2], max_num_seqs: [64], max_num_batched_tokens: [2048]}}"
)
SHORT = (
    "traffic.input_tokens={distribution: fixed, value: 300}",
    "traffic.output_tokens={distribution: fixed, value: 40}",
)


def serving(rate: float, devices: int = 1, usd: float | None = 2.0, **update: Any) -> Screened:
    """A candidate of which only size, rate and price count."""
    candidate: Any = SimpleNamespace(
        num_devices=devices, kind=object(), ratio=None, label=f"{devices} devices", usd_per_hour=usd
    )
    return replace(Screened(candidate, rate, "ttft", 1.0, "calibrated"), **update)


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        (PlanSpec(), 4),  # 10 / 3, rounded up
        (PlanSpec(objective="lowest_latency"), 8),  # as many as 16 devices of 2 are
        (PlanSpec(max_gpus=7), None),
        (PlanSpec(budget_usd_per_hour=7.9), None),
        (PlanSpec(budget_usd_per_hour=8.0), 4),
        (PlanSpec.model_validate({"space": {"replicas": (2, 5, 6)}}), 5),
    ],
)
def test_as_many_replicas_as_the_rate_asks_for(spec: PlanSpec, count: int | None) -> None:
    assert pick_replicas(serving(3.0, devices=2), spec, 10.0) == count


def test_each_objective_prefers_what_it_says() -> None:
    """Ten requests a second: small and dear, large and cheap, fast for its devices."""
    small, cheap, fast = serving(5.0, 1, 9.0), serving(10.0, 4, 2.0), serving(30.0, 3, 10.0)
    best = {}
    for objective in ("cheapest", "fewest_gpus", "goodput_per_gpu"):
        spec = PlanSpec.model_validate({"objective": objective})
        found = deployed([small, cheap, fast], spec, 10.0)
        best[objective] = min(found, key=lambda each: objective_key(each, spec)).screened
    assert best == {"cheapest": cheap, "fewest_gpus": small, "goodput_per_gpu": fast}


def test_who_does_not_serve_is_counted_by_its_reason() -> None:
    spec = PlanSpec(max_gpus=4, budget_usd_per_hour=5.0)
    all_of_them = [serving(0.0), serving(1.0), serving(3.0, usd=2.0), serving(10.0)]
    assert shortfalls(all_of_them, spec, 10.0) == {
        "misses the SLO at any rate": 1,
        "too slow for the rate with max_gpus": 1,
        "over budget at the rate": 1,
    }


def test_finalists_are_of_several_kinds() -> None:
    """Five ways to schedule on one layout are one choice, of which the best goes on."""
    kind = object()
    alike = [serving(10.0 + i) for i in range(5)]
    for each in alike:
        each.candidate.kind = kind  # type: ignore[misc]
    other = serving(6.0)
    spec = PlanSpec(finalists=3, objective="goodput_per_gpu")
    chosen = [each.screened for each in finalists(deployed([*alike, other], spec, 5.0), spec)]
    assert chosen == [alike[4], other]


def test_what_most_would_do_is_simulated_too() -> None:
    """Three disaggregated candidates are better than the unified one, which is simulated all the same."""
    apart = [serving(10.0 + 2 * i) for i in range(3)]
    for each in apart:
        each.candidate.ratio = (1, 1)  # type: ignore[misc]
    spec = PlanSpec(finalists=2, objective="goodput_per_gpu")
    unified = serving(6.0)
    chosen = [each.screened for each in finalists(deployed([*apart, unified], spec, 5.0), spec)]
    assert chosen == [apart[2], unified]


def test_the_rate_is_the_traffics_unless_the_plan_says_another() -> None:
    scenario = load_scenario("llama-3.1-8b-a100")
    assert wanted_rate(scenario, PlanSpec()) == 4.0
    assert wanted_rate(scenario, PlanSpec(rate=7.0)) == 7.0
    closed = load_scenario("llama-3.1-8b-a100", ["traffic.arrivals={process: closed_loop, concurrency: 8}"])
    with pytest.raises(SpecError, match="give plan"):
        wanted_rate(closed, PlanSpec())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plan") / "points.sqlite"


def test_the_screen_answers_before_anything_is_simulated(tmp_path: Path) -> None:
    """Then one bar counts all that is simulated, and has its total before the first run is done."""
    happened: list[tuple[Any, ...]] = []
    preliminaries: list[Preliminary] = []

    def on_preliminary(preliminary: Preliminary) -> None:
        preliminaries.append(preliminary)
        happened.append(("preliminary",))

    @contextmanager
    def shown(stage: str) -> Iterator[Any]:
        happened.append((stage,))
        yield lambda done, total: happened.append((stage, done, total))

    overrides = (*SHORT, "traffic.arrivals.rate=60", "plan.finalists=2", "plan.seeds=1", SPACE)
    found = make_plan(
        "llama-3.1-8b-a100", overrides, tmp_path / "points.sqlite", 1, stages=shown, on_preliminary=on_preliminary
    )
    assert happened[:3] == [("screening",), ("preliminary",), ("simulating the finalists' requests",)]
    counts = [each[1:] for each in happened if len(each) == 3]
    assert counts[0][0] == 0
    assert [done for done, _ in counts] == sorted(done for done, _ in counts)
    assert counts[-1][0] == counts[-1][1] >= 4 * 200  # two finalists: the highest rate of each, and a run at the rate
    assert all(total >= done for done, total in counts)
    (first,) = preliminaries
    assert isinstance(found, PlanResult)
    labels = [each.screened.candidate.label for each in first.finalists]
    assert found.winner is not None
    assert found.winner.screened.candidate.label in labels
    sentence = preliminary_sentence(first)
    assert sentence.startswith(f"Simulating {len(labels)} of {first.num_candidates} candidates")
    assert first.finalists[0].screened.candidate.layout.label in sentence
    assert len(sentence) <= 150
    assert "none of 4 candidates serves 60 requests/s" in preliminary_sentence(replace(first, finalists=()))


@pytest.fixture(scope="module")
def result(store: Path) -> PlanResult:
    return make_plan("llama-3.1-8b-a100", (*SHORT, "traffic.arrivals.rate=60", SPACE), store, workers=1)


def test_the_choice_serves_the_rate_and_nothing_that_does_is_cheaper(result: PlanResult) -> None:
    winner = result.winner
    assert winner is not None
    assert winner.attained >= 0.9
    assert winner.rate >= 60
    assert winner.num_devices <= 4
    sure = [each for each in result.ranked if result.sufficient(each) >= result.spec.confidence]
    assert winner.usd_per_hour == min(each.usd_per_hour for each in sure or [winner])
    kinds = [each.screened.candidate.kind for each in (*result.ranked, *result.missed)]
    assert len(set(kinds)) == len(kinds)


@pytest.mark.release
def test_a_plan_gets_no_cheaper_by_asking_for_more_confidence(store: Path, result: PlanResult) -> None:
    """And with none it is the cheapest that serves if predictions are exact."""
    costs, found_sure = [], []
    for confidence in (0.0, 0.5, 0.8, 0.95):
        overrides = (*SHORT, "traffic.arrivals.rate=60", SPACE, f"plan.confidence={confidence}")
        found = make_plan("llama-3.1-8b-a100", overrides, store, workers=1)
        assert isinstance(found, PlanResult)
        assert found.winner is not None
        assert found.certainty is not None
        costs.append(found.winner.usd_per_hour)
        assert found.certainty.share >= confidence or found.winner.num_devices == found.spec.max_gpus
        found_sure.append(found.certainty)
    assert costs == sorted(costs)
    assert found_sure[0].extra_cost == 0.0
    assert all(one.value >= 0 for each in found_sure for one in each.measurements)


@pytest.mark.release
def test_a_result_prints_itself(result: PlanResult) -> None:
    assert result.winner is not None
    text = str(result)
    assert f"Take {result.winner.label}" in text
    assert "USD per hour" in text
    assert "interval" in text


def test_a_plan_says_which_prices_it_compares(result: PlanResult) -> None:
    compared = {each.screened.candidate.layout.scenario.hardware.name for each in result.ranked}
    told = [note for note in result.notes if note.startswith("Price: ")]
    assert all(any(name in line for line in told) for name in compared)
    assert len(told) == len(set(told))


def test_on_the_front_what_is_dearer_has_shorter_latencies(result: PlanResult) -> None:
    costs = [point.usd_per_hour or 0.0 for point in result.front]
    assert costs == sorted(costs)
    near = [point.tightness for point in result.front]
    assert near == sorted(near, reverse=True)


def test_an_slo_beyond_reach_says_what_comes_nearest(store: Path) -> None:
    found = make_plan("llama-3.1-8b-a100", (*SHORT, "traffic.arrivals.rate=4000", SPACE), store, workers=1)
    assert found.winner is None
    assert "would suffice" in str(found)
    with_no_hope = make_plan("llama-3.1-8b-a100", (*SHORT, "slo={tpot_ms: 0.1}", SPACE), store, workers=1)
    assert "for a single user" in str(with_no_hope)
    odd = "plan.space.tensor_parallel_size=[3]"
    with_no_candidate = make_plan("llama-3.1-8b-a100", (*SHORT, SPACE, odd), store, workers=1)
    assert "None of the candidates can run" in str(with_no_candidate)
    assert "attention heads do not divide" in str(with_no_candidate)


@pytest.mark.parametrize("flag", ["--json", "--export=out"])
def test_a_plan_without_an_answer_says_so_by_its_exit_status(tmp_path: Path, store: Path, flag: str) -> None:
    """1, with the reasons on stdout; where files were asked for, that none was written."""
    flags = [f"--set={text}" for text in (*SHORT, SPACE, "plan.space.tensor_parallel_size=[3]")]
    flag = flag.replace("out", str(tmp_path / "out"))
    ran = CliRunner().invoke(app, ["plan", "llama-3.1-8b-a100", *flags, "--store", str(store), flag])
    assert ran.exit_code == 1, ran.output
    assert "None of the candidates can run" in ran.stdout
    assert ("nothing was written, since nothing serves" in ran.stderr) == ("export" in flag)
    assert not (tmp_path / "out").exists()


def test_the_default_answer_is_one_screen(result: PlanResult) -> None:
    """The choice first, its row marked, at most six options, the command that starts it: 40 lines of 100 columns."""
    brief = brief_view(result, "What serves it?")
    (options,) = [block for block in brief.blocks if isinstance(block, Table)]
    assert result.winner is not None
    layout = result.winner.screened.candidate.layout.label
    assert plain(brief.blocks[0].line).startswith(f"{result.winner.replicas} x {layout}: ")  # type: ignore[union-attr]
    assert 1 <= len(options.rows) <= 6
    assert [plain(row[0])[0] for row in options.rows].count(">") == 1
    assert result.trust is not None
    assert f"Trust: {result.trust.badge}. " in render_text(brief)
    assert "raise plan.num_requests" not in render_text(brief)  # its runs are long enough
    lines = render_text(brief).splitlines()
    assert sum(max(1, ceil(len(line) / 100)) for line in lines) <= 40
    assert all(len(line) <= 100 for line in lines if line.startswith(" "))


def test_the_highest_rate_stands_within_its_interval_low_end_first(result: PlanResult) -> None:
    (line,) = [line for line in map(plain, plan_sentences(result)) if line.startswith("It serves up to")]
    rate, low, high = (float(number) for number in re.findall(r"(?:up to|interval|to) ([\d.]+)", line)[:3])
    assert low < rate < high


def test_options_that_look_alike_are_one_row(result: PlanResult) -> None:
    """Token budgets have no column on this screen; a column that no row fills is left out."""
    winner = result.winner
    assert winner is not None
    candidate = replace(winner.candidate, max_num_batched_tokens=winner.candidate.max_num_batched_tokens // 2)
    alike = replace(winner, screened=replace(winner.screened, candidate=candidate))
    fewer = replace(candidate, max_num_seqs=winner.candidate.max_num_seqs // 2)
    other = replace(winner, screened=replace(winner.screened, candidate=fewer), records=())
    brief = brief_view(replace(result, ranked=[winner, alike, other], missed=[]), "?")
    (options,) = [block for block in brief.blocks if isinstance(block, Table)]
    assert [plain(row[1]) for row in options.rows] == [str(winner.candidate.max_num_seqs), str(fewer.max_num_seqs)]
    assert any(head.endswith("TPOT") for head in options.head)  # one of them has it, though the other has no records
    without = brief_view(replace(result, ranked=[other], missed=[]), "?")
    (options,) = [block for block in without.blocks if isinstance(block, Table)]
    assert not any(head.endswith("TPOT") for head in options.head)


def test_a_cheaper_option_is_shown_and_why_it_is_not_chosen(result: PlanResult) -> None:
    """Half the price, and too few requests within the SLO: beside the choice, with that share."""
    assert result.winner is not None
    screened = result.winner.screened
    price = screened.candidate.usd_per_hour
    assert price is not None
    candidate = replace(screened.candidate)
    candidate.__dict__["usd_per_hour"] = price / 2
    cheaper = replace(result.winner, screened=replace(screened, candidate=candidate))
    text = render_text(brief_view(replace(result, missed=[cheaper, *result.missed]), "?"))
    assert f"for {cheaper.usd_per_hour:.2f} USD/h: only {cheaper.attained:.0%} of requests meet the SLO" in text
    unsure = replace(result, ranked=[result.winner, cheaper], missed=[])
    share = unsure.sufficient(cheaper)
    strict = replace(unsure, spec=result.spec.model_copy(update={"confidence": 0.999}))
    assert f"it suffices in {share:.0%} of the draws, plan.confidence asks for 100%" in render_text(
        brief_view(strict, "?")
    )
    lenient = result.spec.model_copy(update={"confidence": 0.01, "objective": "lowest_latency"})
    fast = replace(unsure, spec=lenient)
    figures = f"{fast.figure(cheaper):.4g} against {fast.figure(result.winner):.4g}"
    assert f"the objective is latency over its limit, {figures}" in render_text(brief_view(fast, "?"))
    alone = render_text(brief_view(replace(result, ranked=[result.winner], missed=[]), "?"))
    assert "No simulated option is cheaper." in alone


def test_from_the_command_line_to_files_that_serve(tmp_path: Path, store: Path, result: PlanResult) -> None:
    """What `--export` writes is a scenario with the plan's engine and rate, and a command of vLLM's."""
    flags = [f"--set={text}" for text in (*SHORT, "traffic.arrivals.rate=60", SPACE)]
    files = ["--report", str(tmp_path / "plan.md"), "--export", str(tmp_path / "out"), "--store", str(store)]
    ran = CliRunner().invoke(app, ["plan", "llama-3.1-8b-a100", *flags, *files, "--json"])
    assert ran.exit_code == 0, ran.output
    answer = json.loads(ran.stdout)
    assert result.winner is not None
    assert answer["winner"]["label"] == result.winner.label
    planned = load_scenario(tmp_path / "out" / "llama-3.1-8b-a100-planned.yaml")
    assert planned.num_devices == result.winner.num_devices
    assert planned.traffic.arrivals.rate == 60
    assert planned.engine.max_num_seqs == 64
    serve = (tmp_path / "out" / "serve.sh").read_text(encoding="utf-8")
    assert "vllm serve" in serve
    assert "--max-num-seqs 64" in serve
    assert_same_engine(serve, planned)
    document = (tmp_path / "plan.md").read_text(encoding="utf-8")
    for name in ("plan.finalists.svg", "plan.json"):
        assert (tmp_path / name).is_file()
    assert "## To start it" in document
    page = CliRunner().invoke(
        app, ["plan", "llama-3.1-8b-a100", *flags, "--report", str(tmp_path / "plan.html"), "--store", str(store)]
    )
    assert page.exit_code == 0, page.output
    assert "<svg" in (tmp_path / "plan.html").read_text(encoding="utf-8")


def test_a_plan_in_a_pipe_reports_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line on stderr every 10 s (10 ms here), after one short sentence that names what is simulated."""
    monkeypatch.setattr("perfmodel.cli.progress_lines", partial(progress_lines, every_s=0.01))
    one = "plan.space.hardware=[h100-sxm-80gb]", "plan.space.tensor_parallel_size=[1]", "plan.seeds=1"
    flags = [f"--set={text}" for text in (*SHORT, SPACE, *one)]
    ran = CliRunner().invoke(app, ["plan", "llama-3.1-8b-a100", *flags, "--store", str(tmp_path / "points.sqlite")])
    assert ran.exit_code == 0, ran.output
    lines = ran.stderr.splitlines()
    assert any(line.startswith("Simulating 1 of 1 candidates; the best in closed form is 1 x ") for line in lines)
    assert any(line.startswith("simulating the finalists' requests: ") and line.endswith(" left") for line in lines)


def assert_same_engine(serve: str, planned: Scenario) -> None:
    """What `perfmodel new` reads in the exported script is the planned engine."""
    from perfmodel.specs.commands.line import Asking, read_line

    found = read_line(serve, Asking(hardware=planned.hardware.name))
    assert found.unmodelled == ()
    for name, value in found.data["engine"].items():
        assert getattr(planned.engine, name) == value
    wanted = planned.engine.model_fields_set - {"profile", "version"}
    own = {name for name in wanted if getattr(planned.engine, name) != EngineSpec.model_fields[name].default}
    assert own <= {*found.data["engine"]}


@pytest.mark.release
def test_disaggregated_choices_name_the_connector(store: Path) -> None:
    from perfmodel.planning.export import serve_commands

    space = SPACE.replace("max_num_seqs", "disaggregation: ['1:1'], max_num_seqs")
    found = make_plan("llama-3.1-8b-a100", (*SHORT, space), store, workers=1)
    assert found.winner is not None
    lines = serve_commands(found, found.winner)
    assert sum("kv_producer" in line for line in lines) == 1
    assert sum("kv_consumer" in line for line in lines) == 1
    assert Base("llama-3.1-8b-a100").load().plan is None


def test_replicas_on_several_nodes_are_started_over_ray(store: Path) -> None:
    """Nodes of one device: TP2 spans two of them, TP1 none."""
    from perfmodel.planning.export import serve_commands

    for tp, most in ((1, 1), (2, 2)):
        space = f"plan.space={{tensor_parallel_size: [{tp}]}}"
        small = ("cluster.network.devices_per_node=1", f"plan.link_domain={most}", "plan.finalists=1", "plan.seeds=1")
        found = make_plan("llama-3.1-8b-a100", (*SHORT, *small, space), store, workers=1)
        assert found.winner is not None
        lines = "\n".join(serve_commands(found, found.winner))
        assert ("--distributed-executor-backend ray" in lines) == (tp > 1)
        assert ("2 nodes" in lines) == (tp > 1)


ONE_DEVICE = SPACE.replace("hardware: [a100-sxm-80gb, h100-sxm-80gb], ", "")
UNEQUAL = SPACE.replace(
    "max_num_seqs",
    "disaggregation: ['1:1'], prefill: {hardware: [h100-sxm-80gb]}, "
    "decode: {hardware: [a100-sxm-80gb], max_num_batched_tokens: [1024]}, max_num_seqs",
)
DRAFTING = SPACE.replace(
    "max_num_seqs",
    "speculation: [{method: ngram, num_speculative_tokens: 2, acceptance: {rate: 0.7}}], max_num_seqs",
)


@pytest.mark.release
@pytest.mark.parametrize(
    ("overrides", "space"),
    [(("hardware.hbm.bandwidth=1.2x", "hardware.price=3"), ONE_DEVICE), ((), UNEQUAL), ((), DRAFTING)],
    ids=["changed device", "unequal pools", "drafts"],
)
def test_what_is_exported_simulates_to_the_plans_own_answer(
    overrides: tuple[str, ...], space: str, store: Path, tmp_path: Path
) -> None:
    """Of a device with changed facts, of unequal pools, with drafts: the same requests, the same answer."""
    from perfmodel import sim
    from perfmodel.planning.export import export_plan, serve_commands
    from perfmodel.planning.service import at_rate
    from perfmodel.specs.overrides import as_overrides

    found = make_plan("llama-3.1-8b-a100", (*SHORT, *overrides, space), store, workers=1)
    assert found.winner is not None
    export_plan(found, tmp_path)
    fields = at_rate(found.scenario, found.rate, 100)
    planned = load_scenario(tmp_path / "llama-3.1-8b-a100-planned.yaml", as_overrides(fields))
    meant = found.base.load((*found.winner.screened.candidate.overrides(found.winner.replicas), *as_overrides(fields)))
    ran, expected = (sim.simulate(each).summary for each in (planned, meant))
    for metric in ("mean_ttft_ms", "mean_tpot_ms", "usd_total", "energy_wh"):
        assert ran[metric] == expected[metric]
    lines = "\n".join(serve_commands(found, found.winner))
    assert ("ngram" in lines) == ("ngram" in space)
    if "prefill" in space:
        assert "1 x h100-sxm-80gb" in lines
        assert "1 x a100-sxm-80gb" in lines
        assert "--max-num-batched-tokens 1024" in lines


def test_a_plan_refuses_weights_of_tenants_which_only_a_gateway_reads(tmp_path: Path) -> None:
    gateway = "cluster.gateway={max_outstanding: 8, max_queue: 8, scheduling_policy: vtc}"
    tenants = "traffic.classes=[{name: a, share: 0.5}, {name: b, share: 0.5, weight: 2}]"
    with pytest.raises(SpecError, match="leave the weight of traffic"):
        make_plan("llama-3.1-8b-a100", (gateway, tenants), tmp_path / "points.sqlite")
