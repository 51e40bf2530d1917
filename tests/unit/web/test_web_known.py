"""Answers that are remembered: which, how many, and by several threads at a time."""

from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import pytest

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")

from perfmodel.commands.runs import MemoryRequest
from perfmodel.errors import SpecError
from perfmodel.web import results as known_module
from perfmodel.web.results import QueryResult, ResultCache


class Counted:
    """Answers with the question's name, or refuses, and counts."""

    def __init__(self, size=10):
        self.asked, self.size, self.lock, self.at_once, self.most = [], size, Lock(), 0, 0

    def __call__(self, question):
        with self.lock:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        self.asked.append(question.scenario)
        with self.lock:
            self.at_once -= 1
        if question.scenario.startswith("no"):
            raise SpecError(f"{question.scenario}: refused.")
        return QueryResult(question, {"name": question.scenario, "weight": "x" * self.size}, {"blocks": []})


def named(name):
    return MemoryRequest(name)


def test_an_answer_is_worked_out_once_by_however_many_threads():
    work = Counted()
    known = ResultCache(work)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(known.answer, [named(f"s{n % 5}") for n in range(100)]))
    assert sorted(work.asked) == [f"s{n}" for n in range(5)]
    assert work.most == 1
    assert [each.data["name"] for each in found] == [f"s{n % 5}" for n in range(100)]


def test_refusals_are_remembered_by_their_sentence_until_they_are_forgotten():
    work = Counted()
    known = ResultCache(work)
    for _ in range(3):
        with pytest.raises(SpecError, match="no-1: refused"):
            known.answer(named("no-1"))
    with pytest.raises(SpecError, match="no-1: refused"):
        known.find(named("no-1"))
    known.answer(named("s"))
    known.forget_refusals()
    assert known.find(named("no-1")) is None
    assert known.find(named("s")) is not None
    assert work.asked == ["no-1", "s"]


def test_what_was_not_asked_for_longest_goes_first(monkeypatch):
    monkeypatch.setattr(known_module, "_MOST", 3)
    known = ResultCache(Counted())
    for name in "abc":
        known.answer(named(name))
    known.answer(named("a"))
    known.answer(named("d"))
    assert [known.find(named(name)) is not None for name in "abcd"] == [True, False, True, True]


def test_answers_are_bounded_by_their_bytes_and_the_last_one_stays():
    known = ResultCache(Counted(size=1000), most_bytes=5000)
    for n in range(50):
        known.answer(named(f"s{n}"))
    kept = [n for n in range(50) if known.find(named(f"s{n}")) is not None]
    assert kept == list(range(50 - len(kept), 50))
    assert 2 <= len(kept) <= 5
    large = ResultCache(Counted(size=100_000), most_bytes=10)
    large.answer(named("large"))
    assert large.find(named("large")) is not None


def test_an_answer_that_is_kept_twice_counts_once():
    known, work = ResultCache(Counted(), most_bytes=10_000), Counted(1000)
    for _ in range(100):
        known.keep(named("s"), work(named("s")))
    known.keep(named("t"), work(named("t")))
    assert known.find(named("s")) is not None
