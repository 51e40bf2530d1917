"""The registry of techniques says what is so: its switches work, its pages and figures are there, none is left out.

An entry with `missing` must not work: the day its switch does, this test asks for `missing` to be taken away.
"""

import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from perfmodel.errors import PerfmodelError
from perfmodel.evidence.executed.technique import (
    MIN_GAIN,
    executed_pairs,
    load_techniques,
    published_ratios,
    read_status,
)
from perfmodel.evidence.kinds.published import predict
from perfmodel.models.model_changes import LinearChange, ModelChanges, Prune, SparseAttention
from perfmodel.planning.metrics import metric_named, needs_no_run
from perfmodel.specs import load_scenario
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.engine.speculation import SpeculativeConfig
from perfmodel.specs.overrides import parse_override
from perfmodel.specs.scenario import Scenario
from perfmodel.specs.traffic import ExpertRouting

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs/techniques"
SCENARIOS = ROOT / "workloads/scenarios"
FITTED = {path.stem for path in (SCENARIOS / "published").glob("*.yaml") if "\n  fitted: true\n" in path.read_text()}
ENTRIES = [entry for family in load_techniques() for entry in family.techniques]
SWITCHES = [entry for entry in ENTRIES if entry.switch]
LEAST = 1e-3  # a metric that moves by less has not moved

# Fields that are no technique, and what they are.
LOAD = "what is served, and what is asked of it"
SIZE = "how many devices there are"
ROOM = "how much room there is"
ENGINE = "which engine's habits are followed"
NO_TECHNIQUE = {
    "name": LOAD,
    "model": LOAD,
    "hardware": LOAD,
    "traffic": LOAD,
    "sampling": LOAD,
    "slo": LOAD,
    "price": LOAD,
    "site": LOAD,
    "seed": LOAD,
    "overheads": "a what-if",
    "plan": "what is searched",
    "cluster": SIZE,
    "published": "what is compared",
    "technique": "what is compared",
    "engine.tensor_parallel_size": SIZE,
    "engine.data_parallel_size": SIZE,
    "engine.max_model_len": ROOM,
    "engine.gpu_memory_utilization": ROOM,
    "engine.num_gpu_blocks_override": ROOM,
    "engine.scheduler_reserve_full_isl": ENGINE,
    "engine.disable_hybrid_kv_cache_manager": ENGINE,
    "engine.mamba_ssm_cache_dtype": "in which format a model's own states are kept",
    "engine.scheduling_policy": "who goes first, at no cost to the whole",
    "engine.profile": ENGINE,
    "engine.calibration": "the numbers of one's own server, which `engine.profile` names",
    "engine.version": ENGINE,
    "engine.poll_every": ENGINE,
    "engine.backend": ENGINE,
    "engine.ubatch_size": ENGINE,
    "engine.layer_split": SIZE,
    "engine.n_gpu_layers": ROOM,
    "engine.cpu": ROOM,
    "engine.attention_dp_timeout_iters": ENGINE,
    "routing.alpha": "belongs to power_law",
    "routing.dispersion": "belongs to trained",
    "engine.speculative_config.num_speculative_tokens": "belongs to every method",
}
# Choices that are the absence of techniques, or the default of all models.
NO_CHOICE = {
    "engine.batching=continuous",
    "engine.dtype=auto",
    "engine.kv_cache=paged",
    "routing.distribution=trained",
    "routing.distribution=uniform",
    "routing.distribution=recorded",
}


def flat(path, value):
    """`a.b=c` for every leaf, and the dotted path of every inner node."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(f"{path}.{key}", inner)
    else:
        yield f"{path}={value}"


@cache
def claimed():
    """Every field and choice that some technique's switch or list of fields names."""
    found = set()
    for entry in ENTRIES:
        for text in (*entry.switch, *entry.fields):
            if "=" not in text:
                text, value = text, None
            else:
                override = parse_override(text)
                text, value = ".".join(map(str, override.path)), override.value
            found |= set(flat(text, value))
            parts = text.split(".")
            found |= {".".join(parts[: n + 1]) for n in range(len(parts))}
    return found


