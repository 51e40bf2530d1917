"""How much each layer loses in fewer bits, measured with only that one in the format, on text behind the stretch that
perplexities are compared on where there is enough; and which blocks go there, for a budget of bits per weight: those
that lose least per bit saved first. Losses are taken to add up (Dong et al. 2019, HAWQ, order layers by the Hessian).

    loss of a block = log(perplexity with only this block in the smaller format / perplexity without)
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log
from typing import Any, NamedTuple

from perfmodel.errors import SpecError
from perfmodel.models.layer_formats import BLOCKS, LayerQuantization, bits_per_weight, with_layer_formats
from perfmodel.models.number_formats import with_quantization
from perfmodel.models.params import layer_parameters
from perfmodel.models.spec import ModelSpec
from perfmodel.specs.engine.spec import EngineSpec
from perfmodel.specs.scenario import Scenario
from perfmodel_executors.models.quantized import check_quantization, layer_quantizer
from perfmodel_executors.models.support import with_plain_weights
from perfmodel_executors.models.weights import LayerWeights
from perfmodel_executors.quality.measure import note_on_weights, open_runner, perplexity, text_ids
from perfmodel_executors.quality.tokenizer import PYDOC
from perfmodel_executors.runner import StepRunner

_TOKENS = 1536
_TOKENS_APART = 512  # of each block alone: differences on the same tokens, which need fewer

Unit = tuple[int, str | None]  # a layer, and one of its blocks; None: all of them


class BlockLoss(NamedTuple):
    """What a block loses of log perplexity in the smaller format, and the bits that all its weights save."""

    unit: Unit
    loss: float
    bits_saved: float

    @property
    def loss_per_bit(self) -> float:
        return self.loss / self.bits_saved


def choose_blocks(losses: Sequence[BlockLoss], bits: float, num_weights: float, budget: float) -> tuple[Unit, ...]:
    """The blocks that go to the smaller format, in order, where all `num_weights` weights take `bits` each before.
    budget: bits per weight, on average. Raises SpecError for a budget below what the smaller format takes."""
    chosen: list[Unit] = []
    for block in sorted(losses, key=lambda block: block.loss_per_bit):
        if bits <= budget * (1 + 1e-9):
            return tuple(chosen)
        chosen.append(block.unit)
        bits -= block.bits_saved / num_weights
    if bits > budget * (1 + 1e-9):
        raise SpecError(
            f"--bits: got {budget:g}, but all blocks in the smaller format take {bits:.3f} bits a weight; raise it, "
            f"or choose a smaller format or larger groups (--group-size)."
        )
    return tuple(chosen)


def rules_of(units: Sequence[Unit], method: str, group_size: int | None) -> list[LayerQuantization]:
    by_block = {block: tuple(sorted(layer for layer, name in units if name == block)) for block in (None, *BLOCKS)}
    return [
        LayerQuantization(
            layers=layers, components=(block,) if block else (), quantization=method, group_size=group_size
        )
        for block, layers in by_block.items()
        if layers
    ]


class LayerSensitivity(NamedTuple):
    """Losses of log perplexity block by block, and what they propose. Perplexities are those of the compared stretch.
    base, lower: as the scenario says, and with all blocks in `method`; mixed: with `rules`; None: without a budget."""

    method: str
    losses: tuple[BlockLoss, ...]
    base: float
    base_bits: float
    lower: float
    lower_bits: float
    rules: tuple[LayerQuantization, ...] = ()
    mixed: float | None = None
    mixed_bits: float | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "losses": [
                {"layer": x.unit[0], "component": x.unit[1], "loss": x.loss, "bits_saved": x.bits_saved}
                for x in self.losses
            ],
            "perplexity": {"base": self.base, "all": self.lower, "mixed": self.mixed},
            "bits_per_weight": {"base": self.base_bits, "all": self.lower_bits, "mixed": self.mixed_bits},
            "quantization_by_layer": [rule.model_dump(mode="json", exclude_defaults=True) for rule in self.rules],
            "note": self.note,
        }

    def __str__(self) -> str:
        lines = [f"{'layer':>5}  {'block':<10} {'log perplexity':>14}"]
        for x in sorted(self.losses, key=lambda x: x.loss_per_bit, reverse=True):
            lines.append(f"{x.unit[0]:>5}  {x.unit[1] or 'all':<10} {x.loss:>+14.4f}")
        lines.append(f"perplexity {self.base:.2f} at {self.base_bits:.3f} bits a weight, as the scenario serves it")
        lines.append(f"perplexity {self.lower:.2f} at {self.lower_bits:.3f} bits, all blocks in {self.method}")
        if self.mixed is not None:
            lines.append(f"perplexity {self.mixed:.2f} at {self.mixed_bits:.3f} bits, mixed by these losses")
        return "\n".join((*lines, self.note))


def measure_sensitivity(
    scenario: Scenario,
    method: str,
    group_size: int | None = None,
    bits: float | None = None,
    text: str = PYDOC,
    by_block: bool = False,
    progress: Callable[[int, int | None], None] | None = None,
    num_tokens: int = _TOKENS,
) -> LayerSensitivity:
    """Loss of the scenario's model with each layer (or block of one) in `method`, the others as they are served. bits:
    the budget that a mix is proposed and measured for, a mean over the weights of all layers. Raises PerfmodelError for
    a model without weights of its own or formats that are not executed, SpecError for a budget that cannot be met."""
    ids, path = text_ids(scenario, text)
    few = min(num_tokens, _TOKENS_APART)
    apart = ids[num_tokens:] if len(ids) > num_tokens + few else ids
    engine = scenario.engine.model_copy(update={**_PLAIN, "enforce_eager": True})
    model = with_quantization(with_plain_weights(scenario.model), "none")
    with open_runner(scenario.model_copy(update={"model": model, "engine": engine})) as runner:
        served = _Variants(runner, scenario.engine, model, method, group_size)
        units = served.units(by_block)

        def measured(chosen: Sequence[Unit], of: Sequence[int] = ids, tokens: int = num_tokens) -> float:
            served.install(chosen)
            step = min(512, scenario.engine.max_num_batched_tokens)
            return perplexity(runner, of, tokens, chunk=step).value

        before, weights, losses = measured((), apart, few), served.num_weights, []
        for done, unit in enumerate(units):
            loss = log(measured([unit], apart, few) / before)
            losses.append(BlockLoss(unit, loss, (served.bits(()) - served.bits([unit])) * weights))
            if progress is not None:
                progress(done + 1, len(units))
        base, lower = ((measured(chosen), served.bits(chosen)) for chosen in ((), units))
        sensitivity = LayerSensitivity(method, tuple(losses), *base, *lower, note=note_on_weights(path))
        if bits is None:
            return sensitivity
        chosen = choose_blocks(losses, sensitivity.base_bits, weights, bits)
        rules = (*scenario.engine.quantization_by_layer, *rules_of(chosen, method, group_size))
        return sensitivity._replace(rules=rules, mixed=measured(chosen), mixed_bits=served.bits(chosen))


_PLAIN = {"quantization": None, "quantization_group_size": None, "quantization_by_layer": ()}


class _Variants:
    """A plain runner's model with some blocks in another format, the others as `engine` serves them."""

    def __init__(
        self, runner: StepRunner, engine: EngineSpec, model: ModelSpec, method: str, group_size: int | None
    ) -> None:
        self.method, self.group_size = method, group_size
        own = LayerQuantization(quantization=engine.quantization or "none", group_size=engine.quantization_group_size)
        self.base = [own, *engine.quantization_by_layer]
        self.layers = runner.decoder.weights.layers
        self.model = replace(model, dtype=runner.decoder.model.dtype)
        self.plain: list[LayerWeights] = list(self.layers)
        self.held: dict[tuple[int, Any], LayerWeights] = {}
        sizes = (layer_parameters(self.model, layer).items() for layer in self.model.iter_layers())
        self.num_weights = sum(count for of_layer in sizes for name, count in of_layer if name in BLOCKS)
        for chosen in ((), self.units(False)):
            check_quantization(self.served(chosen))

    def served(self, chosen: Sequence[Unit]) -> ModelSpec:
        return with_layer_formats(self.model, [*self.base, *rules_of(chosen, self.method, self.group_size)])

    def bits(self, chosen: Sequence[Unit]) -> float:
        return bits_per_weight(self.served(chosen))

    def units(self, by_block: bool) -> list[Unit]:
        if not by_block:
            return [(index, None) for index in range(self.model.num_layers)]
        return [
            (index, name)
            for index, layer in enumerate(self.model.iter_layers())
            for name in layer_parameters(self.model, layer)
            if name in BLOCKS
        ]

    def install(self, chosen: Sequence[Unit]) -> None:
        model = self.served(chosen)
        quantize = layer_quantizer(model)
        for index, layer in enumerate(model.iter_layers()):
            key = (index, layer.formats)
            if key not in self.held:
                self.held[key] = quantize(self.plain[index], layer, index)
            self.layers[index] = self.held[key]
