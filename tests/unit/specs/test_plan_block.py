"""The `plan` block of a scenario: defaults that need no thought, and mistakes told by file and line."""

import re
from pathlib import Path

import pytest

from perfmodel.errors import SpecError
from perfmodel.planning.spec import PlanSpec, ratio_of
from perfmodel.specs import load_scenario

_SCENARIO = """\
model: llama-3.1-8b
hardware: a100-sxm-80gb
traffic:
  arrivals: {process: poisson, rate: 4.0}
  num_requests: 10
  input_tokens: {distribution: fixed, value: 100}
  output_tokens: {distribution: fixed, value: 10}
slo: {ttft_ms: 500}
"""


def written(folder: Path, block: str) -> Path:
    file = folder / "mine.yaml"
    file.write_text(_SCENARIO + block, encoding="utf-8")
    return file


def test_a_block_may_say_only_what_is_wanted(tmp_path: Path) -> None:
    spec = load_scenario(written(tmp_path, "plan: {objective: fewest_gpus}\n")).plan
    assert spec is not None
    assert spec == PlanSpec(objective="fewest_gpus")
    assert 1 in spec.space.tensor_parallel_size


def test_ratios_are_read_and_none_means_replicas_that_do_both() -> None:
    assert ratio_of("3:2") == (3, 2)
    assert ratio_of("none") is None


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ("plan: {objective: cheap}\n", r"mine\.yaml:9: plan\.objective: got 'cheap'; expected .*cheapest"),
        ("plan: {attainment: 1.5}\n", r"mine\.yaml:9: plan\.attainment: got 1\.5; expected a number below 1"),
        (
            "plan: {space: {disaggregation: ['1-1']}}\n",
            r"mine\.yaml:9: .*'1-1'; expected prefill:decode .* 2:1",
        ),
        ("plan: {space: {encoders: ['1']}}\n", r"mine\.yaml:9: .*'1'; expected encode:other .* 2:1"),
        ("plan: {space: {max_num_seqs: [64, 64]}}\n", r"mine\.yaml:9: .*got 64 twice"),
        ("plan: {max_gpus: 2, space: {replicas: [3]}}\n", r"mine\.yaml:9: plan: .*at least 3 with max_gpus=2"),
        ("plan: {space: {tensor_paralel_size: [2]}}\n", r"mine\.yaml:9: .*Did you mean 'tensor_parallel_size'"),
    ],
)
def test_a_mistake_is_told_with_its_place(tmp_path: Path, block: str, says: str) -> None:
    with pytest.raises(SpecError) as error:
        load_scenario(written(tmp_path, block))
    assert re.search(says, str(error.value)), str(error.value)
