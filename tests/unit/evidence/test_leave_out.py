"""`validate --leave-out`: a group's own figures say nothing about its predictions, those of the others do."""

import pytest

from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.evidence import leave_out
from perfmodel.evidence.fit import backends
from perfmodel.evidence.leave_out import GROUPS, validate_left_out
from perfmodel.evidence.observation import Observation, Prediction
from perfmodel.specs import load_scenario

MODELS = ("llama-3.1-8b", "qwen3-8b", "qwen3-14b")


def row(model: str, tpot_ms: float, concurrency: int = 8) -> Observation:
    changes = [f"model={model}", f"traffic.arrivals={{process: closed_loop, concurrency: {concurrency}}}"]
    metrics = {"tpot_mean": tpot_ms, "ttft_mean": tpot_ms}
    return Observation(model, load_scenario("llama-3.1-8b-a100", changes), metrics, label=model)


def predictions(rows, progress=None, profile=None, intervals=False):
    """What a simulator whose times are one parameter of the engine gives, in ms."""
    time_ms = 1e3 * profile.host.prompt_step_s
    metrics = {"tpot_mean": time_ms, "ttft_mean": time_ms}
    return [Prediction(item, metrics, scenario=item.scenario, details={"is_shortened": False}) for item in rows]


@pytest.fixture
def held_out(monkeypatch):
    monkeypatch.setattr(leave_out, "simulate_steady_states", predictions)

    def of(rows, group):
        monkeypatch.setattr(leave_out, "read_steady_states", lambda path: (rows, []))
        (comparison,) = (
            item for item in validate_left_out("steady-state", "x", group).comparisons if item.metric == "tpot_mean"
        )
        return dict(zip(comparison.rows.labels, comparison.rows.predicted.tolist(), strict=True))

    return of


@pytest.mark.parametrize("group", ["model", "cell"])
def test_a_groups_own_figures_say_nothing_about_its_predictions(held_out, group):
    usual = held_out([row(MODELS[0], 4.0), row(MODELS[1], 4.0), row(MODELS[2], 4.0)], group)
    slow = held_out([row(MODELS[0], 40.0), row(MODELS[1], 4.0), row(MODELS[2], 4.0)], group)
    assert slow[MODELS[0]] == pytest.approx(usual[MODELS[0]], rel=1e-3)
    assert slow[MODELS[1]] > 1.1 * usual[MODELS[1]]


def test_without_any_rest_predictions_are_those_that_fits_start_from(held_out):
    """All rows are of one engine: without it nothing is left to fit to, neither committed values nor these figures."""
    (alone, slow) = (held_out([row(MODELS[0], time_ms), row(MODELS[1], time_ms)], "engine") for time_ms in (4.0, 40.0))
    assert alone == slow == pytest.approx({MODELS[0]: 3.0, MODELS[1]: 3.0})  # the prior of host.prompt_step_s, 3 ms


TABLE = (
    "id,device,device_class,backend,model,model_params,gguf_type,test,n_prompt,n_gen,tokens_per_s,group,flags\n"
    + "".join(
        f"{device}-{test},{device},gpu,cuda,meta-llama/Llama-3.1-8B-Instruct,8e9,Q4_K_M,{test},{sizes},{rate},g{test},\n"
        for device, factor in (("rtx-4090-24gb", 1.0), ("rtx-3090-24gb", 0.8))
        for test, sizes, rate in (("tg", "0,128", 130 * factor), ("pp", "512,0", 9000 * factor))
    )
)


def test_rows_of_single_machines_are_those_of_the_fit_that_left_them_out(tmp_path, monkeypatch):
    file = tmp_path / "figures.csv"
    file.write_text(TABLE)
    usual = validate_left_out("local", file, "device")
    assert usual.covered == usual.rows == 4
    monkeypatch.setattr(leave_out, "held_out", lambda rows, folder, by: _doubled(backends.held_out(rows, folder, by)))
    doubled = validate_left_out("local", file, "device")
    for before, after in zip(usual.comparisons, doubled.comparisons, strict=True):
        assert after.rows.predicted == pytest.approx(2 * before.rows.predicted)


def _doubled(result):
    settings, predicted = result
    return settings, 2 * predicted


def test_without_rows_to_fit_a_sentence_says_so(tmp_path):
    file = tmp_path / "figures.csv"
    file.write_text(TABLE.splitlines()[0] + "\n")
    with pytest.raises(PerfmodelError, match="no rows that can be fitted to"):
        validate_left_out("local", file, "device")


def test_an_engine_without_small_rows_is_not_covered(held_out):
    assert held_out([row(MODELS[0], 4.0, concurrency=64), row(MODELS[1], 4.0, concurrency=64)], "model") == {}


def test_what_cannot_be_left_out_is_said():
    with pytest.raises(SpecError, match="got engine; expected device, model with `validate local`"):
        validate_left_out("local", "x", "engine")
    assert set(GROUPS) == {"cell", "model", "device", "engine", "format"}
