"""Recorded steady states of disaggregated deployments: what a row becomes, and slices that stand for the whole."""

from pathlib import Path

import pytest

from perfmodel.evidence.observation import Observation
from perfmodel.evidence.predict.recorded import num_slices, slice_of
from perfmodel.evidence.sources.steady import read_steady_states
from perfmodel.sim import simulate

SHAPE = ("num_workers", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
HEAD = ["id", "backend", "backend_version", "model_path", "system", "precision", "isl", "osl", "concurrency"]
COLUMNS = [*HEAD, *(f"{role}_{key}" for role in ("prefill", "decode") for key in SHAPE), "mtp_unlabelled"]


def row(
    name: str,
    concurrency: int,
    prefill: str,
    decode: str,
    engine: str = "trtllm",
    system: str = "gb200",
    precision: str = "fp4",
    version: str = "1.0",
    lengths: tuple[int, int] = (1024, 64),
) -> list[str]:
    prompt, answer = map(str, lengths)
    head = [name, engine, version, "deepseek-ai/DeepSeek-V3", system, precision, prompt, answer, str(concurrency)]
    return [*head, *prefill.split(), *decode.split(), "True", "100.0", "10.0"]


def read(folder: Path, *rows: list[str]) -> list[Observation]:
    path = folder / "rows.csv"
    path.write_text("\n".join(map(",".join, [[*COLUMNS, "ttft_ms", "tpot_ms"], *rows])))
    found, left_out = read_steady_states(path)
    assert left_out == []
    return found


def test_a_row_becomes_two_pools(tmp_path: Path) -> None:
    (state,) = read(tmp_path, row("a_cfg1", 64, "3 1 1 4 4 1", "2 8 1 1 1 8"))
    prefill, decode = state.scenario.pools
    assert (prefill.role, prefill.replicas, prefill.engine.data_parallel_size) == ("prefill", 3, 4)
    assert prefill.engine.enable_expert_parallel, "attention data parallelism keeps experts whole"
    assert (decode.replicas, decode.engine.tensor_parallel_size) == (2, 8)
    assert state.scenario.num_devices == 3 * 4 + 2 * 8
    assert state.scenario.traffic.num_requests == 640


@pytest.mark.parametrize(
    ("concurrencies", "decode", "batch"),
    [
        ([4, 24, 48, 96, 192], "4 8 1 1 1 8", 32),  # up to 48 a worker
        ([36], "4 8 1 1 1 8", 8),
        ([2192], "2 1 1 8 1 8", 128),  # 137 a rank
        ([6144], "2 1 1 4 1 4", 768),
    ],
)
def test_a_sweep_of_one_deployment_shares_its_largest_batch(
    tmp_path: Path, concurrencies: list[int], decode: str, batch: int
) -> None:
    states = read(tmp_path, *(row(f"c{c}_cfg1", c, "1 4 1 1 1 4", decode) for c in concurrencies))
    assert {state.scenario.pools[1].engine.max_num_seqs for state in states} == {batch}


def test_links_are_nvlink_in_a_rack_and_a_network_card_between_nodes(tmp_path: Path) -> None:
    shapes = ("1 8 1 1 8 1", "1 8 1 1 8 1")
    rack, nodes = read(
        tmp_path, row("a_cfg1", 8, *shapes), row("b_cfg2", 8, *shapes, system="h200_sxm", precision="fp8")
    )
    links = [s.scenario.cluster.kv_transfer.link_of(s.scenario.hardware) for s in (rack, nodes)]
    assert [link.name for link in links] == ["nvlink", "infiniband"]
    assert links[1].bandwidth_bytes_per_s == 50e9


@pytest.mark.parametrize(
    ("system", "precision", "lengths", "concurrency", "decode", "batch"),
    [
        ("gb200", "fp4", (1024, 8192), 60, "15 4 1 1 1 4", 4),  # ctx1_gen15_tep4_batch4_eplb0_mtp0
        ("gb300", "fp8", (1024, 1024), 24, "4 8 1 1 1 8", 4),  # ctx1_gen4_tep8_batch4_eplb0_mtp0_24
        ("b200_sxm", "fp8", (8192, 1024), 96, "6 8 1 1 1 1", 16),  # ctx1_gen6_tp8_batch16_eplb0_mtp0_96
    ],
)
def test_batches_are_those_that_recipes_name(
    tmp_path: Path,
    system: str,
    precision: str,
    lengths: tuple[int, int],
    concurrency: int,
    decode: str,
    batch: int,
) -> None:
    """The names, in .github/configs/nvidia-master.yaml of SemiAnalysisAI/InferenceX, March 2026. A sweep of another
    recipe with the same deployment does not raise them."""
    rows = [
        row(f"c{c}_cfg1", c, "1 1 1 4 1 4", decode, system=system, precision=precision, lengths=lengths)
        for c in ((concurrency, 135) if precision == "fp4" else (concurrency,))
    ]
    assert read(tmp_path, *rows)[0].scenario.pools[1].engine.max_num_seqs == batch


def test_servers_with_room_let_no_request_wait(tmp_path: Path) -> None:
    """H200's recipes name 16 to 512 sequences, B200's with attention data parallelism as many as a rank can get."""
    hopper, blackwell = read(
        tmp_path,
        row("a_cfg1", 144, "1 8 1 1 1 8", "9 8 1 1 1 8", system="h200_sxm", precision="fp8"),
        row("b_cfg2", 128, "1 1 1 8 1 8", "1 1 1 8 1 8", system="b200_sxm", precision="fp8", lengths=(8192, 1024)),
    )
    assert hopper.scenario.pools[1].engine.max_num_seqs >= 144 / 9
    assert blackwell.scenario.pools[1].engine.max_num_seqs == 128


def test_low_latency_workers_of_old_images_are_tensor_parallel(tmp_path: Path) -> None:
    """gb200-fp4/disagg/1k1k-low-latency.sh of ai-dynamo/dynamo: --data-parallel-size 1, --scheduler-recv-interval 10,
    and five requests a slot."""
    old, wide, new = read(
        tmp_path,
        row("a_cfg252", 32, "1 1 1 4 1 1", "2 1 1 4 1 1", "sglang", version="0.5.5.post2"),
        row("b_cfg259", 8192, "4 1 1 4 1 1", "1 1 1 32 1 1", "sglang", version="0.5.5.post2"),
        row("c_cfg486", 32, "1 4 1 1 1 1", "2 4 1 1 1 1", "sglang", version="0.5.8"),
    )
    for state in (old, new):
        for engine in (pool.engine for pool in state.scenario.pools):
            assert (engine.tensor_parallel_size, engine.data_parallel_size, engine.poll_every) == (4, 1, 10)
    decode = wide.scenario.pools[1].engine
    assert (decode.data_parallel_size, decode.poll_every) == (32, 1)
    assert [state.scenario.traffic.num_requests for state in (old, wide, new)] == [160, 40960, 320]
    assert (old.scenario.engine.version, new.scenario.engine.version) == ("0.5.5.post2", "0.5.8")


def test_ranks_left_to_chance_are_cut_by_whole_replicas(tmp_path: Path) -> None:
    """Each step of eight ranks waits for the one with most: a slice of single ranks would not show it."""
    (state,) = read(tmp_path, row("a_cfg1", 4096, "2 1 1 8 1 8", "1 1 1 32 1 32", "sglang", version="0.5.8"))
    assert num_slices(state.scenario) == 2


def test_slices_are_equal_and_not_too_small(tmp_path: Path) -> None:
    large, odd, small = read(
        tmp_path,
        row("a_cfg1", 4096, "2 1 1 8 1 8", "1 1 1 32 1 32"),
        row("b_cfg2", 4096, "1 8 1 1 8 1", "1 1 1 32 1 32"),
        row("c_cfg3", 64, "2 1 1 8 1 8", "1 1 1 32 1 32"),
    )
    assert num_slices(large.scenario) == 16
    assert num_slices(odd.scenario) == 1, "one prefill engine cannot be cut"
    assert num_slices(small.scenario) == 1
    part = slice_of(large.scenario, 16).traffic
    assert (part.arrivals.concurrency, part.num_requests) == (256, 2560)


def test_a_slice_stands_for_the_whole(tmp_path: Path) -> None:
    """Half of two prefill and four decode workers: the same steps; other draws of lengths and less sharing."""
    (state,) = read(tmp_path, row("a_cfg1", 512, "2 4 1 1 1 4", "4 8 1 1 1 8"))
    whole = simulate(state.scenario).summary
    half = simulate(slice_of(state.scenario, 2), one_of=2).summary
    assert half["gpu_hours"] == pytest.approx(whole["gpu_hours"] / 2, rel=0.1)
    assert half["mean_tpot_ms"] == pytest.approx(whole["mean_tpot_ms"], rel=0.03)
    assert half["mean_ttft_ms"] == pytest.approx(whole["mean_ttft_ms"], rel=0.2)
    with pytest.raises(ValueError, match="equal slices"):
        simulate(state.scenario, one_of=3)


def test_experts_of_a_slice_see_the_tokens_of_the_whole_group(tmp_path: Path) -> None:
    """Two of eight ranks that share out their experts decode at the pace of all eight."""
    (state,) = read(tmp_path, row("a_cfg1", 64, "2 1 1 4 1 4", "1 1 1 8 1 8"))
    paces = []
    for count in (1, 4):
        result = simulate(slice_of(state.scenario, count), keep_steps=False, one_of=count)
        requests = result.requests
        assert requests is not None
        paces.append(float(((requests.e2el_s - requests.ttft_s) / (requests.num_output_tokens - 1)).mean()))
    assert paces[1] == pytest.approx(paces[0], rel=0.03)
