"""What the benchmark's scripts set that its rows do not say, by engine, devices and concurrency (`recipes.yaml`)."""

__all__ = ["recipe_arguments"]

from functools import lru_cache
from pathlib import Path

from perfmodel.files.base import Spec
from perfmodel.files.units import PositiveInt
from perfmodel.files.validation import parse
from perfmodel.files.yaml_loader import load_yaml

_FILE = Path(__file__).with_name("recipes.yaml")


class _Setting(Spec):
    """One argument of an engine.

    hardware:          devices whose scripts have it; none: all
    least_concurrency: requests in flight from which on it holds
    """

    engine: str
    argument: str
    value: PositiveInt
    hardware: tuple[str, ...] = ()
    least_concurrency: PositiveInt = 1


class _Recipes(Spec):
    """Later settings replace earlier ones. unconfirmed: read from scripts from memory."""

    settings: tuple[_Setting, ...]
    unconfirmed: bool = False


@lru_cache(maxsize=1)
def _recipes() -> _Recipes:
    loaded = load_yaml(_FILE)
    return parse(_Recipes, loaded.data, loaded.positions)


def recipe_arguments(engine: str, hardware: str, concurrency: int) -> dict[str, int]:
    """Arguments of `EngineSpec` that the scripts give.

    engine, hardware: names of the profile and of the device; concurrency: requests in flight
    """
    mine = (each for each in _recipes().settings if each.engine == engine and concurrency >= each.least_concurrency)
    return {each.argument: each.value for each in mine if not each.hardware or hardware in each.hardware}
