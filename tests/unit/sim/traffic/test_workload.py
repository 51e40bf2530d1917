"""Workloads: reproducible, of the distributions they claim, and refused with a reason when they cannot be served."""

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from perfmodel.errors import SpecError, WorkloadError
from perfmodel.sim.traffic.distributions import arrival_times, draw_lengths, lognormal_parameters
from perfmodel.sim.traffic.workload import Workload
from perfmodel.specs import Arrivals, Lengths, Scenario, Stage, load_scenario


def scenario(*overrides: str) -> Scenario:
    return load_scenario("llama-3.1-8b-a100", list(overrides))


def rows(scenario: Scenario) -> list[tuple[object, ...]]:
    return [
        (r.arrival, r.num_prompt_tokens, r.max_output_tokens, r.block_hashes, r.priority)
        for r in Workload(scenario).requests()
    ]


def gaps(arrivals: Arrivals, count: int = 40_000, duration_s: float | None = None) -> np.ndarray:
    times = list(islice(arrival_times(arrivals, duration_s, np.random.default_rng(0)), count))
    return np.diff([0.0, *times])  # type: ignore[list-item]


def test_equal_seeds_give_equal_requests_and_other_seeds_do_not() -> None:
    assert rows(scenario()) == rows(scenario())
    assert rows(scenario()) != rows(scenario("seed=1"))


def test_equal_seeds_give_equal_requests_in_another_process() -> None:
    code = (
        "from perfmodel.sim.traffic.workload import Workload; from perfmodel.specs import load_scenario;"
        "print([(r.arrival, r.num_prompt_tokens) for r in Workload(load_scenario('llama-3.1-8b-a100')).requests()])"
    )
    root = Path(__file__).resolve().parents[4]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == str([row[:2] for row in rows(scenario())])


def test_changing_the_lengths_leaves_the_arrivals_as_they_were() -> None:
    longer = scenario("traffic.output_tokens.mean=400")
    assert [row[0] for row in rows(longer)] == [row[0] for row in rows(scenario())]


@pytest.mark.parametrize(
    ("process", "cv"), [("constant", 0.0), ("poisson", 1.0), ("poisson_fixed_count", 1.0), ("gamma", 2.0)]
)
def test_gaps_have_the_mean_and_the_spread_of_their_process(process: str, cv: float) -> None:
    drawn = gaps(Arrivals(process=process, rate=5.0, cv=cv or 1.0))  # type: ignore[arg-type]
    assert drawn.mean() == pytest.approx(0.2, rel=0.03)
    assert drawn.std() / drawn.mean() == pytest.approx(cv, abs=0.05)


def test_a_fixed_count_fills_each_stage_exactly() -> None:
    stages = (Stage(rate=3.0, duration_s=100.0), Stage(rate=7.0, duration_s=50.0))
    arrivals = Arrivals(process="poisson_fixed_count", stages=stages)
    times = np.array(list(arrival_times(arrivals, None, np.random.default_rng(3))))
    assert len(times) == 650
    assert times[299] == pytest.approx(100.0)
    assert times[300] > 100.0
    assert times[-1] == pytest.approx(150.0)


@pytest.mark.parametrize(
    ("rate", "duration_s", "count"), [(2.0, 3.0, 6), (2.0, 3.25, 6), (4.0, 0.75, 3), (1.0, 0.5, 0)]
)
def test_a_constant_rate_brings_as_many_as_it_says(rate: float, duration_s: float, count: int) -> None:
    """The n-th at n / rate, the one at the very end too."""
    times = list(arrival_times(Arrivals(process="constant", rate=rate), duration_s, np.random.default_rng(0)))
    assert times == [(n + 1) / rate for n in range(count)]


def test_stages_of_a_poisson_process_change_its_rate() -> None:
    stages = (Stage(rate=50.0, duration_s=100.0), Stage(rate=200.0, duration_s=100.0))
    times = np.array(list(arrival_times(Arrivals(stages=stages), None, np.random.default_rng(3))))
    assert (times <= 100.0).sum() == pytest.approx(5_000, rel=0.05)
    assert (times > 100.0).sum() == pytest.approx(20_000, rel=0.05)
    assert times.max() <= 200.0


def test_a_lognormal_has_the_mean_and_p99_that_were_asked_for() -> None:
    mu, sigma = lognormal_parameters(1155, 4142, None)
    assert np.exp(mu + sigma**2 / 2) == pytest.approx(1155)
    assert np.exp(mu + 2.3263478740408408 * sigma) == pytest.approx(4142)
    with pytest.raises(SpecError, match="no lognormal of mean 10 has p99 1000"):
        lognormal_parameters(10, 1000, None)


