"""Cross-validation of the backends of engines for a single machine: devices and models that no fit has seen.

    python benchmarks/cross_validate_local.py FILE             # prints the tables
    python benchmarks/cross_validate_local.py FILE --report R  # and writes them to R, as JSON beside it

FILE is a table of llama-bench figures with `devices.csv` beside it (`perfmodel validate local`). In ten folds whole
chips are left out, with all boards that have them, then whole models; the backends are fitted anew to the rest. Errors
are |predicted / measured - 1| of tokens per second, of a device the median over its settings, then the median over
devices. Intervals are those of the committed fits (from chips left out), so that their coverage here is that of devices
nobody has fitted. It takes a quarter of an hour.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from perfmodel.cost.calibrations.backends import load_backends
from perfmodel.cost.calibrations.draws import LogNormal
from perfmodel.evidence.fit.backends import Setting, held_out
from perfmodel.evidence.kinds.pooled import pooled_over_devices
from perfmodel.evidence.sources.local import read_local_rows

TESTS = {"tg": "decode", "pp": "prompts"}
TARGETS = {
    ("device", "decode"): {"gpu": 0.12, "apple": 0.12, "apu": 0.15, "cpu": 0.20},
    ("device", "prompts"): {"gpu": 0.20, "apple": 0.20, "cpu": 0.30},
    ("model", "decode"): {"all": 0.12},
    ("model", "prompts"): {"all": 0.20},
}
P90 = 1.2816
WORST = 12
Figure = tuple[Setting, float]


def _interval(setting: Setting) -> tuple[float, float]:
    """80 % of the figures, as factors of the prediction."""
    engine = setting.scenario.engine
    fits = load_backends(engine.described.description.name)
    assert fits is not None
    fit = fits.backends[engine.backend or fits.like]
    seconds = LogNormal.of(fit.prompt_residuals if setting.row.test == "pp" else fit.decode_residuals)
    return 1.0 / seconds.at(P90), 1.0 / seconds.at(-P90)


def _is_within(setting: Setting, predicted: float) -> bool:
    low, high = _interval(setting)
    return low <= setting.measured / predicted <= high


def _stats(figures: Sequence[Figure]) -> dict[str, Any]:
    return pooled_over_devices(
        [setting.row.device for setting, _ in figures],
        [predicted / setting.measured - 1 for setting, predicted in figures],
        [_is_within(setting, predicted) for setting, predicted in figures],
    ).to_json()


def _tables(by: str, figures: Sequence[Figure]) -> dict[str, dict[str, Any]]:
    """Errors of each test, by device class and together."""
    groups: dict[tuple[str, str], list[Figure]] = defaultdict(list)
    for setting, predicted in figures:
        test = TESTS[setting.row.test]
        groups[test, setting.row.device_class].append((setting, predicted))
        groups[test, "all"].append((setting, predicted))
    tables = {}
    for (test, name), result in sorted(groups.items()):
        devices = len({setting.row.device for setting, _ in result})
        target = TARGETS.get((by, test), {}).get(name)
        tables[f"{test}, {name}"] = {"devices": devices, "target": target, **_stats(result)}
    return tables


def _worst(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """The devices that are furthest off, by test, with the settings that say so."""
    by_device: dict[tuple[str, str], list[Figure]] = defaultdict(list)
    for setting, predicted in figures:
        by_device[setting.row.device, TESTS[setting.row.test]].append((setting, predicted))
    rows = [
        {
            "device": device,
            "test": test,
            "error": median(predicted / setting.measured - 1 for setting, predicted in item),
            "settings": len(item),
            "backend": item[0][0].row.backend,
            "tool": item[0][0].row.tool,
        }
        for (device, test), item in by_device.items()
    ]
    return sorted(rows, key=lambda row: -abs(float(str(row["error"]))))[:WORST]


def _cause(row: dict[str, Any]) -> str:
    """What stands out of a device that is far off."""
    few = " from one anonymous host" if row["tool"] == "localscore" and row["settings"] <= 3 else ""
    way = "predicted too fast" if row["error"] > 0 else "predicted too slow"
    return f"{way}{few}"


def _markdown(found: dict[str, Any], command: str) -> str:
    lines = [
        "# Local engines on devices and models that were left out of the fit",
        "",
        f"Written by `{command}`; the figures are in the JSON beside it.",
        "",
        str(__doc__).partition("\n\n")[2].partition("\n\n")[2].strip(),
        "",
    ]
    for by, tables in found["held_out"].items():
        lines += [f"## Whole {'chips' if by == 'device' else 'models'} left out", ""]
        lines += ["| what | devices | settings | median | target | mean | p90 | in 80 % interval |", "|" + "---|" * 8]
        for name, row in tables.items():
            target = f"{row['target']:.0%}" if row["target"] else ""
            lines.append(
                f"| {name} | {row['devices']} | {row['rows']:,} | {row['median_ape']:.1%} | {target} "
                f"| {row['mean_ape']:.1%} | {row['p90_ape']:.1%} | {row['interval_coverage']:.0%} |"
            )
        lines.append("")
    lines += ["## Devices that are furthest off", "", "| device | test | error | settings | what |", "|" + "---|" * 5]
    lines += [
        f"| {row['device']} | {row['test']}, {row['backend']} | {row['error']:+.0%} | {row['settings']} "
        f"| {_cause(row)} |"
        for row in found["worst"]
    ]
    return "\n".join([*lines, "", found["about"], ""])


ABOUT = (
    "Nearly all of these are LocalScore's submissions of one anonymous host each, predicted several times too fast. "
    "What held them back is not recorded; heat, power limits, missing memory modules, models beyond the card's memory "
    "and slices of a cloud's server are known to. Intervals are as wide as that. Of APUs there are three chips, nine "
    "in ten of the settings on one of them: leaving it out leaves ROCm without a build of 2026."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--report", type=Path)
    asked = parser.parse_args()
    rows, _ = read_local_rows(asked.file)
    result: dict[str, Any] = {"held_out": {}, "worst": [], "about": ABOUT}
    for by in ("device", "model"):
        settings, predicted = held_out(
            rows,
            asked.file.parent,
            by,
            lambda backend, by=by: print(f"{by}: {backend}", flush=True),  # type: ignore[misc]
        )
        figures = list(zip(settings, predicted.tolist(), strict=True))
        result["held_out"][by] = _tables(by, figures)
        if by == "device":
            result["worst"] = _worst(figures)
        text = _markdown(result, "python benchmarks/cross_validate_local.py <llama_bench.csv.gz> --report <this file>")
        print(text)
        if asked.report is not None:  # also after the first part: the second takes as long again
            asked.report.write_text(text, encoding="utf-8")
            asked.report.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
