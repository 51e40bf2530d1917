"""Random model, traffic and engine files: shipped files with fields drawn from their schema, scaled or damaged."""

__all__ = ["FILES"]

from functools import cache
from pathlib import Path

from fuzz_draws import damaged, draw_into, scale, spoil
from fuzz_scenarios import DENSE, CaseMakers, FuzzCase, as_yaml
from hypothesis import strategies as st

from perfmodel.files.yaml_loader import load_yaml

ROOT = Path(__file__).parents[1]
_MANY_KEYS = 20_000


@cache
def _shipped(folder: str) -> tuple[Path, ...]:
    return tuple(sorted((ROOT / folder).glob("*.yaml")))


def _changed_file(draw: st.DrawFn, folder: str, schema: str | None) -> bytes:
    """The text of a shipped file with up to three changes; some with thousands of unknown keys or damaged bytes.

    schema: the name of the file's JSON Schema, if it has one
    """
    data = load_yaml(draw(st.sampled_from(_shipped(folder)))).data
    for _ in range(draw(st.integers(0, 2)) if schema else 0):
        draw_into(draw, data, schema or "")
    data = draw(st.sampled_from([scale, scale, spoil]))(draw, data)
    raw = as_yaml(data)
    if draw(st.integers(0, 40)) == 0:
        name = draw(st.sampled_from(sorted(map(str, data)) if isinstance(data, dict) and data else ["x"]))
        raw += "".join(f"{name}_{number}: {number}\n" for number in range(_MANY_KEYS)).encode("utf-8", "replace")
    return damaged(draw, raw) if draw(st.integers(0, 5)) == 0 else raw


@st.composite
def _model(draw: st.DrawFn) -> FuzzCase:
    files = {"m.yaml": _changed_file(draw, "workloads/models", "model")}
    files["s.yaml"] = as_yaml({**DENSE, "model": "./m.yaml", "hardware": "b200-sxm"})
    commands = (("models", "show", "./m.yaml"), ("memory", "s.yaml"), ("simulate", "s.yaml", "--json"))
    return FuzzCase("model file", draw(st.sampled_from(commands)), files)


@st.composite
def _traffic(draw: st.DrawFn) -> FuzzCase:
    files = {"t.yaml": _changed_file(draw, "workloads/traffic", "traffic")}
    files["s.yaml"] = as_yaml({**DENSE, "traffic": "./t.yaml"})
    few = ("--set", "traffic.num_requests=20")
    return FuzzCase("traffic file", ("simulate", "s.yaml", *few, *draw(st.sampled_from([(), ("--json",)]))), files)


@st.composite
def _engine(draw: st.DrawFn) -> FuzzCase:
    files = {"e.yaml": _changed_file(draw, "hardware_specs/engines", None)}
    files["s.yaml"] = as_yaml({**DENSE, "engine": {"profile": "./e.yaml"}})
    commands = (("memory", "s.yaml"), ("simulate", "s.yaml", "--json"), ("explain", "s.yaml"))
    return FuzzCase("engine file", draw(st.sampled_from(commands)), files)


FILES: CaseMakers = {
    "model file": (_model, 3),
    "traffic file": (_traffic, 2),
    "engine file": (_engine, 1),
}
