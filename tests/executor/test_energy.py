"""Energy by a GPU's own counter, and the scenarios that vLLM serves beside: with stand-ins for what is not here."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from perfmodel.sim import simulate  # noqa: E402
from perfmodel.specs import load_hardware  # noqa: E402
from perfmodel_executors.gpu_suite import serving  # noqa: E402
from perfmodel_executors.gpu_suite.serving import SCENARIOS, serve_on_vllm, vllm_tasks  # noqa: E402
from perfmodel_executors.gpu_suite.task import Bench  # noqa: E402
from perfmodel_executors.measure.energy import energy_counter, joules_of  # noqa: E402

CPU = torch.device("cpu")


class Library:
    """NVML's functions; each call for the energy finds 1,500 mJ more."""

    def __init__(self, status=0):
        self.status, self.millijoules = status, 0

    def nvmlInit_v2(self):  # noqa: N802
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):  # noqa: N802
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, target):  # noqa: N802
        self.millijoules += 1500
        target._obj.value = self.millijoules
        return self.status


def test_the_counter_is_in_joules():
    counter = energy_counter(CPU, Library())
    before = counter()
    assert counter() - before == pytest.approx(1.5)


def test_without_a_counter_nothing_is_said():
    assert energy_counter(CPU) is None
    assert energy_counter(CPU, Library(status=3)) is None
    assert energy_counter(CPU, SimpleNamespace()) is None


def test_energy_of_a_call_is_the_mean_of_those_in_half_a_second():
    """A device that draws 100 W for what its clock says, in calls of 10 ms."""
    clock = [0.0]

    def call():
        clock[0] += 0.01

    def counter():
        return 100 * clock[0]

    assert joules_of(call, counter, least_s=0.0) == pytest.approx(1.0)
    assert joules_of(call, counter, least_s=0.001) == pytest.approx(1.0)


def test_vllm_serves_the_scenarios_where_it_is(monkeypatch):
    gpu = Bench(torch.device("cuda"), load_hardware("h100-sxm-80gb"), "triton")
    assert not list(vllm_tasks(Bench(CPU, load_hardware("cpu"), "torch")))
    monkeypatch.setattr(serving, "find_spec", lambda name: name)
    assert [task.key for task in vllm_tasks(gpu)] == list(SCENARIOS)
    assert not list(vllm_tasks(Bench(CPU, load_hardware("cpu"), "torch")))


def test_what_vllm_served_is_a_record_of_its_requests(monkeypatch):
    asked = []

    def run(target, scenario, model):
        asked.append((target, scenario.engine.profile, model, scenario.hardware.name))
        return simulate(scenario)

    monkeypatch.setattr(serving, "execute_on", run)
    monkeypatch.setattr(serving, "version", lambda name: "0.24.0")
    bench = Bench(CPU, load_hardware("h100-sxm-80gb"), "torch")
    record = serve_on_vllm("executor/long-context", bench)
    assert asked == [("vllm", "vllm", "llama-3.1-8b", "h100-sxm-80gb")]
    assert "engine.version=0.24.0" in record["overrides"]
    assert len(set(map(len, record["requests"].values()))) == 1
    assert record["steps"] == {"shapes": [], "seconds": []}
