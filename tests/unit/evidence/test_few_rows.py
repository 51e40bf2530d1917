"""A device of an architecture that nobody has measured, from few rows: which are chosen, and what they give."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.cost import Calibration, load_calibration
from perfmodel.cost.kernel_models.attention.decode import FlashDecodeFit
from perfmodel.cost.kernel_models.fits import Domain
from perfmodel.cost.kernel_models.gemm import TiledGemmFit
from perfmodel.evidence.fit.few import choose, fit_few, kernels_of
from perfmodel.evidence.fit.kernels import moved, predict
from perfmodel.evidence.fit.recorded import fit_chosen
from perfmodel.evidence.fit.systems import key_of
from perfmodel.specs import load_hardware

DEVICE = load_hardware("arc-b580")
GEMM = TiledGemmFit(launch_s=4e-6, compute_fraction=0.8, memory_fraction=0.8, tile_s=1e-6, knee=2.0)
DECODE = FlashDecodeFit(
    domain=Domain(head_dim=128, kv_element_bytes=2), launch_s=6e-6, memory_fraction=0.8, block_s=3e-6, knee=2.0
)
BEGIN = Calibration(
    device="any",
    engine="any",
    families={"gemm/bf16": GEMM, "gemm/fp16": GEMM, "attention_decode/bf16/kv_bf16/hd128/flash2": DECODE},
)
# What the device really does: another share of the peak, half the bandwidth, twice the launch.
TRUTH = {"launch_s": 0.7, "compute_fraction": -0.6, "memory_fraction": -0.7}


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Products in two formats, and decodes; times are written by `timed`."""
    folder = tmp_path / "tables" / "arc-b580"
    folder.mkdir(parents=True)
    products = [
        f"vllm 1.0,vllm_default,{dtype},{m},{n},{k},1"
        for dtype in ("bfloat16", "float16")
        for m in (1, 16, 128, 1024, 4096)
        for n, k in ((1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336))
    ]
    decodes = [
        f"vllm 1.0,vllm_flash_attn,bfloat16,bfloat16,{batch},1,{heads},8,128,{length},0,1"
        for batch in (1, 8, 64, 256)
        for heads in (8, 32)
        for length in (127, 1023, 8191)
    ]
    names = "engine_version,kernel_source,gemm_dtype,m,n,k,latency_ms"
    (folder / "gemm.csv").write_text("\n".join([names, *products]) + "\n", newline="\n")
    names = "engine_version,kernel_source,attn_dtype,kv_cache_dtype,batch_size,isl,num_heads,num_key_value_heads"
    names += ",head_dim,step,window_size,latency_ms"
    (folder / "generation_attention.csv").write_text("\n".join([names, *decodes]) + "\n", newline="\n")
    return tmp_path / "tables"


def timed(folder: Path) -> None:
    """Write what a device with TRUTH takes into the tables."""
    for op, some in kernels_of(folder, "vllm", DEVICE, BEGIN).items():
        file = folder / DEVICE.name / f"{op}.csv"
        lines = file.read_text().splitlines()
        for kernel in some:
            seconds = predict(
                kernel.group, moved(kernel.begin, {n: by for n, by in TRUTH.items() if hasattr(kernel.begin, n)})
            )
            for row, value in zip(kernel.group.rows, seconds, strict=True):
                lines[1 + row] = f"{lines[1 + row].rpartition(',')[0]},{value * 1e3:.6f}"
        file.write_text("\n".join(lines) + "\n", newline="\n")


def errors(kernels: dict, calibration: Calibration) -> dict[str, float]:
    """Median errors by operator of all rows."""
    result = {}
    for op, some in kernels.items():
        fits = [calibration.families[key_of(kernel.group, calibration) or ""] for kernel in some]
        of_rows = [np.log(predict(k.group, fit) / k.group.seconds) for k, fit in zip(some, fits, strict=True)]
        result[op] = float(np.median(np.abs(np.concatenate(of_rows))))
    return result


def test_a_dozen_rows_teach_what_a_device_does_with_all_others(tables: Path) -> None:
    timed(tables)
    kernels = kernels_of(tables, "vllm", DEVICE, BEGIN)
    before = errors(kernels, BEGIN)
    after = errors(kernels, fit_few(kernels, choose(kernels, 16), DEVICE, "vllm"))
    for op in ("gemm", "generation_attention"):
        assert before[op] > 0.3
        assert after[op] < 0.3 * before[op], op


