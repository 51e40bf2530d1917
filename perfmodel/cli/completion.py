"""Names that a shell completes: of the files that are there, none of which is parsed."""

__all__ = ["devices", "models", "scenarios", "studies", "traffic"]

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfmodel.files.catalog import Kind


def scenarios(incomplete: str) -> list[str]:
    """Scenarios that come along."""
    return _names("scenarios", incomplete)


def studies(incomplete: str) -> list[str]:
    """Studies that come along."""
    return _names("studies", incomplete)


def models(incomplete: str) -> list[str]:
    """Models with a card."""
    return _names("models", incomplete)


def traffic(incomplete: str) -> list[str]:
    """Traffic that comes along."""
    return _names("traffic", incomplete)


def devices(incomplete: str) -> list[str]:
    """Devices; of several, separated by commas, the last one."""
    others, comma, last = incomplete.rpartition(",")
    from perfmodel.files.device_tables import device_names

    return [f"{others}{comma}{name}" for name in device_names() if name.startswith(last)]


def _names(kind: "Kind", incomplete: str) -> list[str]:
    from perfmodel.files.catalog import list_names

    return [name for name in list_names(kind) if name.startswith(incomplete)]
