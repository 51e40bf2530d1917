"""Results that cannot be compared are refused in one sentence that says why, and take no others with them."""

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perfmodel.errors import SpecError
from perfmodel.evidence.sources import bench as recognise
from perfmodel.evidence.sources.bench import read_bench_files

DATA = Path(__file__).parents[2] / "data" / "bench"
Change = Callable[[dict[str, Any]], object]


def changed(tmp_path: Path, change: Change, file: str = "vllm_detailed.json") -> Path:
    data = json.loads((DATA / file).read_text(encoding="utf-8"))
    change(data)
    path = tmp_path / "result.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def refusal(*paths: Path) -> str:
    with pytest.raises(SpecError) as raised:
        read_bench_files(paths)
    text = str(raised.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["ttfts"].pop(), "13 values of ttfts for 14 requests"),
        (lambda d: d["start_times"].pop(), "13 values of start for 14 requests"),
        (lambda d: d["ttfts"].__setitem__(3, math.nan), "request 3 has 'nan' as its ttft"),
        (lambda d: d["ttfts"].__setitem__(3, -0.5), "request 3 got its first token before it was sent"),
        (lambda d: d["ttfts"].__setitem__(3, "0.5"), "request 3 has an entry in its itls that is no number"),
        (
            lambda d: d["itls"].__setitem__(2, [-9.0]),
            "request 2 ended before its first token: the clock went backwards",
        ),
        (lambda d: d["start_times"].__setitem__(0, -1e9), "takes more than 1e+07 s"),
        (lambda d: d["input_lens"].__setitem__(5, 0), "request 5 has no token in its prompt"),
        (lambda d: d["output_lens"].__setitem__(5, 10**12), "has more than 1e+09 tokens"),
        (lambda d: d.update(errors=["refused"] * 14), "none of its 14 requests was answered"),
        (lambda d: d.update(itls=[0.1] * 14), "expected a list of seconds"),
        (lambda d: d.update(request_rate="fast"), "request_rate: got 'fast'; expected a number"),
        (lambda d: d.update(mean_ttft_ms=-1), "mean_ttft_ms: got '-1'; expected a number of at least 0"),
        (lambda d: d.update(duration=1e-300), "duration: got 1e-300 s; expected at least 0.2"),
        (lambda d: d.pop("request_rate"), "which no tool writes that is known"),
    ],
)
def test_a_broken_run_is_refused_with_the_reason(tmp_path: Path, change: Change, said: str) -> None:
    assert said in refusal(changed(tmp_path, change))


def test_no_completed_request(tmp_path: Path) -> None:
    assert "nothing to compare" in refusal(changed(tmp_path, lambda d: d.update(completed=0), "vllm.json"))
    for file in ("guidellm.json", "aiperf/profile_export_aiperf.json"):

        def none_answered(data: dict[str, Any]) -> None:
            for benchmark in data.get("benchmarks", ()):
                benchmark["metrics"]["request_totals"] = {"successful": 0, "errored": 8, "incomplete": 0}
            data["request_count"] = {"unit": "requests", "avg": 0.0}

        assert "none of its requests was answered" in refusal(changed(tmp_path, none_answered, file))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.98])
@pytest.mark.parametrize(
    "file", ["vllm_detailed.json", "guidellm.json", "aiperf/profile_export.jsonl", "llama_bench.csv", "inferencex.json"]
)
def test_files_that_were_cut_off(tmp_path: Path, file: str, share: float) -> None:
    text = (DATA / file).read_text(encoding="utf-8")
    path = tmp_path / Path(file).name
    path.write_text(text[: int(len(text) * share)], encoding="utf-8")
    assert str(path) in refusal(path)


def test_what_is_no_result(tmp_path: Path) -> None:
    for content in (
        b"",
        b"\x89PNG\r\n\x1a\n\xff",
        b"[]",
        b"[1, 2]",
        b"{}",
        b"a,b\n1,2\n",
        b"[" * 20_000,
        b'{"a": 1}\n[]\n',
    ):
        path = tmp_path / "something"
        path.write_bytes(content)
        assert "something" in refusal(path)
    assert "cannot be read" in refusal(tmp_path)
    assert "cannot be read" in refusal(tmp_path / "nothing.json")


def test_a_file_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognise, "LARGEST_RESULT_BYTES", 1000)
    assert "larger than 0.001 MB" in refusal(DATA / "vllm_detailed.json")


@pytest.mark.parametrize(("key", "value"), [("model_n_params", 10**30), ("n_prompt", 10**12), ("n_ubatch", 10**12)])
def test_sizes_beyond_all_models_and_contexts(tmp_path: Path, key: str, value: int) -> None:
    rows = json.loads((DATA / "llama_bench.json").read_text(encoding="utf-8"))[:1]
    path = tmp_path / "result.json"
    path.write_text(json.dumps([{**rows[0], key: value}]), encoding="utf-8")
    assert f"{key}: got '{value}'; expected up to" in refusal(path)


