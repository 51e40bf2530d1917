"""Ranks of one machine that compute steps together: this process is rank 0, the others are spawned beside it. Rank 0
has the engine, and sends every step to the others through pipes; all meet in the collectives (NCCL between GPUs,
Gloo over the loopback interface between CPU processes). Between CPU processes a step lasts as long as its critical
path: from message to message the CPU time of the thread that computes, on the rank that takes longest. Of several
engines each has a rank; rank 0 makes the plans of all."""

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from perfmodel.errors import PerfmodelError
from perfmodel.models.spec import ModelSpec
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.traffic import ExpertRouting
from perfmodel_executors.device import StepClock, device_clock
from perfmodel_executors.models.batch import TokenSegment
from perfmodel_executors.parallel.experts import ExpertSharing
from perfmodel_executors.parallel.group import ALONE, DistributedGroup, MessageLog
from perfmodel_executors.parallel.sharding import check_divisible, check_stages, check_striped
from perfmodel_executors.runner import RunnerSetup, StepRunner, build_runner

_PATH = "CPU time of the ranks' threads along the critical path"
_ENDS_S = 10.0  # that ranks have to end by themselves; the peers of one that died would wait for ever
_NOTICED_S = 2.0
_PEER_IS_GONE = "closed by peer"  # what gloo says of it


class RankDiedError(PerfmodelError):
    """A process of the group ended in the middle of a run."""


def sharing_of(engine: EngineSpec, routing: ExpertRouting) -> ExpertSharing | None:
    """How the engine's ranks share out whole experts; None where it cuts them by their width."""
    if not engine.enable_expert_parallel:
        return None
    return ExpertSharing(routing, engine.eplb_config.num_redundant_experts if engine.enable_eplb else None)


class RankCall(NamedTuple):
    """A method of a runner, by its number, of one rank; `build` makes the runner."""

    number: int
    name: str
    arguments: tuple[Any, ...]


class RankReply(NamedTuple):
    """What a call gives; spent_ns: CPU time of the rank's thread up to each message, and behind the last"""

    spent_ns: list[int]
    result: Any


class LeadingRunner(StepRunner):
    """Rank 0's runner: broadcasts each call to the other ranks, and runs it. path_ns: critical path of all calls so
    far, between CPU processes; stage_ns: of the last step, that of each pipeline stage, where there are several."""

    def __init__(self, number: int, local: StepRunner, ranks: "Ranks") -> None:
        super().__init__(local.decoder, local.cache, keeps_kv=local.keeps_kv)
        self.path_ns = 0
        self._number, self._local, self._ranks = number, local, ranks
        self._has_stages = local.decoder.group.stage.num_stages > 1

    @property
    def messages(self) -> list[tuple[str, int]]:
        """Kind and payload bytes of rank 0's messages in the last step."""
        return self._ranks.messages(self._number)

    def new_clock(self) -> StepClock:
        path = StepClock(lambda: self.path_ns, _PATH)
        return path if self._ranks.is_timed else device_clock(self.decoder.device)

    def reserve_for(self, segments: Sequence[TokenSegment]) -> None:
        if 1 + max((max(s.block_table) for s in segments if s.block_table), default=-1) > self._local.cache.num_blocks:
            self._call("reserve_for", segments)

    def release(self, first_block: int) -> None:
        self._call("release", first_block)

    def run(self, segments: Sequence[TokenSegment], is_warm_up: bool = False) -> list[int]:
        """As of `StepRunner`. Raises RankDiedError where one of the ranks has ended."""
        replies = self._call("run", segments, is_warm_up)
        # The step's critical path: of stages one after another; of ranks, on each stretch between messages, the one
        # that takes longest. The last stage has the step's tokens.
        if self._has_stages and self._ranks.is_timed:
            self.stage_ns = [sum(reply.spent_ns) for reply in replies]
            self.path_ns += sum(self.stage_ns)
        else:
            self.path_ns += critical_path(replies)
        return list(replies[-1].result)

    def copy_blocks(self, out: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]]) -> None:
        self.path_ns += max(sum(reply.spent_ns) for reply in self._call("copy_blocks", out, back))

    def _call(self, name: str, *arguments: Any) -> list[RankReply]:
        call = RankCall(self._number, name, arguments)
        return list(self._ranks.ask(dict.fromkeys(range(self._ranks.num_ranks), call)).values())


