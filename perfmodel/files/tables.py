"""Tables of what others call things: files of `workloads/tables`, whose rows the code that reads them explains."""

from functools import cache
from typing import Any

from perfmodel.files.catalog import find_file
from perfmodel.files.yaml_loader import load_yaml


@cache
def load_table(name: str) -> dict[str, Any]:
    """The table `name`, read once. Raises SpecError for a missing or invalid file."""
    return dict(load_yaml(find_file("tables", name)).data)
