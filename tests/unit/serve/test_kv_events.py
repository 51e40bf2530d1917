"""A subscriber that follows the events knows at every moment which blocks each engine's prefix cache holds."""

import asyncio

import msgspec
import numpy as np
import pytest
import zmq
from metrics_ledger import Client
from virtual_time import run

from perfmodel.errors import SpecError
from perfmodel.serve import Emulator, Order
from perfmodel.serve.emulator import RequestParams
from perfmodel.serve.emulator_server import EmulatorServer, Telemetry
from perfmodel.serve.kv_events import KvEvents, external_hash
from perfmodel.serve.settings import ServerSettings
from perfmodel.sim import Workload
from perfmodel.specs import load_scenario
from workloads import cached_in

HERE = "@tcp://127.0.0.1:*"
CHATS = (
    *("traffic.num_requests=20", "traffic.arrivals.rate=20", "engine.num_gpu_blocks_override=300"),
    "traffic.prefix={num_groups: 3, shared_tokens: 320}",
)


class Subscriber:
    """What one engine's events add up to; `batches` as they came, decoded without knowing any type."""

    def __init__(self, endpoint, replay_endpoint, topic="kv-events"):
        self.socket, self.replay = (zmq.Context.instance().socket(kind) for kind in (zmq.SUB, zmq.DEALER))
        self.socket.subscribe(topic)
        self.socket.connect(endpoint)
        self.replay.connect(replay_endpoint)
        self.topic, self.held, self.batches = topic, set(), []

    def take(self, number):
        """Receive all up to message `number`; ask for what was said before the subscription had arrived."""
        while len(self.batches) < number:
            if not self.socket.poll(5000 if self.batches else 50):
                self.ask(len(self.batches))
                continue
            topic, sequence, payload = self.socket.recv_multipart()
            assert topic.decode() == self.topic
            sequence = int.from_bytes(sequence, "big")
            if sequence > len(self.batches):
                self.ask(len(self.batches))
            elif sequence == len(self.batches):
                self.add(payload)

    def ask(self, first):
        """What can be replayed from message `first` on; the number of messages."""
        self.replay.send_multipart((b"", first.to_bytes(8, "big")))  # a REQ socket would take one answer only
        numbers = []
        while not numbers or numbers[-1] != -1:
            assert self.replay.poll(5000), "no answer"
            _, sequence, payload = self.replay.recv_multipart()
            numbers.append(int.from_bytes(sequence, "big", signed=True))
            if numbers[-1] == len(self.batches):
                self.add(payload)
        return numbers[:-1]

    def add(self, payload):
        batch = msgspec.msgpack.decode(payload)
        self.batches.append(batch)
        for event in batch[1]:
            if event["type"] == "BlockStored":
                assert event["parent_block_hash"] is None or event["parent_block_hash"] in self.held
                assert self.held.isdisjoint(event["block_hashes"])
                self.held.update(event["block_hashes"])
            elif event["type"] == "BlockRemoved":
                assert self.held.issuperset(event["block_hashes"])
                self.held.difference_update(event["block_hashes"])
            else:
                self.held.clear()

    def close(self):
        self.socket.close(linger=0)
        self.replay.close(linger=0)


class Watch:
    """An observer after the publisher: each step's events have come, and say what the block manager has."""

    def __init__(self, subscribers):
        self.subscribers, self.num_looks, self.wrong = subscribers, 0, None

    def on_step(self, engine, record, plan, gaps):
        blocks, subscriber = engine.loop.scheduler.blocks, self.subscribers[engine.index]
        try:
            subscriber.take(blocks.listener.sequence)
            assert subscriber.held == {external_hash(content) for content in cached_in(blocks)}
        except AssertionError as wrong:  # an event loop would write it down and go on
            self.wrong = self.wrong or wrong
        self.num_looks += bool(subscriber.held)

    def on_arrived(self, *_):
        pass

    on_finished = on_lost = on_aborted = on_arrived


