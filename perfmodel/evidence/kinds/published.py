"""`validate published`: figures from papers, blogs and tables, each a scenario with a `published` block. Each figure is
restated with its source in its own file; none was used in a fit. Predicted is a metric of a run, step, operator, kernel
or memory. Formats and selection: docs/published.md."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from perfmodel import sim
from perfmodel.cost import OperatorEstimate, OperatorTimer, StepEstimate, load_calibration, step_costs
from perfmodel.cost.calibrations.for_all import routing_of
from perfmodel.errors import PerfmodelError, SpecError, did_you_mean
from perfmodel.evidence import report
from perfmodel.evidence.kinds.published_block import KernelShape, Published
from perfmodel.evidence.observation import Observation, Prediction, Progress, reported
from perfmodel.files.blocks import block_as
from perfmodel.models.architecture import MoEFFN
from perfmodel.models.number_formats import (
    BITS_PER_WEIGHT,
    bytes_per_weight,
    format_of_dtype,
    with_dtype,
    with_quantization,
)
from perfmodel.models.spec import ModelSpec
from perfmodel.ops.attention.decode import attention_decode
from perfmodel.ops.attention.prefill import Heads, flash_prefill, standard_prefill
from perfmodel.ops.collectives import all_reduce
from perfmodel.ops.feedforward import experts
from perfmodel.ops.formats import LinearFormat, linear_format
from perfmodel.ops.linear import gemm
from perfmodel.ops.work import Work
from perfmodel.planning import points
from perfmodel.specs import load_scenario
from perfmodel.specs.scenario import Scenario

_DTYPES = frozenset({"bf16", "bfloat16", "fp16", "float16", "fp32", "float32"})
# Names that tables of kernels use -> the engine's `quantization`.
_KERNEL_FORMATS = {"int4_wo": "w4a16", "int8_wo": "w8a16", "fp8_wo": "fp8_w8a16", "sq": "w8a8_int8"}
_STATIC = "_static"  # inputs that come quantized
_S = 1e6  # microseconds


def _kernel_format(scenario: Scenario, format: str | None) -> LinearFormat:
    """Format of a linear layer: a dtype or `engine.quantization`; `_static`: inputs come quantized, scales known."""
    model = scenario.model
    name = (format or model.dtype).lower()
    if name in _DTYPES:
        return linear_format(with_quantization(with_dtype(model, format_of_dtype(name)), "none"), "dense_ffn")
    is_static = name.endswith(_STATIC)
    name = name.removesuffix(_STATIC)
    quantized = with_quantization(_in_16_bits(model), _KERNEL_FORMATS.get(name, name))
    quantization = replace(quantized.quantization, kept=frozenset(), inputs_come_quantized=is_static)
    return linear_format(replace(quantized, quantization=quantization), "dense_ffn")


def _in_16_bits(model: ModelSpec) -> ModelSpec:
    return with_quantization(model if model.dtype in ("bf16", "fp16") else with_dtype(model, "bf16"), "none")


def _kernel_work(scenario: Scenario, shape: KernelShape) -> Work:
    """The kernel's work. Raises SpecError for an unknown format."""
    size = shape.size
    if shape.operator == "gemm":
        return gemm("gemm", size("m"), size("n"), size("k"), _kernel_format(scenario, shape.format))
    if shape.operator == "moe":
        return _experts(scenario, shape)
    if shape.operator == "all_reduce":
        return all_reduce(shape.message_bytes or 0.0, size("ranks"))
    heads, batch, is_flash = _heads(scenario, shape), size("batch"), scenario.engine.attention == "flash"
    if shape.operator == "attention_decode":
        context = min(size("context"), shape.window) if shape.window else size("context")
        splits, fused = scenario.engine.split_kv, scenario.engine.fused_kernels
        return attention_decode(batch, batch * context, heads, splits_kv=splits, is_flash=is_flash, is_fused=fused)
    prompts = [(size("tokens"), size("cached", 0))] * batch
    if is_flash:
        return flash_prefill(prompts, heads)
    return standard_prefill(prompts, heads, is_fused=scenario.engine.fused_kernels)


def _heads(scenario: Scenario, shape: KernelShape) -> Heads:
    dtype = format_of_dtype(shape.format or _in_16_bits(scenario.model).dtype)
    kv_format = shape.kv_format or dtype
    if kv_format not in BITS_PER_WEIGHT:
        kv_format = format_of_dtype(kv_format)
    return Heads(
        num_heads=shape.size("heads"),
        num_kv_heads=shape.size("kv_heads", shape.size("heads")),
        head_dim=shape.size("head_dim"),
        v_head_dim=shape.size("v_head_dim", shape.size("head_dim")),
        dtype=dtype,
        element_bytes=bytes_per_weight(dtype),
        kv_element_bytes=bytes_per_weight(kv_format),
        window=shape.window,
    )


