"""Ranks of one machine that compute steps together: this process is rank 0, the others are spawned beside it. Rank 0
has the engine, and sends every step to the others through pipes; all meet in the collectives (NCCL between GPUs,
Gloo over the loopback interface between CPU processes). Between CPU processes a step lasts as long as its critical
path: from message to message the CPU time of the thread that computes, on the rank that takes longest."""

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from perfmodel.errors import PerfmodelError
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.traffic import ExpertRouting
from perfmodel_executors.device import StepClock, device_clock
from perfmodel_executors.models.batch import TokenSegment
from perfmodel_executors.parallel.experts import ExpertSharing
from perfmodel_executors.parallel.group import DistributedGroup, MessageLog
from perfmodel_executors.parallel.sharding import check_divisible, check_stages
from perfmodel_executors.runner import RunnerSetup, StepRunner, build_runner

_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
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


class LeadingRunner(StepRunner):
    """Rank 0's runner: broadcasts each call to the other ranks, and runs it. path_ns: critical path of all calls so
    far, between CPU processes; stage_ns: of the last step, that of each pipeline stage, where there are several; log:
    messages of the last step."""

    def __init__(self, number: int, local: StepRunner, ranks: "Ranks", log: MessageLog) -> None:
        super().__init__(local.decoder, local.cache, keeps_kv=local.keeps_kv)
        self.path_ns, self.log = 0, log
        self._number, self._local, self._ranks, self._others = number, local, ranks, ranks.others
        self._is_timed = local.decoder.device.type == "cpu"
        self._has_stages = local.decoder.group.stage.num_stages > 1

    def new_clock(self) -> StepClock:
        path = StepClock(lambda: self.path_ns, "CPU time of the ranks' threads along the critical path")
        return path if self._is_timed else device_clock(self.decoder.device)

    def reserve_for(self, segments: Sequence[TokenSegment]) -> None:
        before = self._local.cache.num_blocks
        self._local.reserve_for(segments)
        if self._local.cache.num_blocks > before:
            self._tell("reserve", self._local.cache.num_blocks)

    def release(self, first_block: int) -> None:
        self._tell("release", first_block)
        self._local.release(first_block)

    def run(self, segments: Sequence[TokenSegment], is_warm_up: bool = False) -> list[int]:
        """As of `StepRunner`. Raises RankDiedError where one of the ranks has ended."""
        try:
            return self._run_together(segments, is_warm_up)
        except (EOFError, OSError, RuntimeError):
            self._ranks.check_alive()
            raise

    def _run_together(self, segments: Sequence[TokenSegment], is_warm_up: bool) -> list[int]:
        self._tell("run", (segments, is_warm_up))
        self.log.begin()
        tokens = self._local.run(segments, is_warm_up)
        own = self.log.end()
        if not self._is_timed:
            return tokens
        # The step's tokens, which the last stage has, and its critical path: of stages one after another; of ranks, on
        # each stretch between messages, the one that takes longest.
        replies = [(own, tokens), *(other.recv() for other in self._others)]
        ranks = [spent for spent, _ in replies]
        if self._has_stages:
            self.stage_ns = [sum(spent) for spent in ranks]
            self.path_ns += sum(self.stage_ns)
        else:
            self.path_ns += sum(map(max, zip(*ranks, strict=True)))
        last: list[int] = replies[-1][1]
        return last

    def copy_blocks(self, out: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]]) -> None:
        self._tell("copy", (out, back))
        self.log.begin()
        self._local.copy_blocks(out, back)
        own = self.log.end()
        if self._is_timed:
            self.path_ns += max(sum(spent) for spent in (own, *(other.recv()[0] for other in self._others)))

    def _tell(self, what: str, argument: object) -> None:
        content = pickle.dumps((self._number, what, argument))
        for other in self._others:
            other.send_bytes(content)


class Ranks:
    """A group of processes, and runners of theirs: one for each setup that they are given. others, processes: pipes to
    ranks 1 and on, and what they lead to; none where this process is alone."""

    def __init__(self, others: Sequence[Connection] = (), processes: Sequence[BaseProcess] = ()) -> None:
        self.num_ranks = 1 + len(others)
        self.others, self._processes = others, processes
        self._num_runners = 0

    def check_alive(self) -> None:
        """Raises RankDiedError for the first rank that has ended, or does so within two seconds."""
        until = time.monotonic() + _NOTICED_S
        while time.monotonic() < until:
            for rank, process in enumerate(self._processes, start=1):
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
        _check_shared_out(setup)
        for other in self.others:
            other.send((self._num_runners, "build", setup))
        log = MessageLog()
        local = _built(setup, 0, log)
        for rank, other in enumerate(self.others, start=1):
            try:
                failure = other.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} ended before it was ready; its error is above.") from None
            if failure is not None:
                raise failure
        self._num_runners += 1
        return LeadingRunner(self._num_runners - 1, local, self, log)


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
            yield Ranks(others, workers)
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
    num_ranks = setup.engine.num_devices
    if num_ranks > 1:  # before processes are started that would say it too
        _check_shared_out(setup)
    with open_ranks(num_ranks, setup.device) as ranks:
        yield ranks.runner(setup)


def _check_shared_out(setup: RunnerSetup) -> None:
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


def _built(setup: RunnerSetup, rank: int, log: MessageLog) -> StepRunner:
    if setup.device.type == "cuda":
        setup = replace(setup, device=torch.device("cuda", rank))
    has_stages = setup.engine.pipeline_parallel_size > 1
    return build_runner(setup, DistributedGroup(log, sharing_of(setup.engine, setup.routing), has_stages))


def _follow(device: torch.device, rank: int, num_ranks: int, meeting: Path, leader: Connection) -> None:
    torch.set_num_threads(1)
    _join(device, rank, num_ranks, meeting)
    runners: list[tuple[StepRunner, MessageLog]] = []
    while True:
        try:
            number, what, argument = leader.recv()
        except EOFError:
            break
        if what == "build":
            log = MessageLog()
            try:
                runners.append((_built(argument, rank, log), log))
                leader.send(None)
            except PerfmodelError as error:
                leader.send(error)
        elif what == "reserve":
            runners[number][0].cache.reserve(argument)
        elif what == "release":
            runners[number][0].release(argument)
        else:
            runner, log = runners[number]
            log.begin()
            try:
                tokens = (runner.copy_blocks if what == "copy" else runner.run)(*argument)
            except RuntimeError as error:
                if _PEER_IS_GONE not in str(error):
                    raise
                return  # the leader says who it was
            spent = log.end()
            if device.type == "cpu":
                leader.send((spent, tokens))
    dist.destroy_process_group()


def _join(device: torch.device, rank: int, num_ranks: int, meeting: Path) -> None:
    backend = _BACKENDS[device.type]
    if device.type == "cuda":
        torch.cuda.set_device(torch.device("cuda", rank))
    if backend == "gloo" and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, init_method=meeting.as_uri(), rank=rank, world_size=num_ranks)