async def followed(changes, leaves=()):
    """(emulator, subscribers) after the traffic of a scenario with these changes, watched at every step."""
    emulator, loop = Emulator(load_scenario("llama-3.1-8b-a100", changes)), asyncio.get_running_loop()
    events = KvEvents(emulator, HERE, HERE)
    events.start()
    subscribers = [Subscriber(*both) for both in zip(events.endpoints, events.replay_endpoints, strict=True)]
    watch = Watch(subscribers)
    emulator.observers.append(watch)
    emulator.start()
    try:
        for request in Workload(emulator.scenario).requests():
            await asyncio.sleep(request.arrival / 1e12 - loop.time())
            order = Order(request.num_prompt_tokens, request.max_output_tokens, request.block_hashes)
            number = emulator.submit(order, Client(0))
            if number in leaves:
                loop.call_later(0.3, emulator.abort, number)
        while emulator.num_under_way and watch.wrong is None:
            await asyncio.sleep(1)
        if watch.wrong is not None:
            raise watch.wrong
        for engine in emulator.cluster.engines:
            engine.loop.scheduler.blocks.forget_all()
            subscribers[engine.index].take(engine.loop.scheduler.blocks.listener.sequence)
    finally:
        emulator.stop()
        events.close()
        for subscriber in subscribers:
            subscriber.close()
    assert watch.num_looks > 20
    return emulator, subscribers


@pytest.mark.parametrize("fleet", [(), ("cluster.replicas=2",), ("engine.data_parallel_size=2",)])
def test_a_subscriber_has_the_blocks_that_the_block_manager_has(fleet):
    emulator, subscribers = run(followed((*CHATS, *fleet), leaves=(2, 7)))
    assert emulator.num_aborted
    kinds = [event["type"] for each in subscribers for batch in each.batches for event in batch[1]]
    assert {"BlockStored", "BlockRemoved", "AllBlocksCleared"} == set(kinds)
    assert not any(each.held for each in subscribers)
    ranks = [{batch[2] for batch in each.batches} for each in subscribers]
    assert ranks == ([{0}, {1}] if "engine.data_parallel_size=2" in fleet else [{0}] * len(subscribers))


# An event that a server of vLLM 0.26 published for a prompt of 16 tokens (github.com/volcano-sh/kthena/issues/1535).
PUBLISHED = {
    **{"type": "BlockStored", "block_hashes": [15760518052499183552], "parent_block_hash": None},
    "token_ids": [151644, 872, 198, 9064, 374, 279, 6722, 315, 5616, 30, 151645, 198, 151644, 77091, 198, 151667],
    **{"block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": [None]},
    **{"group_idx": 0, "kv_cache_spec_kind": "full_attention"},
}


async def told(orders, remembered=(), **options):
    """Batches that a server whose blocks hold 16 tokens has in its buffer after prompts one after the other, and their
    numbers."""
    emulator = Emulator(load_scenario("llama-3.1-8b-a100"))
    events = KvEvents(emulator, HERE, HERE, **options)
    for block_hash, token_ids in remembered:
        events.remember(block_hash, token_ids)
    events.start()
    subscriber = Subscriber(events.endpoints[0], events.replay_endpoints[0])
    emulator.start()
    try:
        for order in orders:
            emulator.submit(order, Client(0))
            await asyncio.sleep(10)
        return subscriber.batches, subscriber.ask(0)
    finally:
        emulator.stop()
        events.close()
        subscriber.close()


def test_an_event_is_what_vllm_publishes():
    content, tokens = PUBLISHED["block_hashes"][0], PUBLISHED["token_ids"]
    params = RequestParams(token_ids=np.array([*tokens, 1, 2, 3]))
    batches, _ = run(told([Order(17, 2, (content,), params=params)]))
    (_, events, rank), *others = batches
    assert (events, rank, others) == ([PUBLISHED], 0, [])


