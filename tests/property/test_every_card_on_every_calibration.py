"""Every model card can be timed under every committed calibration, in any number format and cut; none is refused."""

from itertools import product
from typing import Any

import pytest

from perfmodel.cost import OperatorTimer, load_calibration
from perfmodel.cost.calibrations.backends import engine_calibration
from perfmodel.files.catalog import data_dir
from perfmodel.ops import build_graph
from perfmodel.ops.work import BatchShape
from perfmodel.specs import EngineSpec, list_models, load_hardware, load_model

_CALIBRATIONS = sorted(
    file.stem
    for file in data_dir("calibrations").glob("*@*.yaml")
    if not file.stem.startswith(("engine@", "backend@", "cpu@"))
)
_ENGINES = [
    {},
    {"tensor_parallel_size": 4, "quantization": "fp8", "kv_cache_dtype": "fp8"},
    {"data_parallel_size": 8, "enable_expert_parallel": True},
]


def _shape(num_spans: int) -> BatchShape:
    return BatchShape(40, 9, ((32, 100),), 8, 8000, (4000,) * num_spans)


@pytest.mark.parametrize("name", _CALIBRATIONS)
def test_every_operator_of_every_model_takes_a_positive_time(name: str) -> None:
    device, _, engine = name.partition("@")
    hardware = load_hardware(device)
    _check(OperatorTimer(hardware, load_calibration(hardware, engine)), _ENGINES)


_LOCAL = [
    ("llamacpp", "rtx-4090"),
    ("llamacpp", "strix-halo-395"),
    ("llamacpp", "ryzen-9-7950x"),
    ("mlx", "apple-m3-max"),
]


@pytest.mark.parametrize(("engine", "device"), _LOCAL)
def test_engines_for_one_machine_time_every_model(engine: str, device: str) -> None:
    hardware = load_hardware(device)
    asked = EngineSpec(profile=engine, ubatch_size=512)
    settings = [{"profile": engine, "quantization": form} for form in ("none", "q4_k_m", "iq2_xxs")]
    _check(OperatorTimer(hardware, engine_calibration(hardware, asked)), settings)


def _check(timer: OperatorTimer, engines: list[dict[str, Any]]) -> None:
    for card, settings in product(list_models(), engines):
        graph = build_graph(load_model(card), EngineSpec(**settings))
        work_of = [node.work(_shape(len(graph.model.attention_spans))) for node in graph.nodes]
        for work in work_of:
            time = timer.time(work)
            assert time.duration_s >= 0, (card, work)
            is_within_another = work.name in timer.calibration.contained
            assert (time.duration_s > 0) == (work.num_kernels > 0 and not is_within_another), (card, work)
