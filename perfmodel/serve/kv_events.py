"""`KvEvents`: publishes over ZeroMQ what each engine's prefix cache comes to hold and what it gives up, as vLLM does.

Source: `ZmqEventPublisher` of vLLM 0.28. Each engine has a PUB socket, at the port of the endpoint plus its number. A
message has three parts: the topic, a sequence number (8 bytes, big-endian) and a batch in msgpack: the Unix time, the
events of a step, the data-parallel rank. Since 0.24 (pull request 42892) an event is a map with its `type`; before, it
was an array. Hashes are integers of 64 bits, as vLLM publishes them by default. Adapters count from 1, in the order
of `--lora-modules` (`OpenAIServingModels`), and their names are extra keys of their blocks. Whoever has missed
something asks the ROUTER socket for all from a number on, and gets what is still in the buffer."""

import time
from collections import OrderedDict, deque
from collections.abc import Hashable, Mapping, Sequence
from hashlib import blake2b
from threading import Event, Thread
from typing import Any, NamedTuple

import msgspec
import zmq

from perfmodel.engine import GroupedKVBlocks, Request, StepPlan, StepRecord
from perfmodel.errors import SpecError
from perfmodel.serve.emulator import Emulator, Observer
from perfmodel.sim.replica.replica import EngineRank

_END = (-1).to_bytes(8, "big", signed=True)
_POLL_MS = 100
_OPTIONAL = (("extra_keys", Any, None), ("group_idx", Any, None))
_FIELDS: dict[str, tuple[Any, ...]] = {
    "BlockStored": (
        *(("block_hashes", Any), ("parent_block_hash", Any), ("token_ids", Any), ("block_size", Any)),
        *(("lora_id", Any), ("medium", Any), ("lora_name", Any), *_OPTIONAL),
        *(("kv_cache_spec_kind", Any, None), ("kv_cache_spec_sliding_window", Any, None)),
    ),
    "BlockRemoved": (("block_hashes", Any), ("medium", Any), ("group_idx", Any, None)),
    "AllBlocksCleared": (),
}


def external_hash(content: Hashable) -> int:
    """The 64 bits under which a block is published: whole numbers of so many as they are, of bytes the last 8 (as vLLM
    does), a hash of anything else's `repr`."""
    if isinstance(content, int) and 0 <= content < 1 << 64:
        return content
    if isinstance(content, bytes):
        return int.from_bytes(content[-8:], "big")
    return int.from_bytes(blake2b(repr(content).encode(), digest_size=8).digest(), "big")


def _at(endpoint: str, number: int) -> str:
    """The endpoint of engine `number`, where `endpoint` is that of the first."""
    head, _, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://") and head != "tcp" and (port == "*" or port.isdigit()):
        return endpoint if port == "*" else f"{head}:{int(port) + number}"
    if endpoint.startswith(("inproc://", "ipc://")):
        return f"{endpoint}_dp{number}" if number else endpoint
    raise SpecError(f"{endpoint} is no endpoint of ZeroMQ; name one like tcp://*:5557, ipc:///tmp/kv or inproc://kv")


class _Content(NamedTuple):
    token_ids: Sequence[int]
    adapter: tuple[int, str] | None  # its number and name


class _Rank:
    """What one engine has to say: a `BlockListener` of its blocks, and the sockets that it is said on."""

    def __init__(
        self,
        engine: EngineRank,
        number: int,
        topic: str,
        buffer_steps: int,
        kinds: Mapping[str, Any],
        known: Mapping[Hashable, _Content],
    ) -> None:
        self.scheduler, self.blocks = engine.loop.scheduler, engine.loop.scheduler.blocks
        self.number, self.topic, self.kinds, self.known = number, topic.encode(), kinds, known
        self.events: list[Any] = []
        self.sequence = 0
        self.sent: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)
        self.socket: zmq.Socket[bytes] | None = None
        groups = self.blocks.groups if isinstance(self.blocks, GroupedKVBlocks) else ()
        self.spans = [(group.span, group.is_chunk) for group in groups] or [(None, False)]

    def on_stored(self, contents: Sequence[Hashable], parent: Hashable | None, group: int) -> None:
        span, is_chunk = self.spans[group]
        known = [self.known[content] for content in contents if content in self.known]
        tokens = [token for block in known for token in block.token_ids] if len(known) == len(contents) else []
        lora_id, lora_name = known[0].adapter if known and known[0].adapter is not None else (None, None)
        kind = "chunked_local_attention" if is_chunk else "sliding_window"
        self.events.append(
            self.kinds["BlockStored"](
                block_hashes=[external_hash(content) for content in contents],
                parent_block_hash=None if parent is None else external_hash(parent),
                token_ids=tokens,
                block_size=self.blocks.block_size,
                lora_id=lora_id,
                medium="GPU",
                lora_name=lora_name,
                extra_keys=[None if lora_name is None else (lora_name,)] * len(contents),
                group_idx=group,
                kv_cache_spec_kind=kind if span is not None else "full_attention",
                kv_cache_spec_sliding_window=span,
            )
        )

    def on_removed(self, content: Hashable, group: int) -> None:
        removed = self.kinds["BlockRemoved"]
        self.events.append(removed(block_hashes=[external_hash(content)], medium="GPU", group_idx=group))

    def on_cleared(self) -> None:
        self.events.append(self.kinds["AllBlocksCleared"]())
        self.flush()

    def flush(self) -> None:
        """Send what has happened since the last time, if anything has."""
        self.scheduler.publish_answers()
        self.blocks.catch_up()
        if not self.events or self.socket is None:
            return
        payload = msgspec.msgpack.encode((time.time(), self.events, self.number))
        number = self.sequence.to_bytes(8, "big")
        self.socket.send_multipart((self.topic, number, payload), zmq.NOBLOCK)  # whoever is too slow misses it
        self.sent.append((number, payload))
        self.sequence += 1
        self.events = []


