"""Cores of the host: what processes take from each other, and nothing where there are enough."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.cost import ServerFit
from perfmodel.engine import Request
from perfmodel.errors import PerfmodelError
from perfmodel.sim import simulate
from perfmodel.sim.replica.host_cores import HostCores
from perfmodel.sim.replica.replica import FrontEnd
from perfmodel.specs import Scenario, load_scenario

HOST: Any = type("SomeHost", (), {"cores": None})()
CLOCK: Any = object()
MS = 10**9
FEW = "traffic.num_requests=60"


def cores(number: float, polling: int, share: float = 0.5, servers: int = 1, ranks: int = 1) -> HostCores:
    """With `ranks` that have a step; an API server takes 2 ms to send a token."""
    shared = HostCores(number, polling, share, HOST, 2 * MS, servers, lambda _: 0)
    shared.begin(CLOCK, ranks, 0)
    return shared


def test_a_step_is_longer_while_tokens_are_sent_beside_it() -> None:
    """Five that poll, as 0.5 each, on two cores: one with work and four halves are 3 for 2 cores, and 4 beside the API
    server, which sends 2 tokens in 4 ms. Of 10 ms of host, 4 take 4 / 2 and 6 take 3 / 2 as long: 17 ms; of the first
    3, which come before the device's work, all take 2: 6 ms."""
    assert cores(2, 5).step(3 * MS, 7 * MS, 2) == (6 * MS, 11 * MS)
    assert cores(2, 5).step(3 * MS, 7 * MS, 0) == (4.5 * MS, 10.5 * MS)  # nothing is sent


def test_work_outside_of_steps_waits_for_those_that_poll() -> None:
    """On one core: 1 + 0.5 for what polls, 1 alone where no rank has a step; 1 + 1 beside another API server."""
    assert cores(1, 1).taken_in(4 * MS, 0) == 6 * MS
    assert cores(1, 1, ranks=0).taken_in(4 * MS, 0) == 4 * MS
    front = FrontEnd(ServerFit(in_serial_s=3e-3), 2)
    front.cores = HostCores(1, 0, 1.0, HOST, 0, 2, front.num_busy)
    delays = [front.delay(Request(number, 0, 10, 1), 0) // MS for number in range(3)]
    assert delays == [3, 6, 3 + 6]  # alone; beside the first; after the first, beside the second


@given(
    st.integers(0, 10**10), st.integers(0, 10**10), st.integers(0, 64), st.integers(1, 20), st.integers(1, 9),
    st.floats(0, 1), st.integers(1, 4),
)  # fmt: skip
def test_more_cores_are_never_slower_and_enough_change_nothing(
    serial: int, hidden: int, samples: int, number: int, polling: int, share: float, servers: int
) -> None:
    fewer, more = (
        cores(count, polling, share, servers).step(serial, hidden, samples) for count in (number, number + 1)
    )
    assert more[0] <= fewer[0]
    assert sum(more) <= sum(fewer) + 1
    enough = 1 + share * (polling - 1) + servers
    assert cores(enough, polling, share, servers).step(serial, hidden, samples) == (serial, hidden)
    assert fewer[0] >= serial
    assert sum(fewer) >= serial + hidden


def run(*changes: str) -> dict[str, Any]:
    return simulate(load_scenario("llama-3.1-70b-h100-tp4", [FEW, *changes])).summary


def test_with_a_core_for_each_the_answers_are_those_without_the_field() -> None:
    """To the bit, for 4 workers, the engine's core and the API server; fewer cores are slower, by more and more."""
    assert run() == run("hardware.host.cores=6")
    times = [run(f"hardware.host.cores={count}")["mean_tpot_ms"] for count in (3, 2, 1)]
    assert run()["mean_tpot_ms"] < times[0] < times[1] < times[2]


def test_one_core_takes_vectors_as_fast_as_what_polls_leaves(tmp_path: Any) -> None:
    """An API server has 0.8 ms of work for a prompt and 4.24 us for each of 32 tokens; on one core it gets two thirds,
    beside an engine that polls as half a process while it has a step, nearly always. Of two cores it has one."""
    short = ["traffic.input_tokens.value=32", "engine.api_server_count=1", "traffic.num_requests=1500"]
    work_s = 0.0008 + 32 * 4.2398051183112395e-06
    for count, share in ((1, 2 / 3), (2, 1.0)):
        summary = simulate(load_scenario("arctic-embed-m-h200", [*short, f"hardware.host.cores={count}"])).summary
        assert summary["request_throughput"] == pytest.approx(share / work_s, rel=0.08)


def test_replicas_have_their_own_and_ranks_of_one_share() -> None:
    """Two replicas with three cores each wait as little as one under half of the load; two ranks with three do wait."""
    some = ["model=llama-3.1-8b", "engine.tensor_parallel_size=1", "traffic.arrivals={process: constant, rate: 8}"]
    ranks = [*some, "engine.data_parallel_size=2"]
    assert run(*some, "cluster.replicas=2", "hardware.host.cores=2") == run(*some, "cluster.replicas=2")
    assert run(*ranks, "hardware.host.cores=2")["mean_tpot_ms"] > run(*ranks)["mean_tpot_ms"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            ["engine.profile=trtllm"],
            "cores=4 beside engine.profile=trtllm, whose processes are not known: not modelled",
        ),
        (["engine.pipeline_parallel_size=2"], "cores=4 beside engine.pipeline_parallel_size"),
        (["engine.tensor_parallel_size=16"], "cores=4 beside a replica on several nodes"),
        (["cluster.pools=[{role: prefill}, {role: decode}]"], "cores=4 beside prefill and decode pools"),
        (["hardware=cpu", "model=tiny-llama", "engine.tensor_parallel_size=1"], "cores=4 beside the device cpu, whose"),
    ],
)
def test_what_shared_cores_do_not_go_with_is_refused_by_name(changes: list[str], sentence: str) -> None:
    with pytest.raises(PerfmodelError, match=sentence) as caught:
        load_scenario("llama-3.1-70b-h100-tp4", [FEW, *changes, "hardware.host.cores=4"])
    assert "\n" not in str(caught.value)


def test_the_answer_says_that_cores_are_few() -> None:
    made: Scenario = load_scenario("llama-3.1-70b-h100-tp4", [FEW, "hardware.host.cores=2"])
    notes = [note for note in simulate(made).notes if "cores" in note]
    assert notes == [
        "A replica has 5 processes that poll and 1 for API servers on host.cores=2; the host's work takes up to "
        "2 times as long."
    ]