def test_an_event_names_the_adapter_as_vllm_does():
    """`LoRARequest`s count from 1 in the order of `--lora-modules`; the name is an extra key of all its blocks."""
    orders = [
        Order(33, 2, contents, params=RequestParams(adapter=name, token_ids=np.arange(35)))
        for name, contents in ((None, (1, 2)), ("law", (3, 4)), ("code", (5, 6)), ("law", (7,)))
    ]
    batches, _ = run(told(orders))
    events = [event for _, events, _ in batches for event in events]
    named = [(event["lora_id"], event["lora_name"], event["extra_keys"]) for event in events]
    law, code = ["law"], ["code"]
    assert named == [(None, None, [None] * 2), (1, "law", [law, law]), (2, "code", [code, code]), (1, "law", [law])]


def test_blocks_of_an_answer_are_published_as_it_fills_them():
    """A prompt of 17 tokens fills one block of 16, and its answer of 64 four more, one after the other."""
    contents = (11, 12, 13, 14, 15)
    params = RequestParams(token_ids=np.arange(81))
    batches, _ = run(told([Order(17, 64, contents, params=params)]))
    events = [event for _, each, _ in batches for event in each]
    assert [event["block_hashes"] for event in events] == [[content] for content in contents]
    assert [event["parent_block_hash"] for event in events] == [None, *contents[:-1]]
    assert [event["token_ids"][0] for event in events] == [0, 16, 32, 48, 64]
    times = [at for at, _, _ in batches]
    assert times == sorted(times)
    assert len(times) == 5


def test_tokens_that_nobody_has_told_of_are_left_out():
    batches, _ = run(told([Order(33, 2, (1, 2))], [(1, list(range(16)))]))
    assert [event["token_ids"] for event in batches[0][1]] == [[]]


def test_the_buffer_has_the_newest_batches():
    orders = [Order(17, 2, (number,)) for number in range(6)]
    _, numbers = run(told(orders, buffer_steps=4))
    assert numbers == [2, 3, 4, 5]


def test_before_0_24_events_were_arrays():
    """`["BlockStored", hashes, parent, tokens, block size, LoRA's id, medium, LoRA's name, ...]`, as llm-d's positional
    decoder reads them."""

    async def main():
        telemetry = Telemetry(kv_events="inproc://arrays", kv_arrays=True)
        server = EmulatorServer(load_scenario("llama-3.1-8b-a100"), ServerSettings(), telemetry)
        emulator, events = server.emulator, server.kv_events
        events.start()
        socket = zmq.Context.instance().socket(zmq.SUB)
        socket.subscribe("")
        socket.connect("inproc://arrays")
        emulator.start()
        emulator.submit(Order(17, 2, (5,)), Client(0))
        await asyncio.sleep(10)
        assert socket.poll(5000)
        topic, _, payload = socket.recv_multipart()
        emulator.stop()
        events.close()
        socket.close(linger=0)
        return topic, msgspec.msgpack.decode(payload)

    topic, (_, [event], _) = run(main())
    assert topic == b"kv-events"
    assert event[:8] == ["BlockStored", [5], None, [], 16, None, "GPU", None]


def test_hashes_are_64_bits_as_vllm_s_are():
    assert external_hash(2**64 - 1) == 2**64 - 1
    assert external_hash(b"\x01" + bytes(7) + b"\x02" * 8) == int.from_bytes(b"\x02" * 8, "big")
    assert external_hash(("group", 3)) != external_hash(("group", 4)) < 2**64


@pytest.mark.parametrize("endpoint", ["localhost:5557", "tcp://*", "tcp://*:http"])
def test_what_is_no_endpoint_is_refused(endpoint):
    emulator = Emulator(load_scenario("llama-3.1-8b-a100"))
    with pytest.raises(SpecError, match="name one like"):
        KvEvents(emulator, endpoint)


def test_a_port_that_is_taken_is_refused_and_nothing_is_left_open():
    emulator = Emulator(load_scenario("llama-3.1-8b-a100", ["cluster.replicas=2"]))
    events = KvEvents(emulator, HERE, "inproc://taken")
    socket = zmq.Context.instance().socket(zmq.PUB)
    socket.bind("inproc://taken_dp1")
    with pytest.raises(SpecError, match=r"inproc://taken_dp1 cannot be opened"):
        events.start()
    socket.close(linger=0)
    assert emulator.cluster.engines[0].loop.scheduler.blocks.listener is None
