"""Ranks of a tensor-parallel group on one machine: this process is rank 0, the others are spawned beside it.

Rank 0 has the engine. It sends every step to the others through pipes, then all run it, meeting in the collectives
(NCCL between GPUs, Gloo over the loopback interface between CPU processes).
"""

__all__ = ["LeadingRunner", "open_ranks"]

import os
import pickle
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from perfmodel.errors import PerfmodelError
from perfmodel_executors.models.batch import TokenSegment
from perfmodel_executors.models.decoder import Decoder
from perfmodel_executors.parallel.group import DistributedGroup
from perfmodel_executors.parallel.sharding import check_divisible
from perfmodel_executors.runner import RunnerSetup, StepRunner, build_runner

_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
_Message = tuple[str, object]


class LeadingRunner:
    """Rank 0's runner: broadcasts each call to the other ranks, and runs it."""

    def __init__(self, local: StepRunner, others: Sequence[Connection]) -> None:
        self._local = local
        self._others = others

    @property
    def decoder(self) -> Decoder:
        return self._local.decoder

    def reserve_for(self, segments: Sequence[TokenSegment]) -> None:
        before = self._local.cache.num_blocks
        self._local.reserve_for(segments)
        if self._local.cache.num_blocks > before:
            self._tell(("reserve", self._local.cache.num_blocks))

    def release(self, first_block: int) -> None:
        """Models with states are not shared out over ranks."""
        self._local.release(first_block)

    def run(self, segments: Sequence[TokenSegment], is_warm_up: bool = False) -> list[int]:
        self._tell(("run", (segments, is_warm_up)))
        return self._local.run(segments, is_warm_up)

    def copy_blocks(self, out: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]]) -> None:
        self._tell(("copy", (out, back)))
        self._local.copy_blocks(out, back)

    def _tell(self, message: _Message) -> None:
        content = pickle.dumps(message)
        for other in self._others:
            other.send_bytes(content)


@contextmanager
def open_ranks(setup: RunnerSetup, num_ranks: int = 1) -> Iterator[StepRunner | LeadingRunner]:
    """The runner of one rank, or of the first of `num_ranks`, the others following it until the end of the block.

    Raises PerfmodelError as `build_runner` does, on whichever rank.
    """
    if num_ranks == 1:
        yield build_runner(setup)
        return
    check_divisible(setup.model, num_ranks)  # before processes are started that would say it too
    spawning = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "rendezvous"
        pipes = [spawning.Pipe() for _ in range(num_ranks - 1)]
        workers = [
            spawning.Process(target=_follow, args=(setup, rank, num_ranks, meeting, pipe[1]), daemon=True)
            for rank, pipe in enumerate(pipes, start=1)
        ]
        for worker, (_, theirs) in zip(workers, pipes, strict=True):
            worker.start()
            theirs.close()
        others = [ours for ours, _ in pipes]
        try:
            yield _lead(setup, num_ranks, meeting, others)
        finally:
            for other in others:
                other.close()
            for worker in workers:
                worker.join(10)
                if worker.is_alive():  # left behind in a collective that rank 0 did not enter
                    worker.terminate()
            if dist.is_initialized():
                dist.destroy_process_group()


def _lead(setup: RunnerSetup, num_ranks: int, meeting: Path, others: Sequence[Connection]) -> LeadingRunner:
    group = _join(setup, 0, num_ranks, meeting)
    local = build_runner(setup, group)
    for rank, other in enumerate(others, start=1):
        try:
            failure = other.recv()
        except EOFError:
            raise RuntimeError(f"rank {rank} ended before it was ready; its error is above.") from None
        if failure is not None:
            raise failure
    return LeadingRunner(local, others)


def _follow(setup: RunnerSetup, rank: int, num_ranks: int, meeting: Path, leader: Connection) -> None:
    """What a spawned rank does: set up, then run rank 0's calls until it hangs up."""
    torch.set_num_threads(1)
    if setup.device.type == "cuda":
        setup = replace(setup, device=torch.device("cuda", rank))
    try:
        group = _join(setup, rank, num_ranks, meeting)
        runner = build_runner(setup, group)
    except PerfmodelError as error:
        leader.send(error)
        return
    leader.send(None)
    while True:
        try:
            what, argument = leader.recv()
        except EOFError:
            break
        if what == "reserve":
            runner.cache.reserve(argument)
        elif what == "copy":
            runner.copy_blocks(*argument)
        else:
            runner.run(*argument)
    dist.destroy_process_group()


def _join(setup: RunnerSetup, rank: int, num_ranks: int, meeting: Path) -> DistributedGroup:
    backend = _BACKENDS[setup.device.type]
    if setup.device.type == "cuda":
        torch.cuda.set_device(setup.device)
    if backend == "gloo" and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, init_method=meeting.as_uri(), rank=rank, world_size=num_ranks)
    return DistributedGroup()
