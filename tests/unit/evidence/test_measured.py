"""A measured device offline: what was told in its files is found again in the half that was kept aside."""

import json

import numpy as np
import pytest

from perfmodel.cost import load_calibration
from perfmodel.cost.calibrations.calibration import HostFit
from perfmodel.errors import SpecError
from perfmodel.evidence.executed.measured import halves, validate_measured
from perfmodel.evidence.fit.device import costs_of, fit_host, fit_measured, predict_kernels
from perfmodel.evidence.sources.measured import Ceilings, read_measurements
from perfmodel.specs import load_hardware

DEVICE = "h100-sxm-80gb"
HOST = HostFit(replays_graphs=True, serial_step_s=3e-4, serial_per_sequence_s=4e-6, hidden_prompt_layer_s=1.5e-4)
NOISE = 0.02
MODEL = "llama-3.1-8b"


def kernel_sizes():
    """(operator, sizes) as the measuring programme writes them."""
    for m in (1, 4, 16, 64, 256, 1024, 4096):
        for n, k in ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336)):
            yield "linear", {"m": m, "n": n, "k": k, "gemm_dtype": "bfloat16"}
    heads = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "kv_cache_dtype": "bfloat16"}
    for batch in (1, 8, 32, 128):
        for context in (256, 1024, 4096, 16384):
            yield "attention_decode", {"batch_size": batch, "step": context - 1, "isl": 1, **heads}
    for batch in (1, 4):
        for tokens in (128, 256, 512, 1024, 2048, 8192):
            yield "attention_prefill", {"batch_size": batch, "isl": tokens, "step": 0, **heads}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of a device that behaves as another engine's calibration says, with noise and a host of its own."""
    path = tmp_path_factory.mktemp("measured") / "h100"
    path.mkdir()
    rng = np.random.default_rng(0)
    hardware, truth = load_hardware(DEVICE), load_calibration(load_hardware(DEVICE), "vllm")
    kernels = {}
    for operator, sizes in kernel_sizes():
        kernels[f"{operator} {sizes}"] = {"operator": operator, "sizes": sizes, "seconds": 1.0}
    for tokens in (64, 1024, 8192, 16384):
        sizes, num_bytes = {"tokens": tokens, "size": 4096}, 4.0 * tokens * 4096 * 2
        kernels[f"norm {tokens}"] = {"operator": "add_rms_norm", "sizes": sizes, "seconds": 1.0, "bytes": num_bytes,
                                     "rate": "vector"}  # fmt: skip
    write(path / "suite.json", {"device": DEVICE, "device_name": "a told device", "date": "2026-01-01"})
    write(path / "kernels.json", {key: {**row, "p10_s": 1.0, "p90_s": 1.0} for key, row in kernels.items()})
    records = read_measurements(path).kernels
    told = told_seconds(records, truth, hardware)
    for row, seconds in zip(kernels.values(), told, strict=True):
        value = seconds * float(np.exp(NOISE * rng.standard_normal()))
        row.update(seconds=value, p10_s=value, p90_s=value)
    write(path / "kernels.json", kernels)
    write(path / "steps.json", told_steps(path, truth, hardware, rng))
    return path


def told_seconds(records, truth, hardware):
    """Every kernel under the told calibration, whatever name its fits have there."""
    families = {**truth.families, "elementwise": truth.default}
    for key, fit in truth.families.items():
        family, *rest = key.split("/")
        if family.startswith("attention_") and rest[:3] == ["bf16", "kv_bf16", "hd128"]:
            families["/".join((family, *rest[:3], "triton"))] = fit
    found = predict_kernels(records, truth.model_copy(update={"families": families}), hardware)
    seconds = {record.label: predicted for record, predicted, _ in found}
    return [seconds[record.label] for record in records]


def told_steps(path, truth, hardware, rng):
    steps = {}
    shapes = [
        {"num_tokens": b, "num_samples": b, "num_decodes": b, "decode_context": b * c}
        for b in (1, 4, 16, 64)
        for c in (256, 1024, 4096)
    ] + [{"num_tokens": t, "num_samples": 1, "prefills": [[t, 0]]} for t in (64, 256, 512, 1024, 2048, 4096)]
    for shape in shapes:
        steps[str(shape)] = {"model": MODEL, "shape": shape, "seconds": 1.0, "p10_s": 1.0, "p90_s": 1.0}
    write(path / "steps.json", steps)
    told = truth.model_copy(update={"host": HOST, "contained": ("kv_write",)})
    for row, record in zip(steps.values(), read_measurements(path).steps, strict=True):
        seconds = costs_of(record, hardware, told).estimate(record.batch).duration_s
        value = seconds * float(np.exp(NOISE * rng.standard_normal()))
        row.update(seconds=value, p10_s=value, p90_s=value)
    return steps


def write(path, data):
    path.write_text(json.dumps(data))


def test_what_was_kept_aside_is_predicted(folder):
    report = validate_measured(folder)
    assert report.metrics["kernel"].median_ape < 0.05
    assert report.metrics["step"].median_ape < 0.05
    assert report.covered == report.rows