def choices(prefix, spec, only=None):
    for name, field in spec.model_fields.items():
        if get_origin(field.annotation) is Literal and (only is None or name in only):
            yield from (f"{prefix}{name}={value}" for value in get_args(field.annotation))


def measured(entry, with_switch):
    move = entry.moves
    step = f", step: {move.step.model_dump_json(exclude_defaults=True)}" if move.step else ""
    basis = "memory" if needs_no_run(move.metric) else "step" if move.step else "run"
    dimension = metric_named(move.metric, basis).dimension
    unit = "" if dimension == "count" else dimension
    figure = f"published={{metric: {move.metric}, value: 1, unit: '{unit}', source: registry{step}}}"
    overrides = [*entry.setting, *(entry.switch if with_switch else ()), figure]
    return predict(load_scenario(entry.scenario, overrides), Path(entry.scenario))[0]


def is_as_stated(entry, before, after):
    return after > before * (1 + LEAST) if entry.moves.direction == "up" else after < before * (1 - LEAST)


@pytest.mark.parametrize("entry", [e for e in SWITCHES if e.missing is None], ids=lambda e: e.name)
def test_switch_moves_the_answer(entry):
    before, after = measured(entry, False), measured(entry, True)
    assert is_as_stated(entry, before, after), f"{entry.moves.metric}: {before:g}, with {entry.switch} {after:g}"


@pytest.mark.parametrize("entry", [e for e in SWITCHES if e.missing is not None], ids=lambda e: e.name)
def test_what_is_missing_is_missing(entry):
    before = measured(entry, False)
    try:
        works = is_as_stated(entry, before, measured(entry, True))
    except PerfmodelError:
        works = False
    assert not works, f"{entry.name} works: take `missing` out of its entry in workloads/techniques"


def test_pages_are_there_and_linked():
    """Of what works; a page of what is missing may come with it."""
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([a-z0-9-]+)\.md\)", index))
    wanted = {entry.page for entry in ENTRIES if entry.missing is None}
    assert not {page for page in wanted if not (PAGES / f"{page}.md").is_file()}
    assert not wanted - linked
    assert {path.stem for path in PAGES.glob("*.md")} - {"README"} <= linked


def test_every_page_is_of_a_technique():
    pages = {path.stem for path in PAGES.glob("*.md")} - {"README"}
    assert not pages - {entry.page for entry in ENTRIES}


def test_names_are_told_apart():
    names = [entry.name for entry in ENTRIES]
    assert len(names) == len(set(names))


def test_figures_are_in_the_folder_and_in_the_report():
    ids = {id for entry in ENTRIES for id in entry.published}
    assert not {id for id in ids if not (SCENARIOS / "published" / f"{id}.yaml").is_file()}
    assert not ids - set(published_ratios()) - FITTED


def test_validated_only_with_a_figure():
    for row in read_status():
        assert (row.validated != "no") == bool(row.ratios)
        assert set(row.ratios) == set(row.entry.published) - FITTED


def test_a_figure_counts_for_one_technique():
    """One figure that two techniques share would be two proofs of one measurement."""
    times = Counter(id for entry in ENTRIES for id in entry.published)
    assert not [id for id, count in times.items() if count > 1]


def test_executed_is_said_of_what_came_out_right_only():
    for row in read_status():
        assert row.is_executed == (bool(row.pairs) and all(pair.verdict == "right" for pair in row.pairs.values()))
        for pair in row.pairs.values() if row.is_executed else ():
            assert (pair.simulated - 1) * (pair.executed - 1) > 0
            assert max(pair.executed, 1 / pair.executed) > 1 + MIN_GAIN
        assert not row.is_slower_here or all(pair.simulated < 1 for pair in row.pairs.values())


