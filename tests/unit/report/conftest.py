"""A run made by hand: no simulator, so that the reports are tested against the contract alone."""

import numpy as np
import pytest

from perfmodel.models.architecture import Attention, DenseFFN, Layer
from perfmodel.models.spec import ModelSpec
from perfmodel.sim.records.columns import RequestColumns, StepColumns
from perfmodel.sim.records.result import RunResult
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.hardware import Declared, HardwareSpec, MemoryLevel
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.slo import SLO
from perfmodel.specs.traffic import Arrivals, Lengths, Traffic


@pytest.fixture
def scenario():
    layer = Layer(Attention(num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128), DenseFFN(14336))
    return Scenario(
        name="by-hand <&>",
        model=ModelSpec("llama-like", "llama", 4096, 128256, 131072, ((layer, 32),), published_params=8.03e9),
        hardware=HardwareSpec(
            name="device-like",
            kind="gpu",
            declared=Declared(
                source="a datasheet",
                compute_units=108,
                clock_hz=1.41e9,
                peak_flops_per_s={"bf16": 312e12, "fp32": 19.5e12},
                memory=(MemoryLevel(level="hbm", capacity_bytes=80e9, bandwidth_bytes_per_s=2039e9),),
                unconfirmed=("declared.clock_hz",),
            ),
        ),
        engine=EngineSpec(),
        traffic=Traffic(
            arrivals=Arrivals(process="poisson", rate=4.0),
            num_requests=400,
            input_tokens=Lengths(distribution="lognormal", mean=1155, p99=4142),
            output_tokens=Lengths(distribution="lognormal", mean=211, p99=601),
        ),
        slo=SLO(ttft_ms=500, tpot_ms=25),
    )


def make_requests(num, seed=0):
    random = np.random.default_rng(seed)
    arrival = np.cumsum(random.exponential(0.25, num))
    scheduled = arrival + random.exponential(0.02, num)
    first = scheduled + random.lognormal(-2.2, 0.5, num)
    output = random.integers(1, 600, num)
    finished = first + (output - 1) * random.normal(0.02, 0.002, num)
    return RequestColumns(
        request_id=np.arange(num),
        arrival_s=arrival,
        first_scheduled_s=scheduled,
        first_token_s=first,
        finished_s=finished,
        num_prompt_tokens=random.integers(10, 4000, num),
        num_output_tokens=output,
        num_cached_tokens=np.zeros(num, np.int64),
        num_preemptions=np.zeros(num, np.int64),
        replica=np.zeros(num, np.int64),
    )


def make_steps(num, seed=0):
    random = np.random.default_rng(seed)
    num_steps = random.integers(1, 4, num)
    duration = num_steps * random.normal(0.02, 0.002, num)
    start = np.concatenate(([0.0], np.cumsum(duration)[:-1]))
    waves = np.sin(np.arange(num) / 60)
    decodes = (20 + 12 * waves).astype(np.int64)
    chunks = random.integers(0, 2, num)
    return StepColumns(
        replica=np.zeros(num, np.int64),
        index=np.cumsum(num_steps) - num_steps,
        num_steps=num_steps,
        start_s=start,
        end_s=start + duration,
        first_duration_s=duration / num_steps,
        num_tokens=decodes + chunks * 800,
        num_decodes=decodes,
        decode_context=decodes * 900,
        num_chunks=chunks,
        num_running=decodes + chunks,
        num_waiting=np.maximum((4 * waves).astype(np.int64), 0),
        used_blocks=decodes * 60,
        **{name: np.zeros(num, np.int64) for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")},
    )


@pytest.fixture
def result(scenario):
    requests, steps = make_requests(800), make_steps(3000)
    summary = {"duration": 100.0, "completed": 800, "failed": 0, "total_input_tokens": 10**6, "request_throughput": 4.0}
    summary |= {
        "request_goodput": 3.5,
        "slo_attainment": 0.875,
        "output_throughput": 844.2,
        "usd_per_million_output_tokens": 0.813,
    }
    summary |= {"origin": "datasheet", "mfu": 0.21, "mbu": 0.6, "preemptions": 0, "kv_cache_usage_peak": 0.31}
    summary |= {"bound_share": {"compute": 0.2, "memory": 0.71, "communication": 0.0, "overhead": 0.09}}
    for metric, values in (("ttft", requests.ttft_s), ("tpot", requests.tpot_s), ("e2el", requests.e2el_s)):
        finite = values[np.isfinite(values)] * 1e3
        for name, value in (("mean", finite.mean()), ("median", np.median(finite)), ("std", finite.std())):
            summary[f"{name}_{metric}_ms"] = float(value)
        for level in (90, 95, 99):
            summary[f"p{level}_{metric}_ms"] = float(np.percentile(finite, level))
    summary |= {"mean_itl_ms": None, "interval": {"mean_tpot_ms": [18.0, 23.0]}}
    return RunResult(scenario, "simulated", summary, requests, steps, num_blocks=2600, notes=("one note",))