def test_energy_of_steps_lies_between_idle_and_full_power(folder, tmp_path):
    """Measured as full power all the time, no step is predicted above it; one of a batch of 64 draws more than one of a
    single sequence with as much context."""
    hardware, steps = load_hardware(DEVICE), json.loads((folder / "steps.json").read_text())
    watts = hardware.declared.tdp_w
    for name in ("suite.json", "kernels.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    write(tmp_path / "steps.json", {key: {**row, "joules": watts * row["seconds"]} for key, row in steps.items()})
    (energies,) = (item for item in validate_measured(tmp_path).comparisons if item.metric == "step_energy")
    assert energies.unit == "J"
    shares = dict(zip(energies.rows.labels, energies.rows.errors + 1, strict=True))
    assert len(shares) == len(steps)
    assert all(hardware.declared.idle_w / watts < share < 1.15 for share in shares.values())
    of_64, of_one = (next(v for k, v in shares.items() if f": {n} decodes" in k) for n in (64, 1))
    assert of_64 > of_one


def test_a_scenario_on_vllm_is_compared_with_vllm_simulated(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    columns = {key: [0.05, 0.06] for key in ("ttft_s", "tpot_s", "e2el_s")}
    record = {"scenario": "executor/mixed", "requests": columns, "steps": {"shapes": [], "seconds": []}}
    engine = ["hardware=h100-sxm-80gb", "engine.profile=vllm", "traffic.num_requests=4"]
    write(tmp_path / "vllm.json", {"mixed": {**record, "overrides": engine}})
    report = validate_measured(tmp_path)
    assert report.metrics["tpot_mean"].rows == 1
    assert "serving_step" not in report.metrics
    assert any("executor/mixed on vllm" in part.rows.labels for part in report.comparisons)


def test_the_host_is_found_again(folder):
    host = fit_measured(read_measurements(folder)).host
    assert host.serial_step_s == pytest.approx(HOST.serial_step_s, rel=0.5)
    assert host.replays_graphs


def test_launches_of_experts_are_told_from_those_of_other_layers(tmp_path):
    """48 layers with experts and 32 without, in prompts whose launches take longer than their kernels."""
    hardware = load_hardware(DEVICE)
    host = HOST.model_copy(update={"hidden_prompt_layer_s": 5e-4, "hidden_prompt_moe_layer_s": 4e-4})
    told = load_calibration(hardware, "vllm").model_copy(update={"host": host, "engine": "perfmodel"})
    shapes = [{"num_tokens": t, "num_samples": 1, "prefills": [[t, 0]]} for t in (16, 64, 128, 256, 4096)]
    shapes += [{"num_tokens": b, "num_samples": b, "num_decodes": b, "decode_context": 512 * b} for b in (1, 8, 64)]
    rows = [{"model": name, "shape": shape} for name in (MODEL, "qwen3-30b-a3b") for shape in shapes]
    write(tmp_path / "suite.json", {"device": DEVICE, "device_name": "a told device"})
    write(tmp_path / "steps.json", {str(row): {**row, "seconds": 1.0, "p10_s": 1.0, "p90_s": 1.0} for row in rows})
    steps = [
        step.model_copy(update={"seconds": costs_of(step, hardware, told).estimate(step.batch).duration_s})
        for step in read_measurements(tmp_path).steps
    ]
    found, _ = fit_host(hardware, told, steps)
    assert found.hidden_prompt_layer_s == pytest.approx(5e-4, rel=0.1)
    assert found.hidden_prompt_moe_layer_s == pytest.approx(4e-4, rel=0.1)


def test_ceilings_are_those_of_what_no_cache_holds():
    """As an H200 measured them: a library product beyond 1 PFLOP/s, and a large copy slower than one of 256 MiB."""
    copies = {"32": 3.85e12, "256": 4.21e12, "2048": 2.75e12}
    found = Ceilings(copy_bytes_per_s=copies, gemm_flops_per_s={"fp8": {"8192": 1.43e15}})
    assert (found.bandwidth, found.rate("fp8")) == (4.21e12, 1.43e15)
    assert Ceilings(copy_bytes_per_s={"1": 3e10, "64": 2e10}).bandwidth == 2e10
    assert Ceilings().bandwidth is None


def test_halves_share_nothing_and_lose_nothing(folder):
    records = read_measurements(folder).kernels
    first, second = halves(records, lambda record: record.operator)
    assert sorted(r.label for r in (*first, *second)) == sorted(r.label for r in records)
    assert not {r.label for r in first} & {r.label for r in second}


@pytest.mark.parametrize("text", ["{", "[]", '{"a": {"operator": "linear"}}'])
def test_a_damaged_file_is_a_sentence(folder, tmp_path, text):
    (tmp_path / "suite.json").write_text((folder / "suite.json").read_text())
    (tmp_path / "kernels.json").write_text(text)
    with pytest.raises(SpecError, match=r"kernels\.json"):
        read_measurements(tmp_path)