class KvEvents(Observer):
    """The publisher of all engines of `emulator`; an `Observer`. It speaks from `start` to `close`.

    endpoint:        of the first engine: bound where it names a wildcard, `ipc` or `inproc`, else connected to, as
                     vLLM does; with `@` before it bound, with `>` connected to, as CZMQ has it
    replay_endpoint: of the first engine's ROUTER socket, which is bound; None: there is no replay
    topic:           of all messages; `{replica}` in it becomes the replica's number
    are_arrays:      events as before vLLM 0.24
    buffer_steps:    batches that can be replayed; hwm: messages that wait for one slow subscriber before some are lost

    Raises SpecError for what is no endpoint, or cannot be bound."""

    def __init__(
        self,
        emulator: Emulator,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        topic: str = "kv-events",
        are_arrays: bool = False,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
    ) -> None:
        self._emulator, self._hwm = emulator, hwm
        address = endpoint.lstrip("@>")
        is_open = "*" in address or "::" in address or not address.startswith("tcp:")
        self._binds = endpoint[:1] == "@" or (endpoint[:1] != ">" and is_open)
        self._known: OrderedDict[Hashable, _Content] = OrderedDict()
        kinds = {
            name: msgspec.defstruct(name, fields, tag=name, array_like=are_arrays, omit_defaults=True, gc=False)
            for name, fields in _FIELDS.items()
        }
        self._ranks = {
            engine.index: _Rank(
                engine, number, topic.replace("{replica}", str(position)), buffer_steps, kinds, self._known
            )
            for position, replica in enumerate(emulator.replicas)
            for number, engine in enumerate(replica.ranks)
        }
        self._wanted = {index: _at(address, index) for index in self._ranks}
        replayed = (replay_endpoint or "").lstrip("@")
        self._replayed = {index: _at(replayed, index) for index in self._ranks} if replayed else {}
        self._most_tokens = 65_536 + sum(rank.blocks.num_blocks for rank in self._ranks.values())
        self._is_over = Event()
        self._thread: Thread | None = None
        self.endpoints: list[str] = []  # of the engines, as they are once started
        self.replay_endpoints: list[str] = []

    def remember(self, block_hash: Hashable, token_ids: Sequence[int], adapter: tuple[int, str] | None = None) -> None:
        """The block with this identity in `Order.block_hashes` holds these tokens, under the LoRA adapter of this
        number and name: say so when it is stored.

        The oldest are forgotten when there are more than all engines have blocks for, and some. Events of blocks that
        nobody has told of have no token ids."""
        self._known[block_hash] = _Content(token_ids, adapter)
        self._known.move_to_end(block_hash)
        if len(self._known) > self._most_tokens:
            self._known.popitem(last=False)

    def start(self) -> None:
        """Open the sockets, and follow the engines from now on."""
        routers: dict[zmq.Socket[bytes], _Rank] = {}
        try:
            for index, rank in self._ranks.items():
                rank.socket = self._opened(zmq.PUB, self._wanted[index], self._binds, self.endpoints)
                if index in self._replayed:
                    router = self._opened(zmq.ROUTER, self._replayed[index], True, self.replay_endpoints)
                    routers[router] = rank
                rank.blocks.listener = rank
        except SpecError:
            self.close()
            for router in routers:
                router.close(linger=0)
            raise
        self._emulator.observers.append(self)
        if routers:
            self._thread = Thread(target=self._replay, args=(routers,), name="kv-events-replay", daemon=True)
            self._thread.start()

    def _opened(self, kind: int, endpoint: str, binds: bool, names: list[str]) -> "zmq.Socket[bytes]":
        """A socket at `endpoint`; its name there is added to `names`."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        socket.set_hwm(self._hwm)
        try:
            if binds:
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise SpecError(f"{endpoint} cannot be opened for KV events: {error}; name another") from error
        name: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
        names.append(name.rstrip(b"\0").decode())
        return socket

    def close(self) -> None:
        """Say no more."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        if self in self._emulator.observers:
            self._emulator.observers.remove(self)
        for rank in self._ranks.values():
            rank.blocks.listener = None
            if rank.socket is not None:
                rank.socket.close(linger=0)
                rank.socket = None

    def _replay(self, routers: "dict[zmq.Socket[bytes], _Rank]") -> None:
        """Answer who asks for messages from a number on; a thread of its own, as nobody else uses these sockets."""
        poller = zmq.Poller()
        for router in routers:
            poller.register(router, zmq.POLLIN)
        while not self._is_over.is_set():
            for router, _ in poller.poll(_POLL_MS):
                parts = router.recv_multipart()
                if len(parts) != 3:
                    continue
                for number, payload in list(routers[router].sent):
                    if number >= parts[2]:  # big-endian: in the order of the numbers
                        router.send_multipart((parts[0], b"", number, payload))
                router.send_multipart((parts[0], b"", _END, b""))
        for router in routers:
            router.close(linger=0)

    def on_step(self, engine: EngineRank, record: StepRecord, plan: StepPlan, gaps: Sequence[tuple[int, int]]) -> None:
        """See `Observer`: a step's events go out together."""
        self._ranks[engine.index].flush()

    def on_arrived(self, request: Request) -> None:
        """See `Observer`: what its blocks hold is published when they are stored."""
        params, size = self._emulator.params_of(request.request_id), self._emulator.block_size
        name, place = params.adapter, request.adapter
        adapter = None if name is None or place is None else (place + 1, name)
        if (tokens := params.token_ids) is not None:
            for number, block_hash in enumerate(request.block_hashes):
                self.remember(block_hash, tokens[number * size : (number + 1) * size].tolist(), adapter)
