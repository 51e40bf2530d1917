"""Every mistake in a file is one sentence with its place, what was found and what is allowed."""

from collections.abc import Iterable
from pathlib import Path

import pytest
from pydantic import BaseModel

from perfmodel.errors import SpecError, did_you_mean
from perfmodel.files import validation
from perfmodel.files.validation import parse
from perfmodel.files.yaml_loader import load_yaml
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import HardwareSpec
from perfmodel.specs.slo import SLO
from perfmodel.specs.traffic import Traffic


def mistakes(tmp_path: Path, spec: type[BaseModel], text: str) -> list[str]:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    loaded = load_yaml(path)
    with pytest.raises(SpecError) as caught:
        parse(spec, loaded.data, loaded.positions)
    return [line.replace(str(path), "FILE") for line in str(caught.value).splitlines()]


@pytest.mark.parametrize(
    ("spec", "text", "expected"),
    [
        (
            EngineSpec,
            "dtype: bfloat16\nmax_num_seq: 4\n",
            "FILE:2: max_num_seq: unknown key 'max_num_seq'. Did you mean 'max_num_seqs' or ",
        ),
        (EngineSpec, "block_size: x\n", "FILE:1: block_size: got 'x'; expected a whole number."),
        (EngineSpec, "block_size: 16.5\n", "FILE:1: block_size: got 16.5; expected a whole number."),
        (EngineSpec, "block_size: 0\n", "FILE:1: block_size: got 0; expected a number above 0."),
        (EngineSpec, "block_size: [1]\n", "FILE:1: block_size: got a list of 1; expected a whole number."),
        (EngineSpec, "enforce_eager: maybe\n", "FILE:1: enforce_eager: got 'maybe'; expected true or false."),
        (
            EngineSpec,
            "gpu_memory_utilization: 1.5\n",
            "FILE:1: gpu_memory_utilization: got 1.5; expected a number of at most 1",
        ),
        (EngineSpec, "batching: continous\n", "Did you mean 'continuous'?"),
        (EngineSpec, "batching: foo\n", "expected 'continuous', 'iteration', 'dynamic', 'static' or 'none'."),
        (
            EngineSpec,
            "max_num_seqs: 4096\nmax_num_batched_tokens: 2048\n",
            "max_num_batched_tokens=2048 is below max_num_seqs=4096; raise the first",
        ),
        (SLO, "ttft_ms: {a: 1}\n", "FILE:1: ttft_ms: got a mapping; expected a number."),
        (
            SLO,
            "ttft_ms: 5 GB\n",
            "'5 GB' is not a quantity in ms; write a number, or a number with one of ms, s, us, min.",
        ),
        (SLO, "ttft_ms: .inf\n", "FILE:1: ttft_ms: got inf; expected a finite number."),
    ],
)
def test_one_mistake_one_sentence(tmp_path: Path, spec: type[BaseModel], text: str, expected: str) -> None:
    found = mistakes(tmp_path, spec, text)
    assert len(found) == 1
    assert found[0].startswith("FILE:")
    assert expected in found[0]
    assert found[0].endswith((".", "?"))


LENGTHS = "input_tokens: {distribution: fixed, value: 1}\noutput_tokens: {distribution: fixed, value: 1}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "arrivals: {process: poisson, rate: -4}\nnum_requests: 1\n",
            "FILE:1: arrivals.rate: got -4; expected a number above 0",
        ),
        ("arrivals: {process: poisson}\nnum_requests: 1\n", "FILE:1: arrivals: poisson needs `rate`"),
        ("arrivals: {process: closed_loop}\nnum_requests: 1\n", "closed_loop needs `concurrency`"),
        (
            "arrivals:\n  process: poisson\n  stages:\n    - {rate: 4, duration_s: 5 min}\n"
            "    - {rate: -1, duration_s: 1}\n",
            "FILE:5: arrivals.stages.1.rate: got -1",
        ),
        ("arrivals: {process: trace}\nnum_requests: 1\n", "there is no `trace: {path, format}`"),
        ("arrivals: {process: poisson, rate: 1}\n", "or it would never end"),
    ],
)
def test_traffic_says_what_it_needs(tmp_path: Path, text: str, expected: str) -> None:
    found = mistakes(tmp_path, Traffic, text + LENGTHS)
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ("{distribution: fixed}", "fixed needs `value`"),
        ("{distribution: uniform, low: 9, high: 3}", "uniform needs `low` <= `high`"),
        ("{distribution: lognormal, mean: 9}", "lognormal needs `mean` and one of `p99`, `std`"),
        ("{distribution: lognormal, mean: 100, p99: 50}", "got p99 50; expected 1 to 14.9 times the mean (100)"),
        ("{distribution: lognormal, mean: 100, p99: 5000}", "got p99 5000; expected 1 to 14.9 times the mean (100)"),
        ("{distribution: fixed, value: 3, min: 9, max: 4}", "got max 4; expected at least min (9)"),
        ("5", "input_tokens: got 5; expected a mapping of distribution, value"),
    ],
)
def test_lengths_say_what_they_need(tmp_path: Path, lengths: str, expected: str) -> None:
    text = f"num_requests: 1\noutput_tokens: {{distribution: fixed, value: 1}}\ninput_tokens: {lengths}\n"
    found = mistakes(tmp_path, Traffic, text)
    assert len(found) == 1
    assert found[0].startswith("FILE:3: input_tokens: ")
    assert expected in found[0]


def test_a_list_item_has_its_own_line_and_no_echo(tmp_path: Path) -> None:
    text = (
        "name: x\nkind: gpu\ndeclared:\n  source: me\n  compute_units: 3\n  clock_hz: 1 GHz\n"
        "  peak_flops_per_s:\n    bf16: fast\n  memory:\n    - level: hbm\n      capacity_bytes: 80 GX\n"
    )
    found = mistakes(tmp_path, HardwareSpec, text)
    assert [line.split(": ")[0:2] for line in found] == [
        ["FILE:8", "declared.peak_flops_per_s.bf16"],
        ["FILE:11", "declared.memory.0.capacity_bytes"],
    ]


def test_at_most_five_and_the_number_of_the_others(tmp_path: Path) -> None:
    found = mistakes(tmp_path, EngineSpec, "".join(f"zz{i}: 1\n" for i in range(8)))
    assert len(found) == 6
    assert [line.split(": ")[0] for line in found[:5]] == [f"FILE:{i}" for i in range(1, 6)]
    assert found[5] == "... and 3 more"


def test_many_mistakes_are_counted_and_not_looked_at_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearest names and lines are looked up for the first ones: of 20,000 they took 40 s."""
    looked_up: list[str] = []

    def counted(name: str, known: Iterable[str]) -> str:
        looked_up.append(name)
        return did_you_mean(name, known)

    monkeypatch.setattr(validation, "did_you_mean", counted)
    found = mistakes(tmp_path, EngineSpec, "".join(f"zz{i}: 1\n" for i in range(4000)))
    assert found[5] == "... and 3995 more"
    assert 5 <= len(looked_up) <= 100


def test_a_missing_field_is_placed_at_its_block(tmp_path: Path) -> None:
    found = mistakes(tmp_path, HardwareSpec, "kind: gpu\nname: x\ndeclared: {source: me}\n")
    assert "FILE:3: declared.compute_units: is missing and has no default." in found
