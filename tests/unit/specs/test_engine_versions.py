"""Versions of engines: as their `--version` prints them, and which described one stands for each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import SpecError
from perfmodel.specs.engine.versions import choose_version, parse_version

DESCRIBED = ("0.9", "0.12", "0.14", "0.21", "0.30")


# Printed by engines: vLLM's wheels and nightlies, TensorRT-LLM's release candidates, SGLang's post-releases and images.
@pytest.mark.parametrize(
    ("text", "release", "kind"),
    [
        ("0.21.0", (0, 21), "release"),
        ("v0.9.2", (0, 9, 2), "release"),
        ("0.10.0", (0, 10), "release"),
        ("0.14.1+cu129", (0, 14, 1), "release"),
        ("0.5.9.post1", (0, 5, 9), "post-release"),
        ("1.3.0rc24", (1, 3), "pre-release"),
        ("1.1.0rc2.post2", (1, 1), "pre-release"),
        ("1.1.0-dev.2", (1, 1), "nightly"),
        ("0.11.1rc2.dev200+g250fb1b8e.d20251021", (0, 11, 1), "nightly"),
        ("nightly-5b8c30d62b754b57", (), "nightly"),
        ("nightly-dev-20260216-d3bae71e", (), "nightly"),
        ("main", (), "nightly"),
    ],
)
def test_what_engines_print_is_read(text, release, kind):
    assert parse_version(text) == (release, kind)


@pytest.mark.parametrize("text", ["", "newest", "0.x", "vllm", "0..1"])
def test_what_is_no_version_is_refused_with_an_example(text):
    with pytest.raises(SpecError, match=r"not a version; write it as .* 0\.21\.0"):
        choose_version(text, DESCRIBED)


@pytest.mark.parametrize(
    ("asked", "described", "age"),
    [
        ("0.9.0", "0.9", "described"),
        ("0.10", "0.9", "described"),  # a number, not a decimal fraction: after 0.9
        ("0.13.0", "0.12", "described"),
        ("0.14.0.post1", "0.14", "described"),
        ("0.21.0rc1", "0.21", "described"),  # cut from the release's code
        ("0.30.2", "0.30", "described"),  # a patch of a version that is described
        ("0.31.0", "0.30", "newer"),
        ("1.0", "0.30", "newer"),
        ("0.8.5", "0.9", "older"),
        ("0.31.0.dev17+gabc", "0.30", "described"),
        ("nightly", "0.30", "described"),
    ],
)
def test_the_last_described_at_or_before_stands_for_a_version(asked, described, age):
    chosen = choose_version(asked, reversed(DESCRIBED))  # in whatever order the file has them
    assert (chosen.asked, chosen.described, chosen.age) == (asked, described, age)


@pytest.mark.parametrize(
    ("asked", "words"),
    [("0.11", "0.11 has the rules of 0.9.1"), ("0.9.1", ""), ("0.9.1.post1", ""), ("0.12.3", ""), (None, "")],
)
def test_another_minor_version_whose_rules_stand_in_is_named(asked, words):
    said = choose_version(asked, ["0.9.1", "0.12"]).stand_in
    assert said.startswith(words)
    assert bool(said) == bool(words)


def test_plain_releases_need_no_note_and_all_others_have_one():
    assert [choose_version(text, DESCRIBED).note for text in (None, "0.13.0", "0.21.0", "0.14.0.post1")] == [""] * 4
    for text in ("0.21.0rc1", "0.14.1.dev3", "nightly", "0.8", "0.99"):
        assert text in choose_version(text, DESCRIBED).note


def test_without_a_version_the_newest_is_meant():
    assert choose_version(None, DESCRIBED).described == "0.30"
    assert choose_version(None, ()).described == ""


NUMBERS = st.lists(st.integers(0, 40), min_size=1, max_size=3)


@given(NUMBERS, NUMBERS, st.sets(st.tuples(st.integers(0, 2), st.integers(0, 40)), min_size=1))
def test_a_later_version_is_never_stood_for_by_an_earlier_one(one, other, described):
    known = [".".join(map(str, numbers)) for numbers in described]
    first, second = sorted((one, other))
    chosen = [choose_version(".".join(map(str, numbers)), known).described for numbers in (first, second)]
    places = [parse_version(text)[0] for text in chosen]
    assert places[0] <= places[1]
    assert set(chosen) <= set(known)
