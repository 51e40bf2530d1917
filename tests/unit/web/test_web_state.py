"""What an address may say, and that it says the same again."""

import base64
import re
import shlex
import zlib
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")

from perfmodel.commands.runs import ExplainRequest, MemoryRequest, SimulateRequest
from perfmodel.commands.searches import PlanRequest, WhatIfRequest
from perfmodel.errors import SpecError
from perfmodel.web.state import FLAGS, MAX_DEPLOYMENTS, PageState, packed, read_state, request_of, unpacked

KEYS = (*FLAGS, "seed", "batch", "context", "engine.max_num_seqs", "traffic.arrivals.rate", "slo.ttft_ms", "price.usd")
VALUES = st.text("aZ09 -.,:=&%+#?/ü漢🙂\"'<>", min_size=1, max_size=20).filter(
    lambda text: text == text.strip() and not text.startswith("-")
)
FIELDS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=8).map(lambda found: tuple(found.items()))
STATES = st.builds(PageState, FIELDS, st.lists(st.builds(PageState, FIELDS), max_size=MAX_DEPLOYMENTS - 1).map(tuple))


def plain(state):
    return PageState(state.fields, tuple(other.alone() for other in state.others))


@given(STATES)
def test_an_address_says_the_state_that_it_was_made_of(state):
    assert read_state(state.query) == plain(state)
    assert read_state(read_state(state.query).query) == read_state(state.query)


@given(STATES, st.sampled_from([MemoryRequest, ExplainRequest, SimulateRequest, WhatIfRequest, PlanRequest]))
def test_the_line_of_a_question_is_its_arguments(state, kind):
    options = (
        {"grid": True, "vary": ("a", "b")} if kind is WhatIfRequest else {"batch": 8} if kind is ExplainRequest else {}
    )
    question = request_of(kind, state, "engine.block_size=16", **options)
    assert shlex.split(question.line) == ["perfmodel", *question.arguments]
    assert all(isinstance(word, str) and word for word in question.arguments)


@given(st.text(max_size=300))
def test_any_query_is_a_state_or_a_refusal(query):
    try:
        state = read_state(query)
    except SpecError as error:
        said = str(error)
    else:
        said = ""
        assert read_state(state.query) == state
    assert said.isprintable()
    assert len(said) < 600


@given(STATES)
def test_a_shared_query_restores_the_address_exactly(state):
    query = state.query
    link = packed(query)
    assert unpacked(link) == query
    assert len(link) <= len(query)
    assert read_state(link) == read_state(query)
    assert link == query or re.fullmatch(r"z=[A-Za-z0-9_-]+", link)


def test_a_long_query_is_shared_compressed_and_a_short_one_as_it_is():
    long = "model=llama-3.1-70b&" + "&".join(f"engine.field_{number}=1" for number in range(60))
    assert len(packed(long)) < 0.5 * len(long)
    assert packed("model=llama-3.1-70b&hardware=h200") == "model=llama-3.1-70b&hardware=h200"


def test_a_link_that_was_cut_off_or_changed_or_swells_is_refused():
    link = packed("model=" + "&engine.max_num_seqs=8" * 100)
    middle = len(link) // 2
    other = "A" if link[middle] != "A" else "B"
    for broken in (link[:-9], f"{link[:middle]}{other}{link[middle + 1 :]}", "z=", "z=!!!!", f"{link}&rate=2"):
        with pytest.raises(SpecError, match="cut off or changed"):
            read_state(broken)
    bomb = base64.urlsafe_b64encode(zlib.compress(b"a" * 10_000_000, 9)).decode().rstrip("=")
    assert len(bomb) < 16_000
    with pytest.raises(SpecError, match="16,001 characters"):
        read_state(f"z={bomb}")


def test_an_empty_field_is_no_field():
    assert read_state("rate=&engine.version=%20&batch=8") == PageState((("batch", "8"),))


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("rate=1&rate=2", "twice"),
        ("model=%00", "printable"),
        ("model=a%0Ab", "printable"),
        ("model=%FF", "UTF-8"),
        ("model=" + "a" * 5000, "4,000"),
        ("model=" + "a" * 20_000, "16,000"),
        ("&".join(f"engine.a{n}=1" for n in range(200)), "120"),
        ("&".join("with=" for _ in range(4)), "deployments"),
        ("scenario=-", "scenario"),
        ("scenario=/etc/passwd", "scenario"),
        ("scenario=../x", "scenario"),
        ("scenario=%7B%22name%22%3A1%7D", "scenario"),
        ("model=--help", "minus"),
        ("hardware=-x", "minus"),
    ],
)
def test_what_is_no_state_is_refused_in_words(query, said):
    with pytest.raises(SpecError, match="(?i)" + said):
        read_state(query)


@pytest.mark.parametrize("key", ["x", "__class__.x", "engine.__class__.x[0]", "Engine.x", "token", "hardwar"])
def test_an_unknown_key_is_left_out_and_named_and_the_rest_stays(key):
    state = read_state(f"model=llama-3.1-70b&{quote(key)}=1&batch=8&with={quote(quote(key) + '=1')}")
    assert state.fields == (("model", "llama-3.1-70b"), ("batch", "8"))
    (said,) = state.left_out
    assert f"unknown key {key!r}" in said
    assert ("Did you mean 'hardware'" in said) == (key == "hardwar")
    assert key not in state.query


def test_deployments_within_deployments_are_left_out_and_cannot_go_deep():
    query = "batch=1"
    for _ in range(30):
        query = "with=" + quote(query)
    try:
        state = read_state(query)
    except SpecError:
        return
    assert all(not other.others for other in state.others)


def test_a_scenario_takes_flags_as_overrides():
    question = request_of(
        SimulateRequest, read_state("scenario=llama-3.1-8b-a100&rate=3&ttft=1s&engine.max_num_seqs=8")
    )
    assert question.arguments[:2] == ["simulate", "llama-3.1-8b-a100"]
    assert set(question.overrides) == {"traffic.arrivals.rate=3", "slo.ttft_ms=1s", "engine.max_num_seqs=8"}


def test_a_value_that_reads_like_a_switch_stays_a_value():
    assert request_of(MemoryRequest, read_state("model=yes")).arguments[:3] == ["memory", "--model", "yes"]