@pytest.mark.parametrize(
    ("lengths", "mean"),
    [
        (Lengths(distribution="fixed", value=7), 7),
        (Lengths(distribution="uniform", low=10, high=30), 20),
        (Lengths(distribution="lognormal", mean=100, std=50), 100),
        (Lengths(distribution="exponential", mean=100), 100),
        (Lengths(distribution="empirical", values=(1, 2, 9)), 4),
    ],
)
def test_lengths_have_the_mean_of_their_distribution(lengths: Lengths, mean: float) -> None:
    drawn = list(islice(draw_lengths(lengths, np.random.default_rng(0), 10_000), 50_000))
    assert np.mean(drawn) == pytest.approx(mean, rel=0.02)
    assert min(drawn) >= 1


@pytest.mark.parametrize(("most", "highest"), [(300, 300), (None, 500), (800, 500)])
def test_no_length_is_beyond_its_own_limit_or_the_engines(most: int | None, highest: int) -> None:
    """A lognormal of mean 200 whose tail is far beyond; the engine takes 500."""
    lengths = Lengths(distribution="lognormal", mean=200, std=400, min=5, max=most)
    drawn = list(islice(draw_lengths(lengths, np.random.default_rng(0), 500), 5000))
    assert (min(drawn), max(drawn)) == (5, highest)


def test_repeated_prompts_repeat_in_whole_and_groups_share_their_beginning() -> None:
    prefix = "{num_groups: 2, shared_tokens: 64, num_prompts_per_group: 3}"
    prompts = [row[3] for row in rows(scenario(f"traffic.prefix={prefix}", "traffic.num_requests=60"))]
    assert len(set(prompts)) == 6
    assert len({hashes[:4] for hashes in prompts}) == 2  # type: ignore[index]


def test_an_answer_ends_where_the_context_is_full_and_a_prompt_beyond_it_is_refused() -> None:
    full = scenario("traffic.input_tokens={distribution: fixed, value: 8000}")
    assert {row[1] for row in rows(full)} == {8000}
    assert max(row[2] for row in rows(full)) <= 192  # type: ignore[type-var]
    with pytest.raises(WorkloadError, match=r"a prompt of 9000 tokens, but max_model_len=8192"):
        rows(scenario("traffic.input_tokens={distribution: fixed, value: 9000}"))
    longest = "traffic.input_tokens={distribution: fixed, value: 8191}", "traffic.num_requests=3"
    assert {row[1:3] for row in rows(scenario(*longest))} == {(8191, 1)}
    with pytest.raises(WorkloadError, match="8192 tokens"):  # no room for an answer
        rows(scenario("traffic.input_tokens={distribution: fixed, value: 8192}"))


TRACES = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:50.9951690,396,109\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,x\n"
    "6,ChatGPT,99,0,99,x\n45,ChatGPT,1087,230,1317,x\n",
    "csv": "arrival_s,input_tokens,output_tokens,session_id\n1.5,10,2,\n2.25,40,3,a\n",
    "mooncake": '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}\n'
    '{"timestamp": 3000, "input_length": 512, "output_length": 6, "hash_ids": [7]}\n',
    "jsonl": '{"arrival_s": 1.0, "input_tokens": 10, "output_tokens": 2}\n\n'
    '{"arrival_s": 3.5, "input_tokens": 40, "output_tokens": 3, "block_hashes": [4, 5]}\n',
}
EXPECTED = {
    "azure": [(0.0, 374, 44, 0), (4.314579, 396, 109, 0)],
    "burstgpt": [(0.0, 472, 18, 0), (40.0, 1087, 230, 0)],
    "csv": [(0.0, 10, 2, 0), (0.75, 40, 3, 0)],
    "mooncake": [(0.0, 1100, 5, 68), (3.0, 512, 6, 32)],
    "jsonl": [(0.0, 10, 2, 0), (2.5, 40, 3, 2)],
}


def traced(tmp_path: Path, format_: str, text: str) -> Scenario:
    path = tmp_path / f"{format_}.txt"
    path.write_text(text, encoding="utf-8")
    trace = json.dumps({"path": str(path), "format": format_})
    return scenario(f"traffic={{trace: {trace}, num_requests: 100}}")


@pytest.mark.parametrize("format_", sorted(TRACES))
def test_traces_are_read_in_their_formats(tmp_path: Path, format_: str) -> None:
    seen = rows(traced(tmp_path, format_, TRACES[format_]))
    assert [(row[0] / 1e12, row[1], row[2], len(row[3])) for row in seen] == [  # type: ignore[operator, arg-type]
        (pytest.approx(t, abs=1e-6), i, o, h) for t, i, o, h in EXPECTED[format_]
    ]


def test_columns_of_plain_csv_have_short_names_too(tmp_path: Path) -> None:
    """In any order, beside others."""
    text = "model,output,arrival,input\nx,2,1.5,10\ny,3,2.25,40\n"
    assert rows(traced(tmp_path, "csv", text)) == rows(traced(tmp_path, "csv", TRACES["csv"]))


def test_trace_blocks_that_are_shared_stay_shared_at_the_engines_block_size(tmp_path: Path) -> None:
    first, second = (row[3] for row in rows(traced(tmp_path, "mooncake", TRACES["mooncake"])))
    assert first[:32] == second  # type: ignore[index]


