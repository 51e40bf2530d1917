"""Every figure of the page is one of the JSON that the card's command prints: fifty states, drawn and then fixed."""

import json
import random

import pytest

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")

from typer.testing import CliRunner
from web_site import Page

from perfmodel.cli import app
from perfmodel.commands.runs import MemoryRequest, SimulateRequest
from perfmodel.web.figures import NUMBER_FORMS, figure, value_at
from perfmodel.web.pages import Pages
from perfmodel.web.service import QueryService
from perfmodel.web.state import read_state, request_of
from perfmodel.web.views import VIEWS

MODELS = ["llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3", "gemma-3-27b", "qwen3-0.6b"]
DEVICES = ["h100-sxm-80gb", "a100-sxm-80gb", "h200-sxm", "b200-sxm", "mi300x", "l40s", "rtx-4090"]
FIELDS = {
    "engine.tensor_parallel_size": ["1", "2", "4", "8"],
    "engine.kv_cache_dtype": ["fp8", "auto"],
    "engine.max_num_seqs": ["8", "200", "1024"],
    "engine.max_num_batched_tokens": ["2048", "8K"],
    "engine.gpu_memory_utilization": ["0.7", "0.92"],
    "engine.max_model_len": ["4K", "16384"],
    "engine.enforce_eager": ["true", "false"],
    "engine.quantization": ["fp8", "w4a16"],
    "cluster.replicas": ["2"],
    "rate": ["0.5", "3"],
    "traffic": ["chat", "sharegpt", "azure-code"],
    "ttft": ["500ms"],
    "batch": ["1", "64", "300"],
    "context": ["512", "8K"],
    "prefill": ["100", "4K"],
}
NUM_STATES = 50


def drawn_states():
    """Any, whether their models fit or not."""
    draw = random.Random(20261123)
    while True:
        fields = {"model": draw.choice(MODELS[:4] if draw.random() < 0.6 else MODELS), "hardware": draw.choice(DEVICES)}
        for key in draw.sample(sorted(FIELDS), draw.randint(0, 5)):
            fields[key] = draw.choice(FIELDS[key])
        yield read_state("&".join(f"{key}={value}" for key, value in fields.items()))


# Few requests; the gain of a technique is a `whatif --against` like that of an alternative, which is here.
SIMULATED = (
    "model=llama-3.1-8b&hardware=h100-sxm-80gb&rate=2&ttft=1s&traffic.num_requests=12&against=engine.quantization%3Dfp8"
)


@pytest.fixture(scope="module")
def answered():
    """arguments -> what the command prints, by the command line."""
    known = {}

    def answer(arguments):
        key = tuple(arguments)
        if key not in known:
            result = CliRunner().invoke(app, [*arguments, "--json"])
            assert result.exit_code == 0, (arguments, result.output)
            known[key] = json.loads(result.stdout)
        return known[key]

    return answer


@pytest.fixture(scope="module")
def pages():
    desk = QueryService()
    yield Pages(desk, "token"), desk
    desk.uploads.close()


@pytest.fixture(scope="module")
def states(pages):
    """Fifty that have an answer, and those among them that have none."""
    fit, others = [], []
    for state in drawn_states():
        (others if pages[1].answer(request_of(MemoryRequest, state)).refusal else fit).append(state)
        if len(fit) == NUM_STATES:
            return fit, others
    raise AssertionError


def compare(page, answered):
    """Each figure of each card with its command's; how many there are."""
    assert not page.figures  # a figure without a command
    types = {trace["type"] for plot in page.plots for trace in plot["data"]}
    assert types <= {"scatter", "bar"}  # that plotly's basic bundle draws
    number = 0
    for arguments, figures in page.cards:
        data = answered(arguments)
        for path, form, value, text in figures:
            number += 1
            found = value_at(data, path)
            what = (" ".join(arguments), path)
            assert value == ("" if found is None else repr(found) if isinstance(found, float) else str(found)), what
            assert text == (NUMBER_FORMS[form](found) if form else Page(str(figure(data, path))).texts[0]), what
    return number


@pytest.mark.release
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_every_figure_of_closed_forms_is_the_command_s(view, pages, states, answered):
    closed = [part for part in view.parts if part.lane is None]
    for state in states[0]:
        assert sum(_number(part, state, pages, answered) for part in closed) or not closed


def _number(part, state, pages, answered):
    """How many figures a part shows, each of them compared."""
    (view,) = (view for view in VIEWS if part in view.parts)
    page = Page(pages[0].part(view, part, state))
    assert page.cards or page.refusals or not part.ask(state)
    return compare(page, answered)


@pytest.mark.release
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_figures_of_simulations_are_the_command_s(view, pages, answered):
    state = read_state(SIMULATED)
    for part in (part for part in view.parts if part.lane == "quick" and not part.on_demand):
        for question in part.ask(state):
            pages[1].answer(question)
        page = Page(pages[0].part(view, part, state))
        assert compare(page, answered) or page.refusals or page.plots or not part.ask(state), (view.name, part.name)


ONE_RUN = (
    "model=qwen3-0.6b&hardware=h100-sxm-80gb&rate=20&ttft=1s&technique=FP8+KV&against=engine.quantization%3Dfp8"
    "&traffic.input_tokens.distribution=fixed&traffic.input_tokens.value=40&traffic.input_tokens.mean=null"
    "&traffic.input_tokens.p99=null&traffic.output_tokens.distribution=fixed&traffic.output_tokens.value=3"
    "&traffic.output_tokens.mean=null&traffic.output_tokens.p99=null"
)


@pytest.mark.release
def test_all_views_show_the_same_figures_of_a_deployment(pages, answered):
    """All latencies, throughputs and costs come from the run of `perfmodel simulate`; shorter runs give ratios and the
    maximum rate, on a card marked as a preview."""
    state = read_state(ONE_RUN)
    (run,) = {
        question
        for view in VIEWS
        for part in view.parts
        for question in part.ask(state)
        if question.command == "simulate"
    }
    assert run == request_of(SimulateRequest, state)
    whole, limits = answered(run.arguments), set()
    for view in VIEWS:
        for part in (part for part in view.parts if part.lane == "quick" and part.name != "prompts"):
            questions = part.ask(state)
            for question in questions:
                pages[1].answer(question)
            html = str(pages[0].part(view, part, state))
            for arguments, figures in Page(html).cards:
                for path, form, value, _ in figures:
                    key = path.rpartition(".")[2]
                    if path == "load.within_slo.max_rate":
                        limits.add(value)
                    elif key in whole and form != "factor" and not path.startswith("load."):
                        assert (tuple(arguments), value) == (tuple(run.arguments), repr(whole[key])), (view.name, path)
            is_short = any(
                override.startswith("traffic.num_requests=") for override in sum((q.overrides for q in questions), ())
            )
            assert is_short == ("preview" in html), (view.name, part.name)
    assert len(limits) == 1


def test_what_is_refused_is_refused_in_the_command_s_words(pages, states):
    assert states[1]
    for state in states[1][:5]:
        question = request_of(MemoryRequest, state)
        result = CliRunner().invoke(app, [*question.arguments, "--json"])
        assert result.exit_code == 2
        assert "".join(pages[1].answer(question).refusal.split()) in "".join(result.output.split())
