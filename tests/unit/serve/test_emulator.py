"""A scenario's cluster on the wall clock: the same requests have the same latencies as on the simulated one."""

import asyncio
from itertools import pairwise

import pytest
from engine_integrity import check_integrity
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import run

from perfmodel.errors import SpecError, WorkloadError
from perfmodel.serve import Emulator, Order, ReplicaDownError
from perfmodel.serve.emulator import RequestParams
from perfmodel.sim import Workload, simulate
from perfmodel.specs import load_scenario

SMALL = ("traffic.num_requests=40", "traffic.arrivals.rate=20")
FFN = "enable_expert_parallel: true, data_parallel_size: 2, afd_config: {num_ffn_servers: 1}"
MOE = ("model=qwen3-30b-a3b", "hardware=h100-sxm-80gb", "cluster.kv_transfer.link=infiniband-ndr")
FLEETS = {
    "one replica": (),
    "two replicas": ("cluster.replicas=2",),
    "prefix-aware": ("cluster.replicas=2", "cluster.router=prefix_affinity"),
    "data-parallel ranks": ("engine.data_parallel_size=2",),
    "pipeline stages": ("engine.pipeline_parallel_size=2",),
    "a gateway": ("cluster.gateway={max_outstanding: 4, max_queue: 99}",),
    "drafts": ("engine.speculative_config={method: ngram, num_speculative_tokens: 3, acceptance: {rate: 0.6}}",),
    "prefill and decode pools": (
        "cluster.pools=[{name: prefill, role: prefill, replicas: 1}, {name: decode, role: decode, replicas: 1}]",
    ),
    "SGLang": ("engine.profile=sglang",),
    "feed-forward devices": (*MOE[:2], f"engine={{{FFN}}}"),
    "feed-forward devices that decode, and preempt": (
        *(*MOE, "traffic.output_tokens={distribution: fixed, value: 200}"),
        f"cluster.pools=[{{role: prefill}}, {{role: decode, engine: {{{FFN}, num_gpu_blocks_override: 520}}}}]",
    ),
    "LoRA adapters": ("engine={profile: vllm, enable_lora: true, max_loras: 2}", "traffic.adapters={count: 4}"),
}


class Client:
    """What one client saw: seconds of the event loop at which its tokens came."""

    def __init__(self, at):
        self.arrived, self.tokens, self.fate, self.number = at, [], None, None

    def on_tokens(self, num_tokens):
        self.tokens += [asyncio.get_running_loop().time()] * num_tokens

    def on_end(self, fate):
        assert self.fate is None
        self.fate = fate


async def replay(scenario, emulator=None, until=10_000.0):
    """The scenario's own traffic, sent by clients in real (here virtual) time."""
    emulator, loop, clients = emulator or Emulator(scenario, loras="0123"), asyncio.get_running_loop(), []
    emulator.start()
    for request in Workload(scenario).requests():
        await asyncio.sleep(request.arrival / 1e12 - loop.time())
        client = Client(loop.time())
        params = RequestParams(adapter=None if request.adapter is None else str(request.adapter))
        lengths = request.num_prompt_tokens, request.max_output_tokens
        order = Order(*lengths, request.block_hashes, request.priority, params=params)
        client.number = emulator.submit(order, client)
        clients.append((request, client))
    while emulator.num_under_way and loop.time() < until:
        await asyncio.sleep(1)
    emulator.stop()
    return emulator, clients


@pytest.mark.parametrize("name", FLEETS)
def test_clients_measure_what_is_simulated(name):
    scenario = load_scenario("llama-3.1-8b-a100", [*SMALL, *FLEETS[name]])
    emulator, clients = run(replay(scenario))
    result = simulate(scenario)
    simulated, preemptions = result.requests, result.summary["preemptions"]
    assert sum(engine.loop.scheduler.num_preemptions for engine in emulator.cluster.engines) == preemptions
    assert preemptions or "preempt" not in name
    assert emulator.num_finished == emulator.num_sent == len(clients) == len(simulated)
    by_number = {int(number): i for i, number in enumerate(simulated.request_id)}
    for request, client in clients:
        i = by_number[request.request_id]
        assert client.fate == "finished"
        assert len(client.tokens) == request.max_output_tokens == simulated.num_output_tokens[i]
        assert client.tokens[0] == pytest.approx(simulated.first_token_s[i], abs=2e-6)
        assert client.tokens[-1] == pytest.approx(simulated.finished_s[i], abs=2e-6)
        assert client.tokens == sorted(client.tokens)


