"""What only the simulated clock has is refused by name."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from perfmodel.errors import PerfmodelError  # noqa: E402
from perfmodel.specs import load_scenario  # noqa: E402
from perfmodel_executors.run import as_executed  # noqa: E402


@pytest.mark.parametrize(
    ("scenario", "change", "sentence"),
    [
        ("llama-3.1-8b-a100", "traffic.beam_width=2", "has traffic.beam_width, which is not executed; leave it out"),
        ("llama-3.1-8b-a100", "hardware.host.cores=2", "has host.cores, and no executed server waits for them; leave"),
    ],
)
def test_beams_and_cores_of_the_host_are_not_executed(scenario: str, change: str, sentence: str) -> None:
    as_executed(load_scenario(scenario))
    with pytest.raises(PerfmodelError, match=sentence):
        as_executed(load_scenario(scenario, [change]))
