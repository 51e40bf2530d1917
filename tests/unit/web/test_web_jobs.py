"""Work in the background: how far it is, how it is stopped, and what becomes of it when its process does not."""

import asyncio
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")
sys.path.insert(0, str(Path(__file__).parent))

from web_works import work

from perfmodel.commands.runs import SimulateRequest
from perfmodel.errors import SpecError
from perfmodel.web import jobs as jobs_module
from perfmodel.web.jobs import JobQueue
from perfmodel.web.results import ResultCache


def named(name):
    return SimulateRequest(name)


@asynccontextmanager
async def started():
    known = ResultCache(lambda question: work(question, None))
    jobs = JobQueue(known, work)
    await jobs.start()
    try:
        yield jobs, known
    finally:
        await jobs.close()


async def ended(job, limit_s=30):
    await asyncio.wait_for(job.ended.wait(), limit_s)
    return job


async def running(job, limit_s=30):
    until = time.monotonic() + limit_s
    while job.state == "waiting" or (job.request.scenario.startswith("steps") and job.total is None):
        assert time.monotonic() < until
        await asyncio.sleep(0.01)


def test_work_stops_once_no_open_page_waits_for_it(monkeypatch):
    """Closing the last page stops its work; reloading, a second waiting page and a hidden tab keep it."""
    monkeypatch.setattr(jobs_module, "_GRACE_S", 0.6)
    monkeypatch.setattr(jobs_module, "_SWEEP_S", 0.05)

    async def whole():
        async with started() as (jobs, _):
            plan = jobs.begin(named("steps:90000"), "long", "first/plan/choice")
            await running(plan)
            jobs.depart("first")
            jobs.join(plan, "reloaded/plan/choice")  # reloaded, under another id
            await asyncio.sleep(1.0)
            assert (plan.readers, plan.state) == ({"reloaded/plan/choice"}, "running")
            jobs.join(plan, "other/plan/choice")
            jobs.depart("reloaded")
            await asyncio.sleep(1.0)
            assert plan.state == "running"  # the other still waits
            jobs.depart("other")
            jobs.see("other")  # it did not close after all
            await asyncio.sleep(1.0)
            assert plan.state == "running"
            monkeypatch.setattr(jobs_module, "_LEASE_S", 0.2)  # as after a killed browser, which sends nothing
            jobs.see("other")
            assert (await ended(plan, 10)).state == "stopped"
            assert jobs.last(plan.request) is None

    asyncio.run(whole())


def test_jobs_run_stop_refuse_and_outlive_their_processes():
    """One life of two workers, since each takes a second to start."""

    async def whole():
        async with started() as (jobs, known):
            await _is_done_once(jobs, known)
            await _is_stopped(jobs, known)
            await _is_refused(jobs, known)
            await _is_broken(jobs)
            await _is_superseded(jobs)
            await _has_room_for_so_many(jobs)

    asyncio.run(whole())


async def _is_done_once(jobs, known):
    first, second = jobs.begin(named("steps:5"), "quick"), jobs.begin(named("steps:5"), "quick")
    assert first is second  # two pages that ask the same
    long = jobs.begin(named("steps:6"), "long")  # beside it
    assert (await ended(first)).state == "done"
    assert (await ended(long)).state == "done"
    shown, other = known.find(first.request), known.find(long.request)
    assert shown.data["name"] == "steps:5"
    assert shown.data["process"] != other.data["process"]


async def _is_stopped(jobs, known):
    counting, waiting = jobs.begin(named("steps:100000"), "quick"), jobs.begin(named("steps:1"), "quick")
    await running(counting)
    assert (counting.what, counting.total) == ("counting", 100000)
    assert waiting.state == "waiting"
    jobs.stop(waiting)
    assert waiting.state == "stopped"
    jobs.stop(counting)
    assert jobs.begin(counting.request, "quick") is not counting  # asked anew while the old one ends
    assert (await ended(counting, 5)).state == "stopped"
    again = jobs.last(counting.request)
    jobs.stop(again)
    await ended(again, 5)
    assert known.find(counting.request) is None


async def _is_refused(jobs, known):
    refused = await ended(jobs.begin(named("refuse"), "quick"))
    assert (refused.state, refused.message) == ("refused", "refuse: got 1; expected 2.")
    with pytest.raises(SpecError, match="expected 2"):
        known.find(named("refuse"))


async def _is_broken(jobs):
    short = await ended(jobs.begin(named("memory"), "quick"))
    assert (short.state, "not enough memory" in short.message) == (
        "failed",
        True,
    )  # to be asked again: there may be more
    broken = await ended(jobs.begin(named("break"), "quick"))
    assert broken.state == "failed"
    assert "secret" not in broken.message  # what broke is for the log
    dead = await ended(jobs.begin(named("end"), "quick"))
    assert (dead.state, "ask again" in dead.message) == ("failed", True)
    assert (await ended(jobs.begin(named("steps:2"), "quick"))).state == "done"  # by another process
    hung = jobs.begin(named("hang"), "quick")
    await running(hung)
    jobs.stop(hung)
    assert (await ended(hung, 10)).state == "stopped"
    assert (await ended(jobs.begin(named("steps:3"), "quick"))).state == "done"


async def _is_superseded(jobs):
    """A slider that moves on leaves no work behind, unless another page waits for it."""
    mine = jobs.begin(named("steps:90000"), "quick", "page-1/traffic/curve")
    shared = jobs.begin(named("steps:90001"), "quick", "page-1/traffic/curve")
    jobs.begin(named("steps:90001"), "quick", "page-2/traffic/curve")
    jobs.leave("page-1/traffic/curve", [named("steps:90002")])
    assert (await ended(mine, 10)).state == "stopped"
    assert jobs.last(mine.request) is None  # so that a page which comes back asks anew
    assert not shared.is_stopping
    jobs.leave("page-2/traffic/curve", [])
    assert (await ended(shared, 10)).state == "stopped"


async def _has_room_for_so_many(jobs):
    most = jobs_module._MAX_WAITING
    first = jobs.begin(named("steps:80000"), "quick")
    await running(first)
    queue = [jobs.begin(named(f"steps:{n}"), "quick") for n in range(1, most + 1)]
    with pytest.raises(SpecError, match="wait already"):
        jobs.begin(named("steps:9"), "quick") and jobs.begin(named("one more"), "quick")
    jobs.stop(queue[0])
    one_more = jobs.begin(named("one more"), "quick")
    for each in (*queue, one_more):
        jobs.stop(each)
    long = [jobs.begin(named(f"a{n}"), "long") for n in range(most)]
    for _ in range(12):
        for each in long:
            jobs.stop(each)
        long = [jobs.begin(named(f"a{n}"), "long") for n in range(most)]
    assert jobs.last(first.request) is first  # what runs is not forgotten, however much passes by
    jobs.stop(first)
    assert (await ended(first, 10)).state == "stopped"
