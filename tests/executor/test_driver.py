"""The executed driver: idle jumps, waits, and the wall clock."""

import time

import pytest

pytest.importorskip("torch", reason="the executor needs torch")

from perfmodel.engine import KVBlockManager, Outcome, Request, Scheduler, SchedulerConfig, ServeLoop
from perfmodel_executors.driver import VirtualClock, WallClock, plain_arrivals, serve


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


def run(engine, requests, duration=10, **options):
    finished, records = [], []
    arrivals = plain_arrivals(requests, **options)
    end = serve(engine, FixedBackend(duration), arrivals, finished.append, records.append)
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


def test_a_closed_loop_sends_the_next_request_after_an_answer_and_a_pause():
    finished, _, _ = run(loop(), [Request(i, 0, 8, 1) for i in range(4)], concurrency=2, think_time=lambda i: 3 + i)
    assert [(r.request_id, r.arrival) for r in finished] == [(0, 0), (1, 0), (2, 13), (3, 14)]


def test_the_wall_clock_waits_for_arrivals_and_takes_its_own_time():
    engine, backend = loop(), FixedBackend(10**15)  # what a backend says it took does not move the wall
    started = time.monotonic()
    serve(
        engine,
        backend,
        plain_arrivals([Request(0, 20 * 10**9, 8, 2)]),
        lambda r: None,
        lambda r: None,
        clock=WallClock(),
    )
    assert 0.02 <= time.monotonic() - started < 5
    assert backend.plans == 2


def test_a_virtual_clock_never_goes_back():
    clock = VirtualClock()
    clock.pass_step(10)
    clock.wait_until(4)
    assert clock.now == 10