def _experts(scenario: Scenario, shape: KernelShape) -> Work:
    num_experts, top_k, ranks = shape.size("experts"), shape.size("top_k"), shape.size("expert_parallel")
    if top_k > num_experts or num_experts % ranks:
        raise SpecError(
            f"published.kernel: got top_k {top_k} of {num_experts} experts on {ranks} devices; expected a top_k of at "
            f"most `experts`, and an `expert_parallel` that divides them."
        )
    ffn = MoEFFN(num_experts, top_k, shape.size("intermediate"), gated=shape.is_gated is not False)
    return experts(
        shape.size("tokens"),
        ffn,
        routing_of(scenario)(ffn, shape.size("tokens"), ranks),
        _kernel_format(scenario, shape.format),
        width=shape.size("hidden"),
        intermediate=shape.size("intermediate"),
        local_experts=num_experts // ranks,
        is_fused=scenario.engine.fused_kernels,
    )


def predict(scenario: Scenario, file: Path) -> points.Found:
    """Prediction of `scenario.published` in the figure's unit, and its parts as text; `file` holds the scenario, which
    a baseline changes. Raises PerfmodelError if nothing can be predicted: it does not fit, or has no such operator."""
    figure = block_as(scenario.published, Published)
    if figure is None:
        raise SpecError(f"{file}: has no `published` block; see docs/published.md.")
    value, made_of = _metric(scenario, figure)
    if figure.baseline:
        changed = load_scenario(file, figure.baseline)
        of_changed = block_as(changed.published, Published)
        assert of_changed is not None
        base, of_base = _metric(changed, of_changed)
        better = base / value if figure.metric_spec.is_better_low else value / base
        value = {
            "speedup": better,
            "gain": better - 1,
            "saving": 1 - value / base,
            "scenario_over_baseline": value / base,
            "baseline_over_scenario": base / value,
        }[figure.ratio or "speedup"]
        made_of = f"{made_of}; baseline: {of_base}"
    return value / figure.factor, made_of


def _metric(scenario: Scenario, figure: Published) -> points.Found:
    if figure.kernel is not None:
        return _of_kernel(scenario, figure.metric, figure.kernel)
    if figure.basis == "memory":
        return points.memory_metric(scenario, figure.metric, figure.step)
    if figure.basis == "run":
        if (search := points.CAPACITIES.get(figure.metric)) is not None:
            most = search(scenario)
            what = "requests per second" if figure.metric == "max_request_rate" else "users at once"
            return most, f"{most:.3g} {what} meet the slo"
        result = sim.simulate(scenario, keep_steps=False)
        reached, summary = points.run_metric(result, figure.metric), result.summary
        if reached is None:
            name = figure.metric
            raise SpecError(f"published.metric: this run has no {name} (request_goodput needs an slo, USD a price).")
        shares = points.shares_text(summary.get("bound_share") or {})
        return reached, f"a run of {summary['duration']:.3g} s, {shares}"
    assert figure.step is not None
    shape, costs = points.batch_shape(figure.step, scenario), step_costs(scenario)
    estimate = costs.estimate(shape)
    if figure.operator:
        return _of_operators(scenario, figure, estimate)
    value = points.step_metrics(scenario, estimate, shape, costs.tokens_per_decode(shape))[figure.metric]
    return value, f"a step of {estimate.duration_s * 1e3:.3g} ms, {points.shares_text(estimate.bound_share)}"


def _at_peaks(scenario: Scenario, figure: Published, predicted: float) -> dict[str, float]:
    """What the datasheet's peaks alone give for a kernel's or step's time or rate, by the figure's family."""
    if figure.baseline or figure.metric in ("share", "roofline_us"):
        return {}
    if figure.kernel is not None:
        work = _kernel_work(scenario, figure.kernel)
        timer = OperatorTimer(scenario.hardware, load_calibration(scenario.hardware, scenario.engine.profile))
        share = points.roofline_s(work, scenario.hardware) / timer.time(work).duration_s
    elif figure.basis in ("step", "operator") and figure.step is not None:
        estimate = step_costs(scenario).estimate(points.batch_shape(figure.step, scenario))
        rows = [row for row in estimate.rows if not figure.operator or _is_named(row, figure.operator)]
        peaks_s = sum(row.count * points.roofline_s(row.work, scenario.hardware) for row in rows)
        share = peaks_s / (sum(row.duration_s for row in rows) if figure.operator else estimate.duration_s)
    else:
        return {}
    return {figure.family: predicted * share if figure.metric_spec.is_better_low else predicted / share}


def _is_named(row: OperatorEstimate, names: Sequence[str]) -> bool:
    return any(name in (row.name, row.name.split("@")[0], row.work.family) for name in names)


