"""Imported before SGLang: empty modules in place of packages that it imports and never calls before its scheduler.

`transformers` comes first, since it would take an empty torchvision for a real one.
"""

__all__: list[str] = []

import importlib.abc
import importlib.machinery
import os
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
warnings.simplefilter("ignore")

_PACKAGES = ("torchvision",)


class _Empty(types.ModuleType):
    """Has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `_PACKAGES` and what is said to be in them."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """A package for each name of these; None for others."""
        is_absent = fullname.split(".")[0] in _PACKAGES
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_absent else None

    def create_module(self, spec: Any) -> types.ModuleType:
        """An empty module."""
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to do."""


importlib.import_module("transformers").AutoProcessor  # noqa: B018  looks whether there is a torchvision
sys.meta_path.append(_Finder())