def test_one_bad_run_takes_no_other_with_it(tmp_path: Path) -> None:
    """Of a report with two benchmarks and of three files, what can be compared is; the others are listed."""

    def second_failed(data: dict[str, Any]) -> None:
        data["benchmarks"][1]["metrics"]["request_totals"] = {"successful": 0, "errored": 8, "incomplete": 0}

    report = changed(tmp_path, second_failed, "guidellm.json")
    cut = tmp_path / "cut.json"
    cut.write_text("{", encoding="utf-8")
    runs, left_out = read_bench_files([cut, report, DATA / "vllm.json"])
    assert [run.name for run in runs] == ["result.json, benchmark 1", "vllm.json"]
    assert [name for name, _ in left_out] == ["cut.json", "result.json, benchmark 2"]


def test_a_line_of_no_tool_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    result = json.dumps(json.loads((DATA / "vllm.json").read_text(encoding="utf-8")))
    path.write_text(f'{result}\n{{"x": 1}}\n', encoding="utf-8")
    runs, left_out = read_bench_files([path])
    assert [run.name for run in runs] == ["lines.jsonl, run 1"]
    assert [name for name, _ in left_out] == ["lines.jsonl, run 2"]


def test_figures_that_are_no_numbers_are_not_measured(tmp_path: Path) -> None:
    """vLLM writes NaN where no request had a second token."""
    runs, _ = read_bench_files([changed(tmp_path, lambda d: d.update(mean_tpot_ms=math.nan), "vllm.json")])
    assert "mean_tpot_ms" not in runs[0].metrics
    assert "mean_ttft_ms" in runs[0].metrics


def test_disaggregated_results_of_inferencex_are_refused(tmp_path: Path) -> None:
    assert "separate prefill and decode workers" in refusal(
        changed(tmp_path, lambda d: d.update(disagg=True, is_multinode=True), "inferencex.json")
    )


WRONG = (None, "", "x", -1, 1e308, math.nan, math.inf, [], {}, [None], {"a": 1}, True, 10**30)
FILES = ("vllm_detailed.json", "aiperf/profile_export_aiperf.json", "inferencex.json", "trtllm_bench.json")


def entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of all that is in nested objects and the first of lists."""
    keys = list(value) if isinstance(value, dict) else range(min(len(value), 3)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from entries(value[key])


@pytest.mark.parametrize("file", FILES)
def test_whatever_stands_in_a_result_it_is_read_or_refused(tmp_path: Path, file: str) -> None:
    """Two of its values at a time in place of others, a hundred times over: never anything but a sentence."""
    text, draw = (DATA / file).read_text(encoding="utf-8"), random.Random(file)
    for _ in range(100):
        data = json.loads(text)
        for container, key in draw.sample(list(entries(data)), 2):
            container[key] = copy.deepcopy(draw.choice(WRONG))
        path = tmp_path / "result.json"
        path.write_text(json.dumps(data), encoding="utf-8")
        try:
            read_bench_files([path])
        except SpecError as error:
            assert "\n" not in str(error)  # noqa: PT017


def test_figures_that_measure_nothing_are_named(tmp_path: Path) -> None:
    """Zero and NaN are no latency: left out, and not silently."""
    path = changed(tmp_path, lambda data: data.update(mean_ttft_ms=0, mean_tpot_ms=math.nan), "vllm.json")
    (run,) = read_bench_files([path])[0]
    assert not {"mean_ttft_ms", "mean_tpot_ms"} & set(run.metrics)
    assert "left out, since zero or not finite: mean_ttft_ms, mean_tpot_ms" in run.setup.notes


@pytest.mark.parametrize(("file", "where"), [("vllm_detailed.json", ()), ("guidellm.json", ("benchmarks", 0))])
@pytest.mark.parametrize("duration", [0, 0.0, math.nan, math.inf, None])
def test_a_run_without_a_duration_spans_its_requests(
    tmp_path: Path, file: str, where: tuple[str | int, ...], duration: float | None
) -> None:
    """From the first start to the last end; durations measured by the tools also include time around the requests."""

    def change(data: Any) -> None:
        for key in where:
            data = data[key]
        data["duration"] = duration

    (run, *_), _ = read_bench_files([changed(tmp_path, change, file)])
    (stated, *_), _ = read_bench_files([DATA / file])
    assert run.requests is not None
    assert run.requests.start_s is not None
    span_s = (run.requests.start_s + run.requests.e2el_s).max() - run.requests.start_s.min()
    assert run.metrics["request_throughput"] == pytest.approx(len(run.requests) / span_s)
    assert run.metrics["request_throughput"] == pytest.approx(stated.metrics["request_throughput"], rel=0.1)