class EngineRunner:
    """The runner of an engine of one rank: this process, or another. path_ns: CPU time of that rank in calls so far."""

    stage_ns: Sequence[int] = ()

    def __init__(self, number: int, rank: int, ranks: "Ranks", model: ModelSpec, block_size: int) -> None:
        self.number, self.rank, self.model, self.block_size, self.path_ns = number, rank, model, block_size, 0
        self._ranks = ranks

    def new_clock(self) -> StepClock:
        return StepClock(lambda: self.path_ns, "CPU time of the thread of each engine's rank")

    def reserve_for(self, segments: Sequence[TokenSegment]) -> None:
        self._call("reserve_for", segments)

    def release(self, first_block: int) -> None:
        self._call("release", first_block)

    def run(self, segments: Sequence[TokenSegment], is_warm_up: bool = False) -> list[int]:
        return list(self._call("run", segments, is_warm_up).result)

    def copy_blocks(self, out: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]]) -> None:
        self._call("copy_blocks", out, back)

    def count_nan(self) -> int:
        return int(self._call("count_nan").result)

    def _call(self, name: str, *arguments: Any) -> RankReply:
        (reply,) = self._ranks.ask({self.rank: RankCall(self.number, name, arguments)}).values()
        self.path_ns += sum(reply.spent_ns)
        return reply


class RunnersTogether:
    """Runners of data-parallel ranks, which step at the same time, those without work, too."""

    def __init__(self, runners: Sequence[EngineRunner], ranks: "Ranks") -> None:
        self.path_ns, self._runners, self._ranks = 0, runners, ranks
        self.clock = StepClock(lambda: self.path_ns, _PATH)

    def run(self, segments: Mapping[int, Sequence[TokenSegment]], is_warm_up: bool = False) -> dict[int, list[int]]:
        """Tokens of each rank's segments, by rank."""
        calls = {r.rank: RankCall(r.number, "run", (segments.get(r.rank, ()), is_warm_up)) for r in self._runners}
        replies = self._ranks.ask(calls)
        self.path_ns += critical_path(list(replies.values()))
        return {rank: replies[rank].result for rank in segments}


def critical_path(replies: Sequence[RankReply]) -> int:
    """Nanoseconds along ranks that meet in messages: on each stretch between two, of the one that takes longest."""
    return sum(map(max, zip(*(reply.spent_ns for reply in replies), strict=True)))


class _Rank:
    """The runners of one process, by number."""

    def __init__(self, rank: int) -> None:
        self.runners: dict[int, tuple[StepRunner, MessageLog]] = {}
        self._rank = rank

    def answer(self, call: RankCall) -> RankReply:
        if call.name == "build":
            setup, log, group = call.arguments[0], MessageLog(), ALONE
            if setup.device.type == "cuda":
                setup = replace(setup, device=torch.device("cuda", self._rank))
            engine = setup.engine
            has_stages, sends = engine.pipeline_parallel_size > 1, engine.data_parallel_size > 1
            if has_stages or engine.tensor_parallel_size > 1 or (sends and engine.enable_expert_parallel):
                how = (has_stages, sends, engine.decode_context_parallel_size)
                group = DistributedGroup(log, sharing_of(engine, setup.routing), *how)
            self.runners[call.number] = build_runner(setup, group), log
            return RankReply([], None)
        runner, log = self.runners[call.number]
        log.begin()
        result = getattr(runner, call.name)(*call.arguments)
        return RankReply(log.end(), result)


class Ranks:
    """A group of processes, and runners of theirs. others, processes: pipes to ranks 1 and on, and what they lead to;
    none where this process is alone. is_timed: ranks say what calls took, as CPU processes do."""

    def __init__(
        self, others: Sequence[Connection] = (), processes: Sequence[BaseProcess] = (), is_timed: bool = True
    ) -> None:
        self.num_ranks, self.is_timed = 1 + len(others), is_timed
        self.processes, self._others, self._local = processes, others, _Rank(0)
        self._num_runners = 0

    def messages(self, number: int) -> list[tuple[str, int]]:
        return self._local.runners[number][1].messages

    def ask(self, calls: Mapping[int, RankCall]) -> dict[int, RankReply]:
        """What each rank says to its call, in order; others are asked first, as they meet this one in messages.
        Untimed, only it and `build` answer. Raises RankDiedError for an ended rank, PerfmodelError as the call does."""
        content, last = b"", None
        replies: dict[int, RankReply] = {}
        try:
            for rank, call in calls.items():
                if rank:
                    content, last = content if call is last else pickle.dumps(call), call
                    self._others[rank - 1].send_bytes(content)
            if 0 in calls:
                replies[0] = self._local.answer(calls[0])
            for rank, call in calls.items():
                if rank and (self.is_timed or call.name == "build"):
                    replies[rank] = self._others[rank - 1].recv()
        except (EOFError, OSError, RuntimeError):
            self.check_alive()
            raise
        for reply in replies.values():
            if isinstance(reply, PerfmodelError):
                raise reply
        return dict(sorted(replies.items()))

    def check_alive(self) -> None:
        """Raises RankDiedError for the first rank that has ended, or does so within two seconds."""
        until = time.monotonic() + _NOTICED_S
        while time.monotonic() < until:
            for rank, process in enumerate(self.processes, start=1):
                if process.exitcode is not None:
                    raise RankDiedError(
                        f"rank {rank} of {self.num_ranks} ended in the middle of a step (exit status "
                        f"{process.exitcode}); start the run again, with more memory if the system has ended it."
                    )
            time.sleep(0.05)

    def runner(self, setup: RunnerSetup) -> StepRunner:
        """A runner for `setup` on all ranks. Raises PerfmodelError as `build_runner` does, on whichever rank."""
        if self.num_ranks == 1:
            return build_runner(setup)
        check_shared_out(setup)
        number = self._build(setup, range(self.num_ranks))
        return LeadingRunner(number, self._local.runners[number][0], self)

    def engine(self, setup: RunnerSetup, rank: int) -> EngineRunner:
        """The runner of an engine of one rank."""
        return EngineRunner(self._build(setup, [rank]), rank, self, setup.model, setup.engine.kv_block_tokens)

    def together(self, setup: RunnerSetup) -> list[EngineRunner]:
        """Runners of data-parallel ranks, one on each of all ranks."""
        check_divisible(setup.model, 1)
        where, number = range(self.num_ranks), self._build(setup, range(self.num_ranks))
        return [EngineRunner(number, rank, self, setup.model, setup.engine.kv_block_tokens) for rank in where]

    def _build(self, setup: RunnerSetup, where: Iterable[int]) -> int:
        number, self._num_runners = self._num_runners, self._num_runners + 1
        self.ask(dict.fromkeys(where, RankCall(number, "build", (setup,))))
        return number


