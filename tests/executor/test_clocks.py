"""The executed clock: idle jumps, arrivals within steps, and the wall's time."""

import time

import pytest

pytest.importorskip("torch", reason="the executor needs torch")

from perfmodel.engine import KVBlockManager, Outcome, Request, Scheduler, SchedulerConfig, ServeLoop
from perfmodel.sim.replica.lockstep import Lockstep
from perfmodel.sim.replica.replica import EngineRank
from perfmodel.sim.traffic.clients import OpenLoopClient
from perfmodel_executors.clocks import LiveBackend, WallClock, serve


class FixedBackend:
    def __init__(self, duration):
        self.duration = duration
        self.plans = 0

    def execute(self, plan):
        self.plans += 1
        return Outcome(self.duration)


def loop(**changes):
    config = SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64} | changes)
    return ServeLoop(Scheduler(config, KVBlockManager(100, config.block_size)), async_scheduling=False)


def run(engine, requests, duration=10):
    finished, records = [], []
    end = serve(engine, FixedBackend(duration), requests, finished.append, records.append)
    return finished, records, end


def test_idle_time_is_jumped_over():
    finished, records, end = run(loop(), [Request(0, 5, 8, 2), Request(1, 1000, 8, 1)])
    assert [(r.start, r.end) for r in records] == [(5, 15), (15, 25), (1000, 1010)]
    assert [(r.first_token_at, r.finished_at) for r in finished] == [(15, 25), (1010, 1010)]
    assert end == 1010


def test_what_arrives_during_a_step_runs_in_the_next():
    _, records, _ = run(loop(), [Request(0, 0, 8, 3), Request(1, 4, 8, 1)])
    assert [(r.num_tokens, r.num_waiting) for r in records] == [(8, 1), (9, 0), (1, 0)]


def test_a_dynamic_batch_waits_for_its_timeout():
    _, records, _ = run(loop(batching="dynamic", batch_timeout=50), [Request(0, 3, 8, 1), Request(1, 20, 8, 1)])
    assert [(r.start, r.num_tokens) for r in records] == [(53, 16)]


def test_the_wall_clock_waits_for_arrivals_and_takes_its_own_time():
    clock, backend, records = WallClock(), FixedBackend(10**15), []  # what a backend says does not move the wall
    live, started = LiveBackend(backend, clock), time.monotonic()
    lockstep = Lockstep(clock.env, live)
    rank = EngineRank(lockstep, 0, loop(), lambda *_: None, lambda _, record: records.append(record))
    OpenLoopClient(clock.env, iter([Request(0, 20 * 10**9, 8, 2)]), lambda _: rank)
    clock.run()
    assert 0.02 <= time.monotonic() - started < 5
    assert backend.plans == 2
    assert 20 * 10**9 <= records[0].start < records[0].end == records[1].start < records[1].end < 5 * 10**12
