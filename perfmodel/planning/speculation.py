"""Does speculation pay at this load, and until which concurrency? Closed form, for an engine with N requests in flight.

A round of N sequences takes t and gives each E tokens; without drafts it is a decode step, and E = 1. Prompts of X
requests per second join rounds: the first of a round adds c, each further one d. So a round takes T on average, with
m = X T prompts in it, and a request c + O T / E for O tokens:

    T = t + (1 - exp(-m)) (c - d) + m d,     X = N / (c + O T / E),     TPOT = T / E

t, c and d come from the cost model of steps, E from the acceptance of each draft length. Waits for slots and for the
running step are left out. Against closed loops of the simulator: throughput within 12 %, its gain within 6 %;
TPOT up to a sixth longer where answers of one length come in waves."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from math import exp
from typing import Any

from numpy.typing import NDArray

from perfmodel.cost import StepCostModel, plan_memory
from perfmodel.cost.calibrations.provenance import provenance_of, resolved
from perfmodel.errors import PerfmodelError, SpecError
from perfmodel.ops.work import BatchShape, decode_shape
from perfmodel.planning.findings import TIE, crossings
from perfmodel.planning.service import Demand, demand_of
from perfmodel.planning.typical_step import typical_step
from perfmodel.renderable import Renderable, columns_of
from perfmodel.sim.replica.step_costs import shared_step_costs
from perfmodel.specs.engine.speculation import RIGHT_OF_NGRAMS, SpeculativeConfig
from perfmodel.specs.scenario import Scenario
from perfmodel.trust import trust_of

_LONGEST = 8  # drafted tokens, of chains
_PS = 1e-12
_ITERATIONS = 200  # of the fixed point T
_FIELD = "engine.speculative_config"


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """A drafter and a draft length; at as many of the ladder's concurrencies as memory holds. drafted: tokens per step,
    0 without speculation; tokens_per_step: that a sequence gets, the model's own included"""

    method: str
    drafted: int
    tokens_per_step: float
    tpot_ms: tuple[float, ...]
    output_throughput: tuple[float, ...]


@dataclass(frozen=True, repr=False)
class SpeculationAdvice(Renderable):
    """All choices over a ladder of concurrencies, each of one engine.

    present: place of the scenario's own load in `concurrencies`, `load`: how it was found
    plain:   without speculation; drafts: by method, then by length
    notes:   where each acceptance comes from; methods that are not possible, with the reason"""

    scenario: Scenario
    concurrencies: tuple[int, ...]
    present: int
    load: str
    plain: DraftChoice
    drafts: Mapping[str, Sequence[DraftChoice]]
    notes: tuple[str, ...] = ()

    def gain(self, choice: DraftChoice, place: int) -> float:
        """TPOT without drafts over the choice's."""
        return self.plain.tpot_ms[place] / choice.tpot_ms[place]

    def best(self, place: int, *methods: str) -> DraftChoice | None:
        """The choice of some methods with the least TPOT at a place; None where memory holds none."""
        choices = [draft for name in methods for draft in self.drafts[name] if len(draft.tpot_ms) > place]
        return min(choices, key=lambda choice: choice.tpot_ms[place], default=None)

    def pays(self, *choices: DraftChoice) -> list[tuple[float, float]]:
        """Ranges of concurrency in which the best of the choices is faster than no speculation by more than `TIE`;
        ends are interpolated."""
        best = [min(at) for at in zip(*(choice.tpot_ms for choice in choices), strict=False)]
        enough = [tpot / (1 + TIE) for tpot in self.plain.tpot_ms]
        if not best:
            return []
        edges = [self.concurrencies[0], *crossings(self.concurrencies, best, enough), self.concurrencies[len(best) - 1]]
        return list(pairwise(edges))[best[0] >= enough[0] :: 2]

    def columns(self) -> dict[str, NDArray[Any]]:
        """A row per choice at the present load."""
        return columns_of([row for row in self._rows() if row["tpot_ms"] is not None])

    def _rows(self) -> Iterator[dict[str, Any]]:
        for choice in (self.plain, *(draft for drafts in self.drafts.values() for draft in drafts)):
            is_held = len(choice.tpot_ms) > self.present
            gain = self.gain(choice, self.present) if is_held else None
            tpot_ms = choice.tpot_ms[self.present] if is_held else None
            yield {"method": choice.method, "drafted": choice.drafted, "tpot_ms": tpot_ms, "gain": gain}

    def to_json(self) -> dict[str, Any]:
        """Every choice along the ladder, its gain at the present load, and the ranges in which it pays."""
        return {
            "scenario": self.scenario.name,
            "concurrency": self.concurrencies[self.present],
            "concurrencies": list(self.concurrencies),
            "present": list(self._rows()),
            "without": asdict(self.plain),
            "drafts": [asdict(d) | {"pays": self.pays(d)} for drafts in self.drafts.values() for d in drafts],
            "pays": {name: self.pays(*drafts) for name, drafts in self.drafts.items()},
            "notes": list(self.notes),
            "trust": trust_of(self.scenario).to_json(),
            "provenance": provenance_of([self.scenario]).to_json("speculation", {"scenario": resolved(self.scenario)}),
        }


