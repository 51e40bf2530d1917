"""Which device a scenario means, with GPUs that are only said to be there."""

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import MODELS  # noqa: E402

from perfmodel.errors import DoesNotFitError, PerfmodelError  # noqa: E402
from perfmodel.specs import EngineSpec, load_hardware  # noqa: E402
from perfmodel_executors import device as devices  # noqa: E402
from perfmodel_executors.device import default_kernels, device_clock, find_device, memory_as_a_sentence  # noqa: E402
from perfmodel_executors.runner import RunnerSetup, build_runner  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def gpus(monkeypatch):
    """Says which GPUs are here."""
    return lambda *names: monkeypatch.setattr(devices, "_present_gpus", lambda: list(names))


def test_a_gpu_is_known_by_the_name_it_gives_itself(gpus):
    gpus("NVIDIA H200", "NVIDIA H200")
    assert find_device(load_hardware("h200-sxm")) == torch.device("cuda", 0)
    assert find_device(load_hardware("h200-sxm"), num_devices=2) == torch.device("cuda", 0)
    assert find_device(load_hardware("cpu")) == CPU


# As drivers report them.
@pytest.mark.parametrize(
    ("hardware", "name"),
    [
        ("a100-sxm-80gb", "NVIDIA A100-SXM4-80GB"),
        ("h100-sxm-80gb", "NVIDIA H100 80GB HBM3"),
        ("b200-sxm", "NVIDIA B200"),
        ("rtx-4090", "NVIDIA GeForce RTX 4090"),
        ("l40s", "NVIDIA L40S"),
    ],
)
def test_names_of_common_gpus_lead_to_their_files(hardware, name, gpus):
    gpus(name)
    assert find_device(load_hardware(hardware)).type == "cuda"


def test_what_is_not_here_is_one_sentence_with_the_way_out(gpus):
    gpus()
    with pytest.raises(PerfmodelError, match=r"h200-sxm, but torch sees no GPU here; use --set hardware=cpu"):
        find_device(load_hardware("h200-sxm"))
    gpus("NVIDIA H200")
    with pytest.raises(PerfmodelError, match=r"a100-sxm-80gb, but the GPU here is NVIDIA H200.*hardware=h200-sxm"):
        find_device(load_hardware("a100-sxm-80gb"))
    with pytest.raises(PerfmodelError, match=r"asks for 4 devices, but 1 x NVIDIA H200 are here; lower tensor_para"):
        find_device(load_hardware("h200-sxm"), num_devices=4)
    gpus("NVIDIA Nothing 3000")
    with pytest.raises(PerfmodelError, match="hardware=cpu"):
        find_device(load_hardware("a100-sxm-80gb"))
    with pytest.raises(PerfmodelError, match="tpu-v5e is a tpu"):
        find_device(load_hardware("tpu-v5e"))


def test_kernels_follow_the_device(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert (default_kernels(CPU), default_kernels(torch.device("cuda"))) == ("torch", "triton")
    with pytest.raises(PerfmodelError, match="--kernels torch"):
        build_runner(RunnerSetup(MODELS["gqa"], EngineSpec(dtype="float32"), 8, CPU, kernels="triton"))


def test_a_full_device_is_one_sentence():
    with pytest.raises(DoesNotFitError, match="gpu_memory_utilization"), memory_as_a_sentence(CPU):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_the_clock_of_one_cpu_does_not_count_waiting():
    import time

    clock = device_clock()
    start = clock()
    time.sleep(0.05)
    assert clock() - start < 40e6