@pytest.mark.parametrize(
    ("format_", "text", "words"),
    [
        ("azure", "", "is empty"),
        ("azure", "TIMESTAMP,ContextTokens\n", "'GeneratedTokens' is missing"),
        ("azure", TRACES["azure"] + "2023-11-16 18:16:00.0,abc,3\n", ":4: .*abc"),
        ("azure", TRACES["azure"] + "2023-11-16 18:10:00.0,5,3\n", ":4: its arrival is before"),
        ("mooncake", '{"timestamp": 0}\n', ":1: the line has no field 'input_length'"),
        ("mooncake", "[1]\n", ":1: got .*expected a JSON object"),
        ("jsonl", TRACES["jsonl"] + "{oops\n", ":4: the line cannot be read"),
        ("jsonl", '{"arrival_s": 1, "input_tokens": 0, "output_tokens": 2}\n', ":1: got 0 input"),
        ("jsonl", '{"arrival_s": NaN, "input_tokens": 1, "output_tokens": 2}\n', ":1: got an arrival at nan s"),
        ("jsonl", '{"arrival_s": 1e300, "input_tokens": 1, "output_tokens": 2}\n', ":1: got an arrival at 1e.300 s"),
        ("jsonl", '{"arrival_s": 1, "input_tokens": 1e999, "output_tokens": 2}\n', ":1: the line cannot be read"),
        ("jsonl", '{"arrival_s": 1, "input_tokens": 1e300, "output_tokens": 2}\n', ":1: got more than 1,000,000,000"),
        ("jsonl", "[" * 100_000 + "\n", ":1: the line cannot be read .nested too deeply"),
        ("burstgpt", "Timestamp,Request tokens,Response tokens\nnan,1,1\n", ":2: got an arrival at nan s"),
        ("csv", "arrival,input\n1,2\n", ":1: got columns arrival, input; 'output_tokens' is missing"),
        ("csv", "arrival,input,output\n1,2\n", ":2: the line cannot be read"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0\n", ":2: the line cannot be read"),
    ],
)
def test_a_bad_trace_is_one_sentence_with_the_line(tmp_path: Path, format_: str, text: str, words: str) -> None:
    with pytest.raises(WorkloadError, match=words) as caught:
        rows(traced(tmp_path, format_, text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("of_trace", "block_size", "num_blocks", "num_shared"),
    [(16, 16, 6, 4), (32, 16, 6, 4), (16, 32, 3, 2), (8, 32, 3, 2), (24, 16, 6, 4), (48, 32, 3, 1), (40, 16, 6, 2)],
)
def test_blocks_of_a_trace_in_blocks_of_the_engine(
    tmp_path: Path, of_trace: int, block_size: int, num_blocks: int, num_shared: int
) -> None:
    """Two prompts of 96 tokens, equal up to the trace's last whole block before token 72: the engine shares as many of
    its own as lie within."""
    count, shared = -(-96 // of_trace), 72 // of_trace
    hashes = [[*range(shared), *(100 * (who + 1) + i for i in range(count - shared))] for who in range(2)]
    lines = [
        {"arrival_s": who, "input_tokens": 96, "output_tokens": 2, "block_hashes": own, "hash_block_size": of_trace}
        for who, own in enumerate(hashes)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    asked = scenario(f"traffic={{trace: {{path: {file}, format: jsonl}}}}", f"engine.block_size={block_size}")
    one, other = (request.block_hashes for request in Workload(asked).requests())
    assert (len(one), len(set(one))) == (num_blocks, num_blocks)
    assert sum(a == b for a, b in zip(one, other, strict=True)) == num_shared
    assert one[:num_shared] == other[:num_shared]


def test_prompts_of_a_trace_share_what_the_prefix_says(tmp_path: Path) -> None:
    """Full blocks of 16 within both the prompt and 40 shared tokens: two, or one of a prompt of 20."""
    text = "".join(
        f'{{"arrival_s": {n}, "input_tokens": {20 if n == 2 else 100}, "output_tokens": 2}}\n' for n in range(4)
    )
    shared = traced(tmp_path, "jsonl", text).with_({"traffic.prefix": {"shared_tokens": 40}})
    hashes = [row[3] for row in rows(shared)]
    assert [len(beginning) for beginning in hashes] == [2, 2, 1, 2]  # type: ignore[arg-type]
    assert len({beginning[0] for beginning in hashes}) == 1  # type: ignore[index]
    with pytest.raises(SpecError, match="num_prompts_per_group beside a trace"):
        shared.with_({"traffic.prefix.num_prompts_per_group": 3})


def test_a_trace_that_says_what_prompts_share_has_no_prefix_beside_it(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"beside traffic\.prefix"):
        rows(traced(tmp_path, "mooncake", TRACES["mooncake"]).with_({"traffic.prefix": {"shared_tokens": 40}}))
