"""`validate local`: figures of engines for single machines beside predictions, each device counting once (`pooled`)."""

__all__ = ["report_local", "validate_local"]

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from perfmodel.calibrate.local.predictions import LocalPair, predict_rows
from perfmodel.calibrate.local.rows import LocalRow, read_local_rows
from perfmodel.cost.calibrations.backends import load_backends
from perfmodel.cost.calibrations.provenance import FittedSource, Provenance
from perfmodel.trust.setups import setup_of
from perfmodel.validate.pooled import Read, SettingFigure, pooled_report
from perfmodel.validate.report import ValidationReport

Progress = Callable[[int, int], None]
_METRICS = {"tg": "decode_tokens_per_s", "pp": "prompt_tokens_per_s"}
_DIMENSIONS: dict[str, Callable[[LocalRow], str]] = {
    "device": lambda row: row.device,
    "device class": lambda row: row.device_class,
    "backend": lambda row: row.backend,
    "model": lambda row: row.model,
    "gguf type": lambda row: row.gguf_type,
    "test": lambda row: row.test,
    "engine": lambda row: row.tool or "not said",
}
_ABOUT = (
    "Tokens per second of llama.cpp (llama-bench, llama-server, Ollama, LocalScore) and MLX on single machines, each "
    "figure as the steps that it took. Errors are of devices: a device's is the median over its groups (rows of one "
    "setting), a group's is the prediction against the median of its figures. Rows whose flags say that the host was "
    "at fault (slow, anomalous, weak host, power limit, patched kernels, RPC) are listed apart. Figures of the same "
    "table may have been fitted to; `benchmarks/cross_validate_local.py` leaves out whole devices and whole models."
)


def validate_local(path: str | Path, progress: Progress | None = None) -> ValidationReport:
    """Price every row and compare; rows that cannot be priced are listed with the reason.

    Raises SpecError for a file that is no table of such figures.
    """
    rows, left_out = read_local_rows(path)
    return report_local(predict_rows(rows, Path(path).parent, progress), left_out)


def report_local(pairs: Sequence[LocalPair], left_out: Sequence[tuple[str, str]] = ()) -> ValidationReport:
    """The comparison of `pairs`, pooled over devices; left_out: (row, reason) of those that could not be read."""
    covered = [pair for pair in pairs if not pair.reason]
    reasons = [*left_out, *((pair.row.row_id, pair.reason) for pair in pairs if pair.reason)]
    flags = sorted({pair.row.flags for pair in covered if pair.row.is_apart})
    return pooled_report(
        "local",
        Read(len(pairs) + len(left_out), len(covered), reasons),
        _figures([pair for pair in covered if not pair.row.is_apart]),
        _figures([pair for pair in covered if pair.row.is_apart]),
        elsewhere="on other hosts",
        apart_because=f"that the host was at fault: {'; '.join(flags)}",
        provenance=_provenance(covered),
        about=_ABOUT,
    )


def _figures(pairs: Sequence[LocalPair]) -> list[SettingFigure]:
    """Rows of one setting on one device as one."""
    found: dict[tuple[str, str, str], list[LocalPair]] = defaultdict(list)
    for pair in pairs:
        if pair.row.test in _METRICS:
            found[pair.row.device, pair.row.group, pair.row.test].append(pair)
    return [
        SettingFigure(
            _METRICS[mine[0].row.test],
            mine[0].row.row_id,
            mine[0].row.device,
            _setting(mine[0].row),
            {name: of(mine[0].row) for name, of in _DIMENSIONS.items()},
            float(np.median([pair.predicted for pair in mine])),
            float(np.median([pair.row.tokens_per_s for pair in mine])),
            mine[0].interval,
            tuple(pair.row.tokens_per_s for pair in mine),
            setup_of(scenario)._replace(input_tokens=0.0, output_tokens=0.0),  # a test has steps and no requests
        )
        for mine in found.values()
        if (scenario := mine[0].scenario) is not None
    ]


def _setting(row: LocalRow) -> str:
    """What ran on what, in a line."""
    return f"{row.model} {row.gguf_type} on {row.device}, {row.backend}, {row.tool or 'tool not said'}"


def _provenance(pairs: Sequence[LocalPair]) -> Provenance:
    """The files of the engines' backends that predictions came from."""
    engines = {pair.scenario.engine.described.description.name for pair in pairs if pair.scenario is not None}
    fits = [found for engine in sorted(engines) if (found := load_backends(engine)) is not None]
    return Provenance(tuple(FittedSource.of(fit) for fit in fits))
