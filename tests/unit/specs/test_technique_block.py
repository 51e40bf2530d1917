"""The `technique` block: what a scenario is compared with, and by what."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from perfmodel.errors import SpecError
from perfmodel.evidence.executed.technique import Technique
from perfmodel.files.catalog import data_dir
from perfmodel.specs import load_scenario

FILES = sorted((data_dir("scenarios") / "techniques").glob("*.yaml"))
PAGES = Path(__file__).parents[3] / "docs" / "techniques"


def technique(**fields):
    return Technique(**({"name": "a", "baseline": "engine.dtype=float32"} | fields))


def test_a_speedup_is_above_one_for_what_is_better():
    """Less of a time, more of a throughput; and the inverse comparison is the inverse."""
    assert technique(metric="mean_tpot_ms").speedup(5.0, 10.0) == 2.0
    assert technique(metric="output_throughput").speedup(10.0, 5.0) == 2.0
    assert technique(metric="mean_e2el_ms").speedup(7.0, 7.0) == 1.0


@pytest.mark.parametrize(
    "fields",
    [{"metric": "step_ms"}, {"metric": "mean_tpotms"}, {"baseline": []}, {"name": ""}, {"page": "../pruning.md"}],
)
def test_what_cannot_be_compared_is_refused(fields):
    with pytest.raises(ValidationError):
        technique(**fields)


def test_a_mistake_is_named_with_its_line(tmp_path):
    text = (data_dir("scenarios") / "techniques" / "low-rank.yaml").read_text()
    file = tmp_path / "wrong.yaml"
    file.write_text(text.replace("metric: mean_e2el_ms", "metric: speed"))
    with pytest.raises(SpecError, match=r"wrong.yaml:\d+: technique.*'speed'"):
        load_scenario(file)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_pair_differs_and_serves_the_same_requests(file):
    """The same lengths; how many at a time, and which adapters they name, may be what is compared."""
    scenario = load_scenario(file)
    assert scenario.technique is not None
    baseline = load_scenario(file, scenario.technique.baseline)
    assert scenario != baseline
    same_arrivals = {"arrivals": baseline.traffic.arrivals, "adapters": baseline.traffic.adapters}
    assert scenario.traffic.model_copy(update=same_arrivals) == baseline.traffic
    assert (scenario.seed, scenario.hardware) == (baseline.seed, baseline.hardware)
    if scenario.technique.page is not None:
        assert (PAGES / f"{scenario.technique.page}.md").is_file()
