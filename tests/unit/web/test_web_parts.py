"""Parts of pages: what stays while one drags, what waits for the hand to rest, what comes when it is opened."""

import re

import pytest

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")

from web_site import Page, say_nothing_of_here

from perfmodel.commands.catalog import HardwareShowRequest
from perfmodel.commands.runs import ExplainRequest, MemoryRequest, SimulateRequest
from perfmodel.errors import SpecError
from perfmodel.web.state import read_state
from perfmodel.web.views import VIEWS, find_part, find_view

MODEL = "model=llama-3.1-8b&hardware=h100"
OPENED = [
    ("step", "decode", "explain --model llama-3.1-8b --hardware h100 --batch 8 --context 4096"),
    ("step", "prefill", "explain --model llama-3.1-8b --hardware h100 --prefill 2048"),
    ("memory", "plan", "memory --model llama-3.1-8b --hardware h100"),
    ("deployment", "device", "hardware show h100"),
]


def kept(response):
    """What htmx leaves in its place, by its id."""
    return {
        given["id"].split("-")[0]: given["id"]
        for _, given in Page(response.body.decode()).tags
        if given.get("hx-preserve") == "true"
    }


def test_what_asks_the_same_stays_and_what_asks_otherwise_does_not(site):
    first, second = (kept(site.get(f"/step?{MODEL}&batch={batch}&context=4096")) for batch in (8, 9))
    assert first["prefill"] == second["prefill"]
    assert first["decode"] != second["decode"]
    again = kept(site.get(f"/step?{MODEL}&batch=8&context=4096&low=3"))  # of the rates that another view shows
    assert again == first
    other = kept(site.get(f"/step?{MODEL}&batch=8&context=4096&engine.enforce_eager=true"))
    assert not set(other.values()) & set(first.values())


def test_simulations_begin_at_once_with_a_page_and_after_a_pause_while_one_drags(site, nobody_works):
    address = f"/step?{MODEL}&batch=77"
    triggers = [
        given["hx-trigger"]
        for response in (
            site.get(address),
            site.get(address, ("hx-target", "answers")),
            site.get("/part/step/curve?batch=78"),
        )
        for _, given in Page(response.body.decode()).tags
        if "/ask/step/curve" in given.get("hx-post", "")
    ]
    assert triggers == ["load", "load delay:150ms", "load"]


@pytest.mark.parametrize(("view", "part", "line"), OPENED, ids=lambda each: each.split()[0])
def test_all_of_an_answer_comes_when_it_is_opened(view, part, line, site, nobody_works):
    address = f"{view}/{part}?{MODEL}&batch=8&context=4096"
    closed = site.get(f"/part/{address}").body.decode()
    asked = [given["hx-get"] for tag, given in Page(closed).tags if given.get("class") == "rest"]
    assert asked == [f"/rest/{address}"]
    opened = site.get(f"/rest/{address}")
    assert opened.status == 200
    say_nothing_of_here(opened)
    assert told(line) <= words(opened.body.decode())
    assert not told(line) <= words(closed)
    if view == "step":  # whose plots stand above
        assert not Page(opened.body.decode()).plots
        assert Page(closed).plots


def test_what_was_answered_and_is_forgotten_is_asked_anew(site):
    from perfmodel.web.jobs import BackgroundJob

    question = find_part(find_view("step"), "curve").ask(read_state(MODEL + "&batch=5"))[0]
    for state, said in (("done", ""), ("refused", "no room."), ("stopped", "")):
        job = BackgroundJob(1, question, "quick")
        job.end(state, said)
        site.desk.jobs._jobs[1] = job
        html = site.get(f"/part/step/curve?{MODEL}&batch=5").body.decode()
        assert ("Stopped." in html) == (state == "stopped")
        assert ('hx-trigger="load"' in html) == (state != "stopped")
    site.desk.jobs._jobs.clear()


def test_the_badge_of_a_card_states_the_errors(site):
    """They equal the output of the command shown below it."""
    from perfmodel.web.results import run_query

    shown = run_query(MemoryRequest(flags=(("model", "llama-3.1-8b"), ("hardware", "h100"))))
    badge = shown.data["trust"]["badge"]
    assert "rows like this: " in badge
    assert f">{badge}</span>" in site.get(f"/part/memory/plan?{MODEL}").body.decode()


def test_a_page_that_is_loaded_again_asks_again_what_was_refused(site):
    (question,) = find_part(find_view("memory"), "plan").ask(read_state(MODEL + "&engine.max_num_seqs=9"))
    site.desk.known.keep(question, SpecError("nothing is known of this model yet."))
    address = f"/memory?{MODEL}&engine.max_num_seqs=9"
    assert "nothing is known" in site.get(f"/part/memory/plan?{MODEL}&engine.max_num_seqs=9").body.decode()
    assert "nothing is known" not in site.get(address).body.decode()


def told(line):
    """The cells of all tables and facts of a command's document."""
    from perfmodel.web.results import run_query

    command, *words_ = line.split()
    if command == "hardware":
        question = HardwareShowRequest(words_[1])
    else:
        flags = tuple((words_[n][2:], words_[n + 1]) for n in range(0, len(words_), 2))
        sizes = {name: int(value) for name, value in flags if name in ("batch", "context", "prefill")}
        kinds = {"memory": MemoryRequest, "explain": ExplainRequest, "simulate": SimulateRequest}
        question = kinds[command](flags=tuple(pair for pair in flags if pair[0] not in sizes), **sizes)
    found = set()
    for block in run_query(question).blocks("table", "facts"):
        cells = [cell for row in block.get("rows", []) for cell in row]
        cells += [fact["value"] for _, facts in block.get("groups", []) for fact in facts]
        found |= words(" ".join(cell for cell in cells if isinstance(cell, str)))
    return found


def words(html):
    return set(re.sub(r"<[^>]*>", " ", html).replace("&#39;", "'").replace("&lt;", "<").replace("&gt;", ">").split())


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_to_open_what_nobody_worked_out_begins_no_work(view, site, nobody_works):
    for part in view.parts:
        response = site.get(f"/rest/{view.name}/{part.name}?{MODEL}&rate=7.31&batch=3")
        assert response.status in (200, 422)
        say_nothing_of_here(response)
