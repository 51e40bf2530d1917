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

from perfmodel.errors import SpecError
from perfmodel.web import errands as errands_module
from perfmodel.web.errands import Errands
from perfmodel.web.known import Known
from perfmodel.web.questions import Question


def named(name):
    return Question("simulate", name)


@asynccontextmanager
async def started():
    known = Known(lambda question: work(question, None))
    errands = Errands(known, work)
    await errands.start()
    try:
        yield errands, known
    finally:
        await errands.close()


async def ended(errand, limit_s=30):
    await asyncio.wait_for(errand.ended.wait(), limit_s)
    return errand


async def running(errand, limit_s=30):
    until = time.monotonic() + limit_s
    while errand.state == "waiting" or (errand.question.scenario.startswith("steps") and errand.total is None):
        assert time.monotonic() < until
        await asyncio.sleep(0.01)


def test_work_stops_once_no_open_page_waits_for_it(monkeypatch):
    """Closing the last page stops its work; reloading, a second waiting page and a hidden tab keep it."""
    monkeypatch.setattr(errands_module, "_GRACE_S", 0.6)
    monkeypatch.setattr(errands_module, "_SWEEP_S", 0.05)

    async def whole():
        async with started() as (errands, _):
            plan = errands.begin(named("steps:90000"), "long", "first/plan/choice")
            await running(plan)
            errands.depart("first")
            errands.join(plan, "reloaded/plan/choice")  # reloaded, under another id
            await asyncio.sleep(1.0)
            assert (plan.readers, plan.state) == ({"reloaded/plan/choice"}, "running")
            errands.join(plan, "other/plan/choice")
            errands.depart("reloaded")
            await asyncio.sleep(1.0)
            assert plan.state == "running"  # the other still waits
            errands.depart("other")
            errands.see("other")  # it did not close after all
            await asyncio.sleep(1.0)
            assert plan.state == "running"
            monkeypatch.setattr(errands_module, "_LEASE_S", 0.2)  # as after a killed browser, which sends nothing
            errands.see("other")
            assert (await ended(plan, 10)).state == "stopped"
            assert errands.last(plan.question) is None

    asyncio.run(whole())


def test_errands_run_stop_refuse_and_outlive_their_processes():
    """One life of two workers, since each takes a second to start."""

    async def whole():
        async with started() as (errands, known):
            await _is_done_once(errands, known)
            await _is_stopped(errands, known)
            await _is_refused(errands, known)
            await _is_broken(errands)
            await _is_superseded(errands)
            await _has_room_for_so_many(errands)

    asyncio.run(whole())


async def _is_done_once(errands, known):
    first, second = errands.begin(named("steps:5"), "quick"), errands.begin(named("steps:5"), "quick")
    assert first is second  # two pages that ask the same
    long = errands.begin(named("steps:6"), "long")  # beside it
    assert (await ended(first)).state == "done"
    assert (await ended(long)).state == "done"
    shown, other = known.find(first.question), known.find(long.question)
    assert shown.data["name"] == "steps:5"
    assert shown.data["process"] != other.data["process"]


async def _is_stopped(errands, known):
    counting, waiting = errands.begin(named("steps:100000"), "quick"), errands.begin(named("steps:1"), "quick")
    await running(counting)
    assert (counting.what, counting.total) == ("counting", 100000)
    assert waiting.state == "waiting"
    errands.stop(waiting)
    assert waiting.state == "stopped"
    errands.stop(counting)
    assert errands.begin(counting.question, "quick") is not counting  # asked anew while the old one ends
    assert (await ended(counting, 5)).state == "stopped"
    again = errands.last(counting.question)
    errands.stop(again)
    await ended(again, 5)
    assert known.find(counting.question) is None


async def _is_refused(errands, known):
    refused = await ended(errands.begin(named("refuse"), "quick"))
    assert (refused.state, refused.said) == ("refused", "refuse: found 1, allowed 2.")
    with pytest.raises(SpecError, match="allowed 2"):
        known.find(named("refuse"))


async def _is_broken(errands):
    short = await ended(errands.begin(named("memory"), "quick"))
    assert (short.state, "not enough memory" in short.said) == ("failed", True)  # to be asked again: there may be more
    broken = await ended(errands.begin(named("break"), "quick"))
    assert broken.state == "failed"
    assert "secret" not in broken.said  # what broke is for the log
    dead = await ended(errands.begin(named("end"), "quick"))
    assert (dead.state, "ask again" in dead.said) == ("failed", True)
    assert (await ended(errands.begin(named("steps:2"), "quick"))).state == "done"  # by another process
    hung = errands.begin(named("hang"), "quick")
    await running(hung)
    errands.stop(hung)
    assert (await ended(hung, 10)).state == "stopped"
    assert (await ended(errands.begin(named("steps:3"), "quick"))).state == "done"


async def _is_superseded(errands):
    """A slider that moves on leaves no work behind, unless another page waits for it."""
    mine = errands.begin(named("steps:90000"), "quick", "page-1/traffic/curve")
    shared = errands.begin(named("steps:90001"), "quick", "page-1/traffic/curve")
    errands.begin(named("steps:90001"), "quick", "page-2/traffic/curve")
    errands.leave("page-1/traffic/curve", [named("steps:90002")])
    assert (await ended(mine, 10)).state == "stopped"
    assert errands.last(mine.question) is None  # so that a page which comes back asks anew
    assert not shared.is_stopping
    errands.leave("page-2/traffic/curve", [])
    assert (await ended(shared, 10)).state == "stopped"


async def _has_room_for_so_many(errands):
    most = errands_module._MOST_WAITING
    first = errands.begin(named("steps:80000"), "quick")
    await running(first)
    queue = [errands.begin(named(f"steps:{n}"), "quick") for n in range(1, most + 1)]
    with pytest.raises(SpecError, match="wait already"):
        errands.begin(named("steps:9"), "quick") and errands.begin(named("one more"), "quick")
    errands.stop(queue[0])
    one_more = errands.begin(named("one more"), "quick")
    for each in (*queue, one_more):
        errands.stop(each)
    long = [errands.begin(named(f"a{n}"), "long") for n in range(most)]
    for _ in range(12):
        for each in long:
            errands.stop(each)
        long = [errands.begin(named(f"a{n}"), "long") for n in range(most)]
    assert errands.last(first.question) is first  # what runs is not forgotten, however much passes by
    errands.stop(first)
    assert (await ended(first, 10)).state == "stopped"
