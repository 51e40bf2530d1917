"""`--tp 4`, `--input 2k`: flags that stand for one `--set` each, and the overrides that they mean."""

__all__ = ["PARALLELISM", "SHORT_FORMS", "STEP_FORMS", "ShortForm", "short_overrides"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from perfmodel.answers.asked import Asked
from perfmodel.errors import SpecError


@dataclass(frozen=True, slots=True)
class ShortForm:
    """What a flag sets.

    field:   of a scenario
    value:   as `--set` takes it, with a place for the flag's own
    in_plan: whether plans search over the field: there the flag is the only value to try
    """

    field: str
    value: str = "{}"
    in_plan: bool = True

    def override(self, value: int | bool | str, is_plan: bool = False) -> str:
        """`engine.tensor_parallel_size=4`, in a plan `plan.space.tensor_parallel_size=[4]`."""
        text = self.value.format(str(value).lower())
        if is_plan and self.in_plan:
            return f"plan.space.{self.field.rpartition('.')[2]}=[{text}]"
        return f"{self.field}={text}"


_FIXED = "{{distribution: fixed, value: {}}}"
SHORT_FORMS: Mapping[str, ShortForm] = {
    "tp": ShortForm("engine.tensor_parallel_size"),
    "pp": ShortForm("engine.pipeline_parallel_size"),
    "dp": ShortForm("engine.data_parallel_size"),
    "ep": ShortForm("engine.enable_expert_parallel"),
    "input": ShortForm("traffic.input_tokens", _FIXED, in_plan=False),
    "output": ShortForm("traffic.output_tokens", _FIXED, in_plan=False),
    "price": ShortForm("price.usd_per_gpu_hour", in_plan=False),
}
PARALLELISM = ("tp", "pp", "dp", "ep")
STEP_FORMS = (*PARALLELISM, "input", "output")  # of commands without costs
_SIZES = ("tp", "pp", "dp")  # their product is the number of devices


def short_overrides(
    given: Mapping[str, Any], overrides: Sequence[str] | None, asked: Asked | None = None, is_plan: bool = False
) -> list[str]:
    """`overrides`, and those that the flags given stand for.

    given:   flag -> its value, as the command line has it
    asked:   the scenario's other flags; is_plan: what is given is the only value that the plan tries

    Raises SpecError for a field that a flag and `--set` both give, for sizes with another product than the number of
    devices in `--hardware 8xh100`, and for prices of devices that `--hardware` does not name.
    """
    texts = list(overrides or ())
    if "price" in given:
        given = {**given, "price": _prices(given["price"], asked)}
    for name, value in given.items():
        form = SHORT_FORMS[name]
        places = (form.field, form.override(value, is_plan).partition("=")[0])
        for text in texts:
            if any(_gives(text, place) for place in places):
                raise SpecError(f"--{name} {value} beside --set {text}: both give {form.field}; leave one out.")
    chosen = {**given, **({} if is_plan or asked is None else _rest_of_server(given, asked))}
    return [*texts, *(SHORT_FORMS[name].override(value, is_plan) for name, value in chosen.items())]


def _gives(text: str, place: str) -> bool:
    """Whether the override `text` is of the field `place`, of something in it, or of a block that has it."""
    from perfmodel.specs.overrides import parse_override

    override, path = parse_override(text), tuple(place.split("."))
    num_shared = min(len(override.path), len(path))
    value = override.value
    for key in path[num_shared:]:
        value = value.get(key) if isinstance(value, dict) else None
    return override.path[:num_shared] == path[:num_shared] and (value is not None or len(override.path) >= len(path))


def _prices(text: str, asked: Asked | None) -> str:
    """`h100=2,h200=3` as a mapping; a number as it is."""
    if "=" not in text:
        return text
    from perfmodel.files.device_tables import named
    from perfmodel.specs.devices import counted_device

    pairs = [pair.partition("=") for pair in text.split(",")]
    flag = "" if asked is None else asked.given.get("hardware", "")
    devices = [counted_device(part)[1] for part in flag.split(",") if part.strip()]
    for name, _, usd in pairs:
        if not usd.strip() or not name.strip():
            missing = f"{name!r} has no price" if name.strip() else f"no device has the price {usd!r}"
            raise SpecError(f"--price {text}: {missing}; write h100=2.10,h200=3.")
        if devices and _own_name(name) not in map(_own_name, devices):
            raise SpecError(f"--price {text}: --hardware names no {name.strip()}, but {', '.join(devices)}.")
        if not devices and named(name) is None:
            raise SpecError(f"--price {text}: no device is called {name.strip()}; see `perfmodel hardware list`.")
    return "{" + ", ".join(f"{name.strip()}: {usd.strip()}" for name, _, usd in pairs) + "}"


def _own_name(device: str) -> str:
    from perfmodel.files.device_tables import named

    entry = named(device)
    return device.strip() if entry is None else entry.name


def _rest_of_server(given: Mapping[str, Any], asked: Asked) -> dict[str, int]:
    """What `tp` is where `--hardware 8xh100` gives the number of devices and other sizes are given."""
    from perfmodel.specs.devices import counted_device

    count, device = counted_device(asked.given.get("hardware", ""))
    sizes = {name: int(given[name]) for name in _SIZES if name in given}
    if count is None or not sizes:
        return {}
    rest, remainder = divmod(count, prod(sizes.values()))
    if remainder or rest < 1 or ("tp" in sizes and rest != 1):
        shown = " ".join(f"--{name} {size}" for name, size in sizes.items())
        raise SpecError(
            f"--hardware {count}x{device} with {shown}: got {prod(sizes.values())} devices of {count}; the product of "
            f"--tp, --pp and --dp is the number of devices."
        )
    return {} if "tp" in sizes else {"tp": rest}