def test_rows_of_one_format_teach_the_other(tables: Path) -> None:
    timed(tables)
    kernels = {"gemm": kernels_of(tables, "vllm", DEVICE, BEGIN)["gemm"]}
    of_first = {"gemm": [(0, row) for row in range(0, 20, 2)]}
    assert errors(kernels, fit_few(kernels, of_first, DEVICE, "vllm"))["gemm"] < 0.3 * errors(kernels, BEGIN)["gemm"]


def test_chosen_rows_differ_come_from_all_operators_and_say_more_than_the_first(tables: Path) -> None:
    """The more rows, the narrower the intervals; those of the first rows of a table are wider."""
    timed(tables)
    kernels = kernels_of(tables, "vllm", DEVICE, BEGIN)
    chosen = choose(kernels, 12)
    assert sum(map(len, chosen.values())) == 12
    assert all(len(set(rows)) == len(rows) > 0 for rows in chosen.values())
    first = {"gemm": [(0, row) for row in range(6)], "generation_attention": [(0, row) for row in range(6)]}

    def width(rows: dict) -> float:
        return sum(fit.residuals.p90 for fit in fit_few(kernels, rows, DEVICE, "vllm").families.values())

    assert width(choose(kernels, 24)) < width(chosen) < width(first)


def test_a_device_of_a_measured_architecture_begins_at_what_it_passes_on(tmp_path: Path) -> None:
    """Rows that are as an H20's Hopper kernels say leave them as they are."""
    h20 = load_hardware("h20")
    relation = load_calibration(h20, "vllm")
    assert h20.declared.architecture == "hopper"
    assert relation.is_passed_on
    folder = tmp_path / "tables" / "h20"
    folder.mkdir(parents=True)
    rows = [f"vllm 9,vllm_default,bfloat16,{m},8192,8192" for m in (1, 64, 512, 4096, 16384)]
    head = "engine_version,kernel_source,gemm_dtype,m,n,k,latency_ms"
    (folder / "gemm.csv").write_text("\n".join([head, *(f"{row},100" for row in rows)]) + "\n", newline="\n")
    (kernel,) = kernels_of(tmp_path / "tables", "vllm", h20, relation)["gemm"]
    times = predict(kernel.group, kernel.begin) * 1e3
    lines = [f"{row},{time:.6f}" for row, time in zip(rows, times, strict=True)]
    (folder / "gemm.csv").write_text("\n".join([head, *lines]) + "\n", newline="\n")
    fitted, _ = fit_chosen(tmp_path / "tables", "vllm", 5, h20, tmp_path / "out", False)
    assert fitted is not None
    for name in ("compute_fraction", "memory_fraction", "launch_s"):
        assert getattr(fitted.families["gemm/bf16"], name) == pytest.approx(getattr(kernel.begin, name), rel=0.02)


def test_the_command_says_what_to_measure_and_fits_it(tables: Path, tmp_path: Path, monkeypatch) -> None:
    """Tables of another device give shapes alone, to be measured on the device; filled in, they are fitted."""
    monkeypatch.chdir(tmp_path)
    (tables / "arc-b580").rename(tables / "l4")

    def calibrate(folder: str, *more: str, rows: int = 10):
        asked = ["calibrate", "--from", folder, "--rows", str(rows), "--hardware", "arc-b580", *more]
        return CliRunner().invoke(app, asked)

    assert "10 kernels to measure on arc-b580: to-measure/arc-b580" in calibrate("tables").output.replace("\n", " ")
    files = sorted((tmp_path / "to-measure/arc-b580").glob("*.csv"))
    assert sum(len(file.read_text().splitlines()) - 1 for file in files) == 10
    for file in files:
        head, *rows = file.read_text().splitlines()
        assert head.endswith(",latency_ms")
        assert all(row.endswith(",") for row in rows)
        file.write_text("\n".join([head, *(f"{row}50" for row in rows)]) + "\n", newline="\n")
    assert "10 kernel times" in calibrate("to-measure", "--out", "fitted").output
    assert (tmp_path / "fitted/arc-b580@vllm.yaml").is_file()
    again, none = calibrate("to-measure", "--out", "fitted"), calibrate("tables", rows=0)
    assert (again.exit_code, none.exit_code) == (2, 2)
    assert "already exists" in again.output
    assert "expected at least 1" in none.output