@contextmanager
def open_ranks(num_ranks: int, device: torch.device) -> Iterator[Ranks]:
    """`num_ranks` processes, this one among them, until the end of the block; device: of rank 0."""
    if num_ranks == 1:
        yield Ranks()
        return
    spawning = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "rendezvous"
        pipes = [spawning.Pipe() for _ in range(num_ranks - 1)]
        workers = [
            spawning.Process(target=_follow, args=(device, rank, num_ranks, meeting, pipe[1]), daemon=True)
            for rank, pipe in enumerate(pipes, start=1)
        ]
        for worker, (_, theirs) in zip(workers, pipes, strict=True):
            worker.start()
            theirs.close()
        others = [ours for ours, _ in pipes]
        try:
            _join(device, 0, num_ranks, meeting)
            yield Ranks(others, workers, is_timed=device.type == "cpu")
        finally:
            for other in others:
                other.close()
            has_lost_one = any(worker.exitcode is not None for worker in workers)
            for worker in workers:
                worker.join(_NOTICED_S if has_lost_one else _ENDS_S)
                if worker.is_alive():  # left behind in a collective that rank 0 did not enter
                    worker.terminate()
            if dist.is_initialized():
                dist.destroy_process_group()


@contextmanager
def open_runner(setup: RunnerSetup) -> Iterator[StepRunner]:
    """The runner of the engine's one rank, or of the first of several, which follow it until the end of the block."""
    check_shared_out(setup)  # before processes are started that would say it too
    with open_ranks(setup.engine.num_devices, setup.device) as ranks:
        yield ranks.runner(setup)


def check_shared_out(setup: RunnerSetup) -> None:
    """Raises PerfmodelError for what the engine's ranks cannot share out."""
    if setup.engine.num_devices == 1:
        return
    size, num_stages = setup.engine.tensor_parallel_size, setup.engine.pipeline_parallel_size
    if num_stages > 1:
        if setup.device.type != "cpu":
            raise PerfmodelError(
                f"{setup.model.name}: pipeline stages are executed on CPUs only, where each stage's own time is known; "
                f"set pipeline_parallel_size to 1, use --set hardware=cpu, or simulate it."
            )
        check_stages(setup.model, num_stages, size)
    else:
        check_divisible(setup.model, size, sharing_of(setup.engine, setup.routing))
    check_striped(setup.model, setup.engine)


def _follow(device: torch.device, rank: int, num_ranks: int, meeting: Path, leader: Connection) -> None:
    torch.set_num_threads(1)
    _join(device, rank, num_ranks, meeting)
    own = _Rank(rank)
    while True:
        try:
            call: RankCall = leader.recv()
        except EOFError:
            break
        try:
            reply: RankReply | PerfmodelError = own.answer(call)
        except PerfmodelError as error:
            if call.name != "build":  # the others wait for this rank in a message
                raise
            reply = error
        except RuntimeError as error:
            if _PEER_IS_GONE not in str(error):
                raise
            return  # the leader says who it was
        if device.type == "cpu" or call.name == "build":
            leader.send(reply)
    dist.destroy_process_group()


def _join(device: torch.device, rank: int, num_ranks: int, meeting: Path) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(torch.device("cuda", rank))
    elif sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, init_method=meeting.as_uri(), rank=rank, world_size=num_ranks)
