"""Protocol, grid and fit, on fake clocks and synthetic times: nothing here depends on this machine's speed."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

from executor_models import MODELS  # noqa: E402

from perfmodel.cost import OperatorTimer, estimate_step  # noqa: E402
from perfmodel.cost.calibrations.calibration import Calibration, FamilyFit  # noqa: E402
from perfmodel.evidence.fit.whole_steps import PARAMETERS, features, fit_steps  # noqa: E402
from perfmodel.models.spec import QuantizationSpec  # noqa: E402
from perfmodel.ops import build_graph  # noqa: E402
from perfmodel.ops.graphs.drafting import drafter_of  # noqa: E402
from perfmodel.specs import EngineSpec, load_hardware, load_model  # noqa: E402
from perfmodel.specs.engine.speculation import SpeculativeConfig  # noqa: E402
from perfmodel_executors.measure.bench import StepBench, StepGrants  # noqa: E402
from perfmodel_executors.measure.calibrate import widest_pass  # noqa: E402
from perfmodel_executors.measure.cpu_steps import StepRange, calibration_grid, drafting_grid  # noqa: E402
from perfmodel_executors.measure.protocol import DriftMeter, PairedCases, measure_together, quantile  # noqa: E402
from perfmodel_executors.models.decoder import Decoder  # noqa: E402
from perfmodel_executors.runner import StepRunner  # noqa: E402

CPU = load_hardware("cpu")
ENGINE = EngineSpec(dtype="bfloat16", profile="perfmodel")
UNPACKING_S = 1e-9  # of a vector operation
SHARED = ("gemm", "elementwise", "sampling", "embedding")


class FakeMachine:
    """A clock that only work moves, on a machine whose speed drifts."""

    def __init__(self):
        self.now, self.slowness = 0, 1.0

    def work(self, nanoseconds):
        def run():
            self.now += round(nanoseconds * self.slowness)
            self.slowness *= 1.002

        return run


def test_pairing_cancels_drift():
    machine = FakeMachine()
    cases = {"short": machine.work(1_000_000), "long": machine.work(5_000_000)}
    groups = [PairedCases(cases, machine.work(2_000_000))]
    (measured,) = measure_together(groups, min_rounds=12, budget_s=0, clock_ns=lambda: machine.now)
    assert measured.num_rounds == 12
    assert measured.seconds["long"] / measured.seconds["short"] == pytest.approx(5, rel=0.01)
    assert measured.seconds["short"] / measured.reference_s == pytest.approx(0.5, rel=0.01)
    assert machine.slowness > 1.15  # unpaired, the last round would be 15 % above the first
    assert measured.spread < 0.01


def test_the_drift_meter_restates_durations_at_the_calibrated_speed():
    machine = FakeMachine()
    reference = machine.work(1000)
    meter = DriftMeter(reference, reference_s=1e-6, window=1, clock_ns=lambda: machine.now)
    machine.slowness = 2.0
    assert meter.measure() == pytest.approx(0.5, rel=0.01)


def test_the_drift_meter_runs_only_when_due():
    machine = FakeMachine()
    meter = DriftMeter(machine.work(1000), reference_s=1e-6, every=3, clock_ns=lambda: machine.now)
    before = machine.now
    for _ in range(6):
        meter.measure()
    assert machine.now - before == pytest.approx(2 * 1000, rel=0.02)


def test_quantiles_are_linear_between_order_statistics():
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile([0, 10], 0.9) == pytest.approx(9)


@pytest.mark.parametrize("span", [StepRange(), StepRange(1, 32, 16), StepRange(32, 4096, 1024)])
def test_the_grid_spans_its_range_and_no_more(span):
    grid = calibration_grid(span)
    assert len(grid) == len(set(grid)) <= 45
    kinds = {(bool(shape.contexts), bool(shape.chunks)) for shape in grid}
    assert kinds == {(True, False), (False, True), (True, True)}  # decodes, chunks, both
    assert max(len(shape.contexts) for shape in grid) == span.max_batch
    assert max(max(shape.contexts, default=0) for shape in grid) == span.max_context
    assert max(max((new for new, _, _ in shape.chunks), default=0) for shape in grid) == span.max_chunk


@pytest.mark.parametrize(("config", "widest"), [({"tree": (4, 2, 2)}, 8), ({"num_speculative_tokens": 3}, 4)])
def test_a_drafters_widest_pass_is_in_the_grid(config, widest):
    """Of a tree the pass that drafts the last level, of a chain the one that reads what the last round added."""
    config = SpeculativeConfig(method="eagle", **config)
    drafter = drafter_of(load_model("tiny-llama"), EngineSpec(speculative_config=config), "greedy")
    assert widest_pass(config, drafter) == widest
    grid = drafting_grid(StepRange(), widest, drafter.computes_prompts)
    assert {1, widest} <= {shape.queries for shape in grid}
    assert max(shape.queries for shape in grid) == widest


def synthetic(model, span=None):
    """(shapes, features, seconds) of a machine that obeys the cost formula exactly."""
    attention = {"compute_fraction": 0.02, "memory_fraction": 0.05, "vector_op_s": UNPACKING_S, "knee": 1}
    families = {
        "gemm": FamilyFit(compute_fraction=0.1, memory_fraction=0.07, overhead_s=4e-6, knee=1),
        "elementwise": FamilyFit(memory_fraction=0.08, overhead_s=4e-6, knee=1),
        "sampling": FamilyFit(memory_fraction=0.1, overhead_s=4e-6, knee=1),
        "embedding": FamilyFit(memory_fraction=0.08, overhead_s=4e-6, knee=1),
        "attention_prefill": FamilyFit(overhead_per_item_s=4e-5, **attention),
        "attention_decode": FamilyFit(overhead_per_item_s=2e-5, **attention),
        "attention_decode/verify": FamilyFit(overhead_per_item_s=9e-5, **attention),
        "scan": FamilyFit(compute_fraction=0.05, memory_fraction=0.1, overhead_s=2e-4, knee=1),
        "moe": FamilyFit(compute_fraction=0.1, memory_fraction=0.07, overhead_per_item_s=3e-5, knee=1),
    }
    timer = OperatorTimer(CPU, Calibration(device="cpu", engine="test", families=families))
    graph = build_graph(model, ENGINE)
    shapes = [shape.batch_shape(model.attention_spans) for shape in calibration_grid(span or StepRange())]
    rows = [features(graph, CPU, shape) for shape in shapes]
    return graph, shapes, rows, [estimate_step(graph, timer, shape).duration_s for shape in shapes]


def test_unpacking_cached_integers_is_found_beside_the_bytes_that_it_saves():
    """Steps over 16-bit and over 8-bit keys, of a machine that unpacks before it multiplies, are told apart."""
    plain = load_model("tiny-llama")
    packed = replace(plain, quantization=QuantizationSpec(kv_cache="int8"))
    (_, _, rows, seconds), (_, _, packed_rows, packed_seconds) = synthetic(plain), synthetic(packed)
    fit = fit_steps(CPU, [*rows, *packed_rows], [[second] for second in (*seconds, *packed_seconds)])
    assert max(map(abs, fit.errors)) < 0.02
    found = fit.calibration.families["attention_decode"].vector_op_s
    assert found == pytest.approx(UNPACKING_S, rel=0.3)


def test_what_a_sequence_takes_that_verifies_is_found_apart():
    """The prompts' kernel serves it; all else is a decode's."""
    _, _, rows, seconds = synthetic(load_model("tiny-llama"), StepRange(max_queries=9))
    fit = fit_steps(CPU, rows, [[second] for second in seconds])
    assert max(map(abs, fit.errors)) < 0.03
    decode, verify = (fit.calibration.families[f"attention_decode{each}"] for each in ("", "/verify"))
    assert decode.overhead_per_item_s == pytest.approx(2e-5, rel=0.2)
    assert verify.overhead_per_item_s == pytest.approx(9e-5, rel=0.2)
    assert verify.model_copy(update={"overhead_per_item_s": decode.overhead_per_item_s}) == decode


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-moe", "tiny-swa", "tiny-hybrid"])
def test_the_fit_predicts_steps_of_a_machine_that_obeys_the_formula(name):
    model = load_model(name)
    graph, _, rows, seconds = synthetic(model)
    fit = fit_steps(CPU, rows, [[second] for second in seconds])
    assert max(map(abs, fit.errors)) < 0.03  # left-out steps; the pull towards priors costs this much
    timer = OperatorTimer(CPU, fit.calibration)
    unseen = StepGrants(contexts=(77, 500, 1000), chunks=((133, 50, True),)).batch_shape(model.attention_spans)
    truth = sum(predicted(fit, unseen, graph).values())
    assert estimate_step(graph, timer, unseen).duration_s == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("factor", [1, 20, 300])
def test_a_slower_machine_is_fitted_as_well(factor):
    """A processor without bfloat16 instructions is hundreds of times slower than the declared peak: what parameters are
    pulled to must not count that as an error of theirs."""
    _, _, rows, seconds = synthetic(load_model("tiny-llama"))
    fit = fit_steps(CPU, rows, [[factor * second] for second in seconds])
    assert max(map(abs, fit.errors)) < 0.03


def predicted(fit, shape, graph):
    """The linear formula written out: coefficient times feature, with the families that share a coefficient."""
    row = features(graph, CPU, shape)
    terms = {}
    for (family, quantity), value in row.items():
        owner = {("embedding", "memory"): "elementwise", ("attention_prefill", "memory"): "attention_decode"}.get(
            (family, quantity), family
        )
        if quantity == "kernels":
            own = fit.coefficients.get(f"{family}.kernels", 0.0)
            coefficient = fit.coefficients["kernel.kernels"] if family in SHARED else own
        elif quantity in ("items", "vector"):
            coefficient = fit.coefficients.get(f"{owner}.{quantity}", 0.0)
        else:
            coefficient = fit.coefficients.get(f"{owner}.{quantity}", 1.0)
        terms[family, quantity] = coefficient * value
    return terms


def test_fractions_never_exceed_the_declared_peaks():
    _, _, rows, seconds = synthetic(load_model("tiny-llama"))
    fit = fit_steps(CPU, rows, [[second / 1000] for second in seconds])  # an impossibly fast machine
    for family in fit.calibration.families.values():
        assert 0 < family.compute_fraction <= 1
        assert 0 < family.memory_fraction <= 1


def test_residuals_are_those_of_single_samples():
    _, _, rows, seconds = synthetic(load_model("tiny-llama"))
    samples = [[0.8 * s, 0.9 * s, s, 1.1 * s, 1.2 * s] for s in seconds]
    residuals = fit_steps(CPU, rows, samples).calibration.step_residuals
    assert residuals.num_rows == 5 * len(seconds)
    assert residuals.p10 == pytest.approx(-0.22, abs=0.03)
    assert residuals.p90 == pytest.approx(0.18, abs=0.03)


def test_every_parameter_may_take_its_prior():
    assert all(p.low <= p.prior <= p.high for p in PARAMETERS)


def test_a_bench_step_has_the_shape_it_was_asked_for():
    seen = []

    class SpyDecoder(Decoder):
        def step(self, batch, cache):
            seen.append(batch)
            return super().step(batch, cache)

    decoder = SpyDecoder(MODELS["gqa"], torch.float32)
    bench = StepBench(StepRunner(decoder, decoder.new_cache(4)))
    shape = StepGrants(contexts=(5, 9), chunks=((6, 3, True), (4, 0, False)))
    assert len(bench.step(shape)()) == 3
    (batch,) = seen
    assert batch.contexts_D.tolist() == [5, 9]
    assert batch.chunks.starts_G.tolist() == [0, 6, 10]
    assert batch.chunks.computed_G.tolist() == [3, 0]
    assert len(set(batch.slots_T.tolist())) == shape.num_tokens == 12