@given(st.lists(st.integers(0, 39), max_size=20, unique=True), st.floats(0, 3))
@settings(max_examples=15, deadline=None)
def test_nothing_is_lost_when_clients_go_away(gone, after_s):
    """Every request sent is finished or aborted, and no block, slot or request is left behind."""
    changes = (*SMALL, "cluster.replicas=2", "engine.num_gpu_blocks_override=600")
    scenario = load_scenario("llama-3.1-8b-a100", changes)

    async def main():
        emulator, loop = Emulator(scenario), asyncio.get_running_loop()
        loop.call_later(after_s, lambda: [emulator.abort(number) for number in gone])
        return await replay(scenario, emulator)

    emulator, clients = run(main())
    assert emulator.num_sent == emulator.num_finished + emulator.num_aborted == 40
    assert sum(client.fate == "finished" for _, client in clients) == emulator.num_finished
    for engine in emulator.cluster.engines:
        scheduler = engine.loop.scheduler
        check_integrity(scheduler)
        assert not scheduler.has_requests
        assert scheduler.blocks.num_used == 0
        assert engine.is_idle


def test_who_leaves_while_the_last_token_is_on_its_way_was_answered():
    scenario = load_scenario("llama-3.1-8b-a100")

    class Impatient(Client):
        def on_tokens(self, num_tokens):
            super().on_tokens(num_tokens)
            if len(self.tokens) == 5 - 1:  # the step of the last one is running
                asyncio.get_running_loop().call_later(step_s, lambda: emulator.abort(self.number))

    async def main():
        emulator.start()
        first = Client(0)
        emulator.submit(Order(100, 5), first)
        await asyncio.sleep(1)
        return first

    emulator = Emulator(scenario)
    tokens = run(main()).tokens
    step_s = tokens[-1] - tokens[-2] - 1e-6  # the engine is done, and the front end is not
    emulator, impatient = Emulator(scenario), Impatient(0)

    async def again():
        emulator.start()
        impatient.number = emulator.submit(Order(100, 5), impatient)
        await asyncio.sleep(1)

    run(again())
    assert impatient.fate is None
    assert (emulator.num_sent, emulator.num_finished, emulator.num_aborted) == (1, 1, 0)


def test_an_abort_in_a_gateway_s_queue_frees_its_place():
    scenario = load_scenario("llama-3.1-8b-a100", [*SMALL, "cluster.gateway={max_outstanding: 1, max_queue: 9}"])

    async def main():
        emulator = Emulator(scenario)
        emulator.start()
        first, second, third = Client(0), Client(0), Client(0)
        emulator.submit(Order(100, 50), first)
        number = emulator.submit(Order(100, 50), second)
        emulator.submit(Order(100, 50), third)
        emulator.abort(number)
        await asyncio.sleep(20)
        return first, second, third

    first, second, third = run(main())
    assert (first.fate, second.fate, third.fate) == ("finished", None, "finished")
    assert not second.tokens


def test_an_answer_s_blocks_begin_the_next_prompt_of_its_conversation():
    scenario = load_scenario("llama-3.1-8b-a100")

    async def main():
        emulator = Emulator(scenario)
        emulator.start()
        size = emulator.block_size
        hashes = tuple(range(30))
        first, second = Client(0), Client(0)
        emulator.submit(Order(10 * size, 10 * size, hashes[:20]), first)
        await asyncio.sleep(30)
        emulator.submit(Order(25 * size, 5, hashes[:25]), second)
        await asyncio.sleep(30)
        return emulator.cluster.engines[0].loop.scheduler.num_prefix_tokens_hit, size

    hit, size = run(main())
    assert hit == 19 * size  # all but the block with the last token, which nobody computed


