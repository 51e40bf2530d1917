"""Scenario files: names resolved, overrides applied, mistakes placed."""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from perfmodel.errors import SpecError
from perfmodel.specs import list_names, load_scenario, load_traffic

Write = Callable[..., Path]


@pytest.mark.parametrize("name", list_names("scenarios"))
def test_each_scenario_loads(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.name == name
    assert scenario.engine.max_model_len is not None
    assert scenario.num_nodes == 1 or scenario.cluster.network is not None  # nothing assumed in what people copy


@pytest.mark.parametrize("name", list_names("traffic"))
def test_each_traffic_file_loads_and_cites(name: str) -> None:
    traffic = load_traffic(name)
    assert traffic.name == name
    assert traffic.source


def test_names_are_resolved_to_the_specs_themselves(scenario_file: Write) -> None:
    scenario = load_scenario(scenario_file())
    assert scenario.model.name == "llama-3.1-8b"
    assert scenario.hardware.memory_bandwidth == 2039e9
    assert scenario.engine.max_model_len == scenario.model.max_position_embeddings
    assert load_scenario(scenario_file()) == scenario


def test_the_file_name_stands_in_for_a_missing_name(scenario_file: Write) -> None:
    assert load_scenario(scenario_file("name: mine\n", "")).name == "mine"


def test_dtype_and_quantization_reach_the_model(scenario_file: Write) -> None:
    path = scenario_file("  max_num_seqs: 64\n", "  dtype: float16\n  quantization: fp8\n")
    model = load_scenario(path).model
    assert model.dtype == "fp16"
    assert model.quantization.weights == "fp8"


def test_overrides_win(scenario_file: Write) -> None:
    changes = [
        "engine.max_num_seqs=32",
        "engine.max_model_len=4096",
        "hardware=h200",
        "hardware.hbm.bandwidth=2x",
        "traffic.arrivals.rate=0.5x",
        "slo.ttft_ms=1 s",
        "cluster={replicas: 3}",
        "seed=7",
    ]
    scenario = load_scenario(scenario_file(), changes)
    assert scenario.engine.max_num_seqs == 32
    assert scenario.engine.max_model_len == 4096
    assert scenario.hardware.name == "h200-sxm"
    assert scenario.hardware.memory_bandwidth == 9.6e12
    assert scenario.traffic.arrivals.rate == 2.0
    assert scenario.slo.ttft_ms == 1000.0
    assert scenario.cluster.replicas == 3
    assert scenario.seed == 7


def test_traffic_may_be_a_name_and_then_be_changed(scenario_file: Write) -> None:
    changes = ["traffic=azure-code", "traffic.arrivals.rate=2x", "traffic.num_requests=5"]
    traffic = load_scenario(scenario_file(), changes).traffic
    assert traffic.name == "azure-code"
    assert traffic.arrivals.rate == pytest.approx(5.2)
    assert traffic.num_requests == 5


def test_paths_are_relative_to_the_file(scenario_file: Write, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "lengths.txt").write_text("1\n2\n")
    (tmp_path / "data" / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    path = scenario_file("{distribution: fixed, value: 128}", "{distribution: empirical, path: data/lengths.txt}")
    lengths = load_scenario(path).traffic.input_tokens
    assert lengths is not None
    assert lengths.path == str(tmp_path / "data" / "lengths.txt")
    copied = scenario_file(
        "  arrivals: {process: poisson, rate: 4.0}\n", "  trace: {path: data/trace.csv, format: azure}\n"
    )
    path = tmp_path / "traced.yaml"
    path.write_text(re.sub(r"  (?:in|out)put_tokens: .*\n", "", copied.read_text()))
    traffic = load_scenario(path).traffic
    assert traffic.trace is not None
    assert traffic.trace.path == str(tmp_path / "data" / "trace.csv")
    assert traffic.arrivals.process == "trace"


def test_a_hardware_file_beside_the_scenario(scenario_file: Write, tmp_path: Path) -> None:
    from perfmodel.specs import find_file

    text = find_file("hardware", "l4").read_text().replace("name: l4", "name: my-l4")
    (tmp_path / "my-l4.yaml").write_text(text)
    path = scenario_file("hardware: a100-sxm-80gb", "hardware: my-l4.yaml")
    assert load_scenario(path).hardware.name == "my-l4"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "max_num_seqs: 64",
            "max_num_seq: 64",
            ":5: engine.max_num_seq: unknown key 'max_num_seq'. Did you mean 'max_num_seqs'",
        ),
        ("max_num_seqs: 64", "max_num_seqs: many", ":5: engine.max_num_seqs: got 'many'; expected a whole number."),
        ("engine:", "engin:", ":4: engin: unknown key 'engin'. Did you mean 'engine'"),
        ("rate: 4.0", "rate: -4.0", ":7: traffic.arrivals.rate: got -4.0; expected a number above 0"),
        ("model: llama-3.1-8b", "model: lama-3.1-8b", ":2: model: unknown model 'lama-3.1-8b'"),
        ("model: llama-3.1-8b", "model: 8", ":2: model: got 8; expected a name or a path."),
        ("model: llama-3.1-8b", "model: ' '", ":2: model: got ' '; expected a name or a path."),
        ("hardware: a100-sxm-80gb", "hardware: a100-sxm-81gb", ":3: hardware: unknown hardware 'a100-sxm-81gb'"),
        ("hardware: a100-sxm-80gb", "hardware:", ":3: hardware: got nothing; expected a name or a path."),
        ("hardware: a100-sxm-80gb\n", "", "hardware: is missing and has no default."),
        ("  max_num_seqs: 64", "\tmax_num_seqs: 64", ":5: got a tab in the indentation"),
        ("name: mine", "name: mine\nname: other", ":2: key 'name' is given twice, first on line 1"),
        ("  max_num_seqs: 64", "  quantization: fp9", ":5: engine.quantization: got 'fp9'"),
        (
            "  arrivals: {process: poisson, rate: 4.0}\n",
            "  trace: {path: absent.csv, format: azure}\n",
            ":7: traffic.trace.path: no such file: 'absent.csv'",
        ),
    ],
)
def test_a_mistake_is_one_sentence_with_its_place(scenario_file: Write, old: str, new: str, says: str) -> None:
    path = scenario_file(old, new)
    with pytest.raises(SpecError) as caught:
        load_scenario(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert says in message
    assert "\n" not in message
    assert message.endswith((".", "?"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("engine.max_num_seq=4", "engine.max_num_seq: unknown key 'max_num_seq'. Did you mean 'max_num_seqs'"),
        ("engine.max_num_seqs=abc", "engine.max_num_seqs: got 'abc'; expected a whole number."),
        ("engine.max_num_seqs.x=3", "engine.max_num_seqs is 64, it has no field 'x'."),
        ("enginee.x=1", "enginee: unknown key 'enginee'. Did you mean 'engine'"),
        ("foo", "is no `field=value`"),
        ("=3", "is no `field=value`"),
        ("engine.max_model_len=2x", "got nothing to multiply; expected a number in the file"),
        ("hardware=h10", "hardware: unknown hardware 'h10'"),
        ("model=lama-3.1-8b", "model: unknown model 'lama-3.1-8b'"),
        ("model.hidden_size=3", "a model's own fields cannot be set"),
        ("traffic=azur-code", "unknown traffic 'azur-code'"),
        ("traffic.arrivals.rate=-1", "traffic.arrivals.rate: got -1; expected a number above 0"),
        ("engine={a: 1", "not valid YAML"),
    ],
)
def test_a_wrong_override_names_itself(scenario_file: Write, change: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_scenario(scenario_file(), [change])
    message = str(caught.value)
    assert message.startswith(f"--set {change}")
    assert says in message
    assert "\n" not in message


def test_an_unknown_scenario_is_answered_with_the_nearest() -> None:
    with pytest.raises(SpecError, match=re.escape("Did you mean 'llama-3.1-8b-a100'")):
        load_scenario("llama-3.1-8b-a10")


def test_the_specs_load_nothing_heavy() -> None:
    code = (
        "import sys, perfmodel.specs; assert not {'yaml', 'pydantic'} & set(sys.modules);"
        "perfmodel.specs.load_scenario('llama-3.1-8b-a100');"
        "print(sorted({'numpy', 'scipy', 'torch', 'pandas', 'jsonschema'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_reading_a_scenario_is_quick() -> None:
    """A few milliseconds of CPU, however many files the catalog has; the limit leaves room for slow machines."""
    load_scenario("llama-3.1-8b-a100")
    start = time.process_time()
    for _ in range(10):
        load_scenario("llama-3.1-8b-a100")
    assert (time.process_time() - start) / 10 < 0.05