def ask_speculation(scenario: Scenario) -> SpeculationAdvice:
    """Compare no speculation with the scenario's own, its model's prediction head or EAGLE-3, and n-gram lookup, with
    drafts of up to 8 tokens. Raises SpecError where no method is possible, or the scenario's own has no acceptance."""
    own = scenario.engine.speculative_config
    if scenario.model.pooling is not None:
        raise SpecError(f"{scenario.model.name} returns no text, of which tokens could be drafted; leave it out.")
    if own is not None and own.acceptance is None:
        raise SpecError(f"{scenario.name}: {_FIELD} has no acceptance; give a rate, or catalog: {{}}.")
    plain = scenario.with_({_FIELD: None}) if own is not None else scenario
    demand, costs = demand_of(plain), shared_step_costs(plain).cost_model()
    present = typical_step(plain, lambda shape: costs.duration_ps(shape) * _PS)
    most, context = _max_batch(plain, demand), round(demand.context)
    now = min(present.shape.num_decodes, most)
    ladder = tuple(sorted({now, most, *(2**power for power in range(most.bit_length()))}))
    steps = [decode_shape(size, context, plain.model.attention_spans) for size in ladder]
    without, drafts = _choice("none", 0, plain, costs, steps, demand), {}
    notes, refused = [], []
    for label, make in _drafting(scenario, plain):
        try:
            drafting = make()
            drafts[label] = list(_drafts(label, drafting, demand, ladder))
            notes.append(f"{label}: {_acceptance_note(drafting)}")
        except PerfmodelError as error:
            refused.append(f"{label}: {error}")
    if not drafts:
        raise SpecError(f"{scenario.name}: no method of speculation is possible: {refused[0]}")
    return SpeculationAdvice(plain, ladder, ladder.index(now), present.label, without, drafts, (*notes, *refused))


def _drafting(scenario: Scenario, plain: Scenario) -> Iterator[tuple[str, Callable[[], Scenario]]]:
    """(label, what makes the scenario that drafts): of its own method, a prediction head or EAGLE-3, and n-grams."""
    own = scenario.engine.speculative_config
    if own is not None:
        given = {name: getattr(own, name) for name in own.model_fields_set}
        longer = {"num_speculative_tokens": max(own.depth, _LONGEST)} if own.is_chain else {}
        engine = scenario.engine.model_copy(update={"speculative_config": SpeculativeConfig(**{**given, **longer})})
        yield own.method, partial(scenario.model_copy, update={"engine": engine})
    head = ("MTP", "mtp") if plain.model.num_prediction_layers else ("EAGLE-3", "eagle3")
    for kind, label, method in (("eagle", *head), ("ngram", "n-gram", "ngram")):
        if own is None or own.method != kind:
            acceptance: dict[str, Any] = {"catalog": {}} if kind == "eagle" else {"rate": RIGHT_OF_NGRAMS}
            block = {"method": method, "num_speculative_tokens": _LONGEST, "acceptance": acceptance}
            yield label, partial(plain.with_, {_FIELD: block})


def _drafts(label: str, scenario: Scenario, demand: Demand, ladder: Sequence[int]) -> Iterator[DraftChoice]:
    config, costs = scenario.engine.speculative_config, shared_step_costs(scenario).speculative_cost_model()
    assert config is not None
    most, context = _max_batch(scenario, demand), round(demand.context)
    for depth in range(1, config.depth + 1) if config.is_chain else (config.typical_depth,):
        rounds = [costs.drafting_step(size, depth, context) for size in ladder if size <= most]
        yield _choice(label, depth, scenario, costs, rounds, demand)


def _choice(
    method: str, drafted: int, scenario: Scenario, costs: StepCostModel, rounds: Sequence[BatchShape], demand: Demand
) -> DraftChoice:
    """method, drafted: of the choice; scenario, costs: that drafts so; rounds: one per concurrency; demand: lengths"""
    config, outputs, prompt = scenario.engine.speculative_config, demand.mean_outputs, max(round(demand.mean_prompt), 1)
    tokens = config.expected_tokens(drafted) if config is not None else 1.0
    is_apart = scenario.engine.rules.prefill_exclusive  # prompts have steps of their own

    def seconds(shape: BatchShape, num_prompts: int) -> float:
        """Of a step with further prompts."""
        new, samples = shape.num_tokens + num_prompts * prompt, shape.num_samples + num_prompts
        prefills = ((prompt, 0),) * num_prompts
        return costs.duration_ps(shape._replace(num_tokens=new, num_samples=samples, prefills=prefills)) * _PS

    tpot_ms, throughput = [], []
    for shape in rounds:
        alone, joined = seconds(shape, 0), BatchShape(0, 0, ()) if is_apart else shape
        first = max(seconds(joined, 1) - (0.0 if is_apart else alone), 0.0)
        further = max(seconds(joined, 2) - seconds(joined, 1), 0.0)
        mean = alone
        for _ in range(_ITERATIONS):  # grows to the fixed point
            num_prompts = shape.num_decodes * mean / (first + outputs * mean / tokens)
            mean = alone + (1 - exp(-num_prompts)) * (first - further) + num_prompts * further
        tpot_ms.append(1e3 * mean / tokens)
        throughput.append(shape.num_decodes * outputs / (first + outputs * mean / tokens))
    return DraftChoice(method, drafted, tokens, tuple(tpot_ms), tuple(throughput))


def _max_batch(scenario: Scenario, demand: Demand) -> int:
    """Most requests in flight in one engine, by max_num_seqs and KV cache. Raises DoesNotFitError for none."""
    engine, whole = scenario.engine, round(demand.mean_prompt + demand.mean_outputs)
    return max(min(engine.max_num_seqs, plan_memory(scenario.model, scenario.hardware, engine).max_batch(whole)), 1)


def _acceptance_note(scenario: Scenario) -> str:
    config = scenario.engine.speculative_config
    assert config is not None
    assert config.acceptance is not None
    if config.acceptance.catalog is not None:
        return config.acceptance.catalog.note(scenario.model.name)
    rates = ", ".join(f"{rate:.0%}" for rate in dict.fromkeys(config.acceptance.rates(config.depth, config.tree)))
    assumed = ", assumed as in chat" if config.acceptance.rate == RIGHT_OF_NGRAMS else ""
    return f"{rates} of drafted tokens are right{assumed}."