def test_what_could_never_run_is_refused_at_once():
    async def main():
        emulator = Emulator(load_scenario("llama-3.1-8b-a100"))
        emulator.start()
        with pytest.raises(WorkloadError, match="maximum context length is 8192 tokens"):
            emulator.submit(Order(emulator.max_model_len, 1), Client(0))
        return emulator

    assert run(main()).num_sent == 0


def test_a_cluster_that_shortens_prompts_is_no_server():
    with pytest.raises(SpecError, match="prompt_compression"):
        Emulator(load_scenario("llama-3.1-8b-a100", ["prompt_compression={ratio: 0.5}"]))


FAILING = (
    "cluster.replicas=2",
    "cluster.failures={events: [{at_s: 1.0, pool: 0, replica: 1, down_s: 5}], start_s: 2}",
)


def test_tokens_on_their_way_when_their_replica_fails_are_lost_with_it():
    """A step has ended and its tokens are not yet with their clients: these were told of the loss, and hear no more."""
    whole = ["traffic.num_requests=4", "traffic.arrivals.rate=20", "cluster.replicas=2"]
    _, clients = run(replay(load_scenario("llama-3.1-8b-a100", whole)))
    soon_s = clients[1][1].tokens[5] - 1e-4
    failure = f"cluster.failures={{events: [{{at_s: {soon_s}, pool: 0, replica: 1, down_s: 5}}], start_s: 2}}"
    _, clients = run(replay(load_scenario("llama-3.1-8b-a100", [*whole, failure])))
    assert clients[1][1].fate == "failed"
    assert len(clients[1][1].tokens) == 5


def test_a_cluster_whose_replicas_fail_loses_what_is_simulated_to_be_lost():
    scenario = load_scenario("llama-3.1-8b-a100", [*SMALL, *FAILING])
    emulator, clients = run(replay(scenario))
    simulated = simulate(scenario)
    assert emulator.num_failed == simulated.summary["failed"] > 0
    assert emulator.num_finished == len(simulated.requests) == 40 - emulator.num_failed
    assert sum(client.fate == "failed" for _, client in clients) == emulator.num_failed


def test_replicas_that_scale_are_there_when_they_are_simulated_to_be():
    scaling = "cluster.autoscaling={target: 4, max_replicas: 3, interval_s: 1, cold_start_s: 2}"
    scenario = load_scenario("llama-3.1-8b-a100", ["traffic.num_requests=80", "traffic.arrivals.rate=20", scaling])
    _, clients = run(replay(scenario))
    simulated = simulate(scenario).requests
    first = dict(zip(simulated.request_id.tolist(), simulated.first_token_s.tolist(), strict=True))
    for request, client in clients:
        assert client.tokens[0] == pytest.approx(first[request.request_id], abs=2e-6)


def test_a_replica_on_a_port_of_its_own_is_asked_past_the_router_and_is_not_there_while_it_is_down():
    scenario = load_scenario("llama-3.1-8b-a100", [*FAILING, "cluster.gateway={max_outstanding: 1}"])

    async def main():
        emulator = Emulator(scenario, own_ports=True)
        emulator.start()
        clients = [Client(0) for _ in range(6)]
        for number, client in enumerate(clients):
            emulator.submit(Order(100, 300), client, replica=number % 2)
        used = [[rank.num_outstanding for rank in replica.ranks] for replica in emulator.replicas]
        await asyncio.sleep(2)
        assert not emulator.is_up(1)
        with pytest.raises(ReplicaDownError, match="replica 1 is not up"):
            emulator.submit(Order(100, 5), Client(0), replica=1)
        await asyncio.sleep(10)
        late = Client(0)
        emulator.submit(Order(100, 5), late, replica=1)
        await asyncio.sleep(1)
        return used, [client.fate for client in clients], late.fate

    used, fates, late = run(main())
    assert used == [[3], [3]]
    assert fates == ["finished", "failed"] * 3
    assert late == "finished"