def _of_operators(scenario: Scenario, figure: Published, estimate: StepEstimate) -> points.Found:
    """Operators by name, name without layer label, or family. Raises SpecError for none."""
    named: dict[str, OperatorEstimate] = {}
    for name in figure.operator:
        rows = [row for row in estimate.rows if _is_named(row, (name,))]
        if not rows:
            known = sorted({row.name for row in estimate.rows} | {row.work.family for row in estimate.rows})
            near = did_you_mean(name, known)
            raise SpecError(f"published.operator: got {name!r}, this step has {', '.join(known)}.{near}")
        named |= {row.name: row for row in rows}
    rows = list(named.values())
    seconds = sum(row.duration_s for row in rows)
    values = {
        "time_us": seconds * _S,
        "layer_time_us": sum(row.time.duration_s for row in rows) * _S,
        "roofline_us": sum(row.count * points.roofline_s(row.work, scenario.hardware) for row in rows) * _S,
        "tflops": sum(row.flops for row in rows) / seconds / 1e12,
        "gb_per_s": sum(row.hbm_bytes for row in rows) / seconds / 1e9,
        "share": seconds / estimate.duration_s,
    }
    largest = max(rows, key=lambda row: row.duration_s)
    made_of = f"{len(rows)} operators, of them {largest.name} {largest.duration_s / seconds:.0%} ({largest.bound})"
    return values[figure.metric], made_of


def _of_kernel(scenario: Scenario, metric: str, kernel: KernelShape) -> points.Found:
    """A kernel by the device's calibration, timed alone as in kernel tables."""
    work = _kernel_work(scenario, kernel)
    time = OperatorTimer(scenario.hardware, load_calibration(scenario.hardware, scenario.engine.profile)).time(work)
    seconds = time.duration_s
    values = {
        "time_us": seconds * _S,
        "roofline_us": points.roofline_s(work, scenario.hardware) * _S,
        "tflops": work.flops / seconds / 1e12,
        "gb_per_s": (work.hbm_bytes or (work.message.bytes_ if work.message else 0.0)) / seconds / 1e9,
    }
    return values[metric], f"{seconds * _S:.4g} us, bound by {time.bound}"


_DIMENSIONS = ("technique", "device", "kind", "basis")
_FAMILIES = ("kernels", "steps", "memory", "systems", "system ratios")


def validate_published(path: str | Path, progress: Progress | None = None) -> report.ValidationReport:
    """Predict the figure of every `*.yaml` below `path`, or of one file. Failures are listed with the reason. Raises
    SpecError if none can be predicted."""
    root = Path(path)
    files = [root] if root.is_file() else sorted(file for end in ("yaml", "yml") for file in root.rglob(f"*.{end}"))
    if not files:
        raise SpecError(f"validate published {path}: has no *.yaml; give a folder of scenarios with `published`.")
    pairs: list[Prediction] = []
    reasons: list[tuple[str, str]] = []
    for file in reported(files, len(files), progress):
        try:
            pairs.append(_predicted(file))
        except PerfmodelError as error:
            reasons.append((file.name, str(error)))
    if not pairs:
        raise SpecError(reasons[0][1])
    comparisons = []
    for family in _FAMILIES:
        members = [pair for pair in pairs if family in pair.metrics]
        dimensions = {name: report.Dimension.of([pair.row.labels[name] for pair in members]) for name in _DIMENSIONS}
        comparisons.append(report.Comparison.of(family, report.rows_of(family, members), "as published", dimensions))
    comparisons = [item for item in comparisons if len(item.rows)]
    facts = [pair.details for pair in pairs]
    return replace(
        report.report_of("published", pairs, reasons, comparisons),
        worst=[
            {
                "metric": fact["metric"],
                "row": f"{fact['id']} ({fact['technique']}, {fact['source']})",
                "predicted": fact["predicted"],
                "measured": fact["published"],
                "error": fact["ratio"] - 1,
                "breakdown": {"why": fact["reason"]},
            }
            for fact in sorted(facts, key=lambda fact: -abs(fact["ratio"] - 1))[:10]
        ],
        figures=sorted(facts, key=lambda fact: (_FAMILIES.index(fact["family"]), fact["technique"], fact["id"])),
    )


def _predicted(file: Path) -> Prediction:
    """A file's figure and prediction; of a range, the value nearest to the prediction."""
    scenario = load_scenario(file)
    predicted, made_of = predict(scenario, file)
    figure = block_as(scenario.published, Published)
    assert figure is not None  # else nothing was predicted
    published, family, name = figure.value, figure.family, figure.id or file.stem
    if isinstance(published, tuple):
        published = min(max(predicted, published[0]), published[1])
    labels = {
        "technique": figure.technique,
        "device": scenario.hardware.name,
        "kind": "ratio" if figure.baseline else "absolute",
        "basis": figure.basis,
    }
    details = {
        "id": name,
        "file": file.name,
        "technique": figure.technique,
        "family": family,
        "metric": figure.metric,
        "unit": figure.unit,
        "predicted": predicted,
        "published": published,
        "ratio": predicted / published,
        "source": figure.source,
        "reason": ". ".join(part.rstrip(".") for part in (figure.note, made_of) if part),
        "fitted": figure.fitted,
    }
    trivial = _at_peaks(scenario, figure, predicted)
    row = Observation(name, scenario, {family: published}, labels=labels, source=figure.source, trivial=trivial)
    return Prediction(row, {family: predicted}, scenario=scenario, details=details)
