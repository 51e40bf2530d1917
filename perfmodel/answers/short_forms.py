"""`--tp 4`, `--input 2k`: flags that stand for one `--set` each, and the overrides that they mean."""

__all__ = ["PARALLELISM", "SHORT_FORMS", "ShortForm", "short_overrides"]

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

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

    def override(self, value: int | bool, is_plan: bool = False) -> str:
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
}
PARALLELISM = ("tp", "pp", "dp", "ep")
_SIZES = ("tp", "pp", "dp")  # whose product is the number of devices


def short_overrides(
    given: Mapping[str, int | bool], overrides: Sequence[str] | None, asked: Asked | None = None, is_plan: bool = False
) -> list[str]:
    """`overrides` with those of the flags that were given before them.

    Raises SpecError for a field that a flag and `--set` both give, and for sizes whose product is not the number of
    devices in `--hardware 8xh100`.
    """
    found = list(overrides or ())
    for name, value in given.items():
        form = SHORT_FORMS[name]
        places = (form.field, form.override(value, is_plan).partition("=")[0])
        for text in found:
            key = text.partition("=")[0].strip()
            if key in places or key.startswith(tuple(f"{place}." for place in places)):
                raise SpecError(f"--{name} {value} beside --set {text}: both give {form.field}; leave one out.")
    chosen = {**given, **({} if is_plan or asked is None else _rest_of_server(given, asked))}
    return [*(SHORT_FORMS[name].override(value, is_plan) for name, value in chosen.items()), *found]


def _rest_of_server(given: Mapping[str, int | bool], asked: Asked) -> dict[str, int]:
    """What `tp` is where `--hardware 8xh100` gives the number of devices and other sizes are given."""
    from perfmodel.specs.devices.files import counted_device

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