def test_replicas_that_share_the_work_of_a_request_have_no_ports_of_their_own():
    for change in (
        FLEETS["prefill and decode pools"][0],
        "cluster.pools=[{share: 0.5}, {share: 0.5}]",
    ):
        with pytest.raises(SpecError, match="port of its own"):
            Emulator(load_scenario("llama-3.1-8b-a100", [change]), own_ports=True)


def test_a_cold_start_loads_the_weights():
    emulator = Emulator(load_scenario("llama-3.1-8b-a100"))
    assert emulator.cold_start_s() == pytest.approx(30 + 8.03e9 * 2 / 3e9, rel=0.01)


def test_who_leaves_as_the_deadline_passes_is_counted_once():
    scenario = load_scenario("llama-3.1-8b-a100", ["cluster.gateway={timeout_s: 0.5}"])

    async def main():
        emulator, loop = Emulator(scenario), asyncio.get_running_loop()
        emulator.start()
        client = Client(0)
        number = emulator.submit(Order(100, 4000), client)
        await asyncio.sleep(0.4)
        loop.now += 0.2  # held up: the deadline has passed, and nobody has looked
        emulator.abort(number)
        await asyncio.sleep(1)
        return emulator, client

    emulator, client = run(main())
    assert emulator.num_sent == emulator.num_timed_out + emulator.num_aborted == 1
    assert client.fate is None


def test_a_replica_that_has_failed_sends_nothing_more():
    failing = "cluster.failures={events: [{at_s: 1.0, pool: 0, replica: 0, down_s: 5}], start_s: 1, detection_s: 1.5}"
    retries = "cluster.gateway={retries: {max: 3, backoff_s: 0.001}}"
    scenario = load_scenario("llama-3.1-8b-a100", ["cluster.replicas=2", failing, retries])

    async def main():
        emulator = Emulator(scenario)
        emulator.start()
        clients = [Client(0) for _ in range(6)]
        for client in clients:
            emulator.submit(Order(100, 300), client)
        await asyncio.sleep(60)
        return clients

    clients = run(main())
    assert all(client.fate == "finished" and len(client.tokens) == 300 for client in clients)
    again = [client for client in clients if not any(1.05 < each < 2.5 for each in client.tokens)]
    assert len(again) == 3
    for client in again:
        late = [each for each in client.tokens if each > 2.5]
        gaps = [after - before for before, after in pairwise(late)]
        assert max(gaps) < 1  # what the second try brings anew comes as it is computed, not all at once at the end
        assert len(set(late)) == len(late)


@pytest.mark.parametrize("speed", [0.5, 1.0, 20.0])
def test_a_rate_limit_lasts_as_many_seconds_of_the_wall_as_the_speed_leaves(speed):
    """One request in 10 simulated seconds: at 20 times the speed the next is let in half a second later."""
    limit = "cluster.gateway={rate_limit: {requests_per_s: 0.1, burst: 1}}"

    async def main():
        emulator = Emulator(load_scenario("llama-3.1-8b-a100", [limit]), speed=speed)
        emulator.start()
        emulator.submit(Order(10, 1), Client(0))
        return emulator.rate_limited_for_s

    assert run(main()) == pytest.approx(10 / speed)


def test_requests_for_a_replica_by_name_go_to_its_rank_with_the_fewest():
    scenario = load_scenario("llama-3.1-8b-a100", ["engine.data_parallel_size=2"])

    async def main():
        emulator = Emulator(scenario, own_ports=True)
        emulator.start()
        for _ in range(4):
            emulator.submit(Order(100, 300), Client(0), replica=0)
        return [rank.num_outstanding for rank in emulator.replicas[0].ranks]

    assert run(main()) == [2, 2]


def test_a_deployment_serves_once_the_last_of_its_pools_has_started():
    scaling = "autoscaling: {{target: 1, max_replicas: 1, cold_start_s: {}}}"
    pools = ", ".join(f"{{share: 0.5, {scaling.format(seconds)}}}" for seconds in (10, 40))
    emulator = Emulator(load_scenario("llama-3.1-8b-a100", [f"cluster.pools=[{pools}]"]))
    assert emulator.cold_start_s() == 40
