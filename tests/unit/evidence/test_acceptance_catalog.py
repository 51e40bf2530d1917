"""The acceptance catalog: its law against closed forms, what was left out of fits, and published figures."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from perfmodel.cli import app
from perfmodel.errors import SpecError
from perfmodel.evidence.fit.acceptance import LENGTH, DraftSetup, fit_laws, read_acceptance
from perfmodel.evidence.kinds.runs import validate_acceptance
from perfmodel.evidence.observation import Observation
from perfmodel.specs import load_scenario
from perfmodel.specs.engine.speculation import AcceptanceLaw, SpeculativeConfig, load_catalog

FOLDER = Path(__file__).resolve().parents[3] / "measurements/acceptance"
TABLE = FOLDER / "lengths.csv"
GOAL = 0.06  # of the mean accepted length, at draft lengths that no fit has seen
DRAFTS = "engine.speculative_config"


def law(first: float, decay: float) -> AcceptanceLaw:
    return AcceptanceLaw(model="m", method="eagle3", dataset="d", mode="on", first=first, decay=decay, longest=8)


def rows_of(drafter: str, first: float, decay: float, depths: range, dataset: str = "d") -> list[Observation]:
    return [
        Observation(
            f"{drafter} {dataset} {n}",
            DraftSetup(drafter, drafter, "eagle3", dataset, "on", n),
            {LENGTH: law(first, decay).length(n)},
        )
        for n in depths
    ]


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_without_decay_the_law_is_leviathans(depth: int) -> None:
    """Leviathan et al. 2023, equation 1: (1 - a^(k+1)) / (1 - a)."""
    assert law(0.7, 1.0).length(depth) == pytest.approx((1 - 0.7 ** (depth + 1)) / (1 - 0.7))


def test_the_law_by_hand() -> None:
    """0.8, then 0.8 x 0.72, then x 0.648: 1 + 0.8 + 0.576 + 0.373248"""
    assert law(0.8, 0.9).length(3) == pytest.approx(2.749248)


def test_a_fit_finds_the_law_that_made_the_lengths() -> None:
    fitted = fit_laws(rows_of("a", 0.8, 0.95, range(1, 9))).laws["a on d"]
    assert (fitted.first, fitted.decay) == pytest.approx((0.8, 0.95), rel=1e-3)


def test_one_length_has_the_decay_of_the_others() -> None:
    laws = fit_laws(rows_of("a", 0.8, 0.93, range(1, 9)) + rows_of("b", 0.7, 0.93, range(3, 4))).laws
    assert (laws["b on d"].first, laws["b on d"].decay) == pytest.approx((0.7, 0.93), rel=0.01)


@pytest.mark.parametrize("group", ["length", "longer-half", "other-lengths", "model"])
def test_lengths_and_models_left_out_are_predicted_better_than_trivially(group: str) -> None:
    stats = validate_acceptance(TABLE, group=group).metrics[LENGTH]
    assert stats.median_ape < GOAL
    assert stats.trivial_ape is not None
    assert stats.median_ape < stats.trivial_ape


def test_a_domain_multiplies_the_odds_of_all_drafters_alike() -> None:
    """Odds of 4 in code and of 1 in prose: a drafter with odds of 2 in code has some of 1/2 in prose (a prior at no
    difference holds them a little above)."""
    rows = rows_of("a", 0.8, 0.95, range(1, 9), "code") + rows_of("a", 0.5, 0.95, range(1, 9), "prose")
    catalog = fit_laws(rows + rows_of("b", 2 / 3, 0.95, range(1, 9), "code"))
    match = catalog.nearest({"model": "b", "method": "eagle3", "mode": "on", "dataset": "prose"})
    assert not match.is_exact
    assert match.law.first / (1 - match.law.first) == pytest.approx(1 / 2, rel=0.15)
    assert catalog.nearest({"model": "b", "method": "eagle3"}).law.first == pytest.approx(2 / 3, rel=1e-3)


def test_a_drafter_with_many_domains_weighs_as_much_as_one_with_a_single_one() -> None:
    rows = [row for name in "xyz" for row in rows_of("a", 0.5, 0.95, range(1, 9), name)]
    match = fit_laws(rows + rows_of("b", 0.8, 0.95, range(1, 9), "x")).nearest({"method": "eagle3"})
    assert match.law.first == pytest.approx((0.5 * 0.8) ** 0.5, rel=1e-3)


def test_drafters_of_one_dataset_have_no_domains() -> None:
    assert not fit_laws(rows_of("a", 0.8, 0.95, range(1, 9))).domains


def test_domains_of_models_left_out_are_predicted_better_than_by_code_alone() -> None:
    """Before there were domains, code's acceptance was predicted everywhere: 23 % off in the median."""
    code = fit_laws(read_acceptance(TABLE)[0])
    rows, unread = read_acceptance(FOLDER)
    assert not unread
    others = [row for row in rows if row.setup.dataset != "coding"]
    lengths = [code.nearest(row.setup._asdict()).law.length(row.setup.depth) for row in others]
    by_code = [abs(length / row.metrics[LENGTH] - 1) for length, row in zip(lengths, others, strict=True)]
    assert (
        validate_acceptance(FOLDER, group="model").metrics[LENGTH].median_ape < sorted(by_code)[len(by_code) // 2] / 2
    )


def test_the_share_of_second_tokens_that_deepseek_reports() -> None:
    """DeepSeek-V3 technical report, section 5.4.3: 85 to 90 % of second tokens. None of ours is its drafter."""
    catalog = load_catalog()
    match = catalog.nearest({"model": "deepseek-v3", "method": "mtp"})
    assert not match.is_exact
    assert 0.85 * (1 - catalog.model_error) < match.law.first < 0.90 * (1 + catalog.model_error)


def test_lengths_without_the_models_own_token_are_not_read(tmp_path: Path) -> None:
    """One drafted token brings at least the model's own, and at most two."""
    header, first, *_ = TABLE.read_text().splitlines()
    table = tmp_path / "lengths.csv"
    table.write_text("\n".join([header, first.rsplit(",", 1)[0] + ",0.84"]))
    rows, unread = read_acceptance(table)
    assert not rows
    assert "expected 1 to 2" in unread[0][1]


def test_rows_of_another_model_say_what_they_are_predicted_by(tmp_path: Path) -> None:
    table = tmp_path / "lengths.csv"
    table.write_text(TABLE.read_text().replace("minimax", "another"))
    report = validate_acceptance(table)
    assert any("another" in note and "predicted by the mean of" in note for note in report.notes)
    assert "row not in the catalog" in report.by


# ---------------------------------------------------------------- in a scenario


def drafting(**catalog: str) -> SpeculativeConfig:
    block = {"method": "eagle3", "num_speculative_tokens": 3, "acceptance": {"catalog": catalog}}
    config = load_scenario("llama-3.1-8b-a100", [f"{DRAFTS}={json.dumps(block)}"]).engine.speculative_config
    assert config is not None
    return config


def test_the_closed_form_has_the_law_of_the_entry() -> None:
    config = drafting(model="minimax-m3", method="eagle3", dataset="coding", mode="thinking_off")
    assert config.acceptance is not None
    assert config.acceptance.catalog is not None
    assert config.expected_tokens() == pytest.approx(config.acceptance.catalog.match.law.length(3))


def test_a_model_that_is_not_there_gets_the_nearest_aloud() -> None:
    acceptance = drafting(model="any").acceptance
    assert acceptance is not None
    assert acceptance.catalog is not None
    assert acceptance.catalog.method == "eagle3"
    note = acceptance.catalog.note("mistral-7b-v0.3")
    assert "no mistral-7b-v0.3" in note
    assert "nearest" in note


def test_an_unknown_dataset_is_refused_with_those_there_are() -> None:
    with pytest.raises(SpecError, match="got 'poems'; the acceptance catalog has chat, coding, math"):
        drafting(dataset="poems")


@pytest.mark.parametrize("more", [{"method": "ngram"}, {"method": "eagle", "tree": [2, 2]}])
def test_the_catalog_has_chains_of_eagle_only(more: dict[str, object]) -> None:
    block = {"acceptance": {"catalog": {}}, **({} if "tree" in more else {"num_speculative_tokens": 2}), **more}
    with pytest.raises(SpecError, match="its drafts are chains"):
        load_scenario("llama-3.1-8b-a100", [f"{DRAFTS}={json.dumps(block)}"])


def test_the_simulation_names_the_source_and_accepts_as_the_law_says() -> None:
    block = "{method: eagle3, num_speculative_tokens: 3, acceptance: {catalog: {}}}"
    given = [
        "simulate",
        "llama-3.1-8b-a100",
        "--set",
        f"{DRAFTS}={block}",
        "--set",
        "traffic.num_requests=200",
        "--json",
    ]
    answer = json.loads(CliRunner().invoke(app, given).stdout)
    assert any(
        note.startswith("Acceptance of drafts: its nearest entry (llama-3.1-8b, eagle3") for note in answer["notes"]
    )