def test_pairs_are_those_that_are_written():
    written = {path.stem for path in (SCENARIOS / "techniques").glob("*.yaml")}
    assert written == {name for entry in ENTRIES for name in entry.pairs}


def test_reasons_are_reasons():
    """That nobody has written a pair is none."""
    assert not [entry.name for entry in ENTRIES if re.search("no pair|not written", entry.executed_not or "")]


@pytest.mark.parametrize("name", sorted({name for entry in ENTRIES for name in entry.pairs}))
def test_a_pair_can_be_read_with_and_without_its_technique(name):
    scenario = load_scenario(SCENARIOS / "techniques" / f"{name}.yaml")
    assert scenario.name == f"technique-{name}"
    assert scenario.technique is not None
    baseline = load_scenario(SCENARIOS / "techniques" / f"{name}.yaml", scenario.technique.baseline)
    assert baseline != scenario
    assert scenario.technique.page is None or (PAGES / f"{scenario.technique.page}.md").is_file()


@pytest.mark.parametrize("pattern", ["published_figures_*.json", "techniques_cpu_*.json"])
def test_newest_report_is_in_the_wheel(pattern):
    newest = max((path.name for path in (ROOT / "reports").glob(pattern)), default=None)
    assert newest is None or f'"reports/{newest}",' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_quotients_come_from_the_report_of_pairs(tmp_path, monkeypatch):
    """The newest one; without any, what is executed is still executed."""
    monkeypatch.setattr("perfmodel.evidence.executed.technique.data_dir", lambda name: tmp_path)
    assert executed_pairs() == {}
    for month, quotient in ((202610, 2.0), (202611, 1.05)):
        sides = {"simulated": 2.1, "executed": 2.1 / quotient, "quotient": quotient}
        rows = [{"file": "int8-kv.yaml", **sides, "verdict": "right"}]
        (tmp_path / f"techniques_cpu_{month}.json").write_text(json.dumps({"techniques": rows}))
    assert executed_pairs() == {"int8-kv": (2.1, 2.0, 1.05, "right")}


def test_no_field_is_without_a_technique():
    fields = {
        *Scenario.model_fields,
        *(f"engine.{name}" for name in EngineSpec.model_fields),
        *(f"routing.{name}" for name in ExpertRouting.model_fields),
        *(f"model_changes.{name}" for name in ModelChanges.model_fields),
        *(f"engine.speculative_config.{name}" for name in SpeculativeConfig.model_fields),
    }
    unclaimed = fields - claimed() - set(NO_TECHNIQUE)
    assert not unclaimed, f"{sorted(unclaimed)}: enter them in workloads/techniques, or say here why they are none"
    assert not set(NO_TECHNIQUE) - fields - {"technique"}


def test_no_choice_is_without_a_technique():
    asked = {
        *choices("engine.", EngineSpec, {"batching", "dtype", "kv_cache", "attention"}),
        *choices("engine.speculative_config.", SpeculativeConfig),
        *choices("routing.", ExpertRouting),
        *choices("model_changes.prune.", Prune, {"kind"}),
        *choices("model_changes.sparse.", SparseAttention),
        *choices("model_changes.linear.", LinearChange),
    }
    unclaimed = asked - claimed() - NO_CHOICE
    assert not unclaimed, f"{sorted(unclaimed)}: enter them in workloads/techniques"


def test_every_family_and_technique_has_its_own_sentence():
    """Readers who do not know a name find its meaning."""
    families = load_techniques()
    entries = [entry for family in families for entry in family.techniques]
    sentences = [entry.what for entry in (*families, *entries)]
    for sentence in sentences:
        assert sentence[0].isupper() or sentence[0].isdigit(), sentence
        assert sentence.endswith("."), sentence
        assert sentence.count(". ") == 0, sentence
        assert len(sentence) <= 140, sentence
    assert len(set(sentences)) == len(sentences)
