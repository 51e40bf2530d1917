"""Shared by all tests: the helper modules beside this file can be imported by name, and how far hypothesis looks.

Usually it tries the same examples in every run, so that what passed once passes again. The profile `deep`
(`HYPOTHESIS_PROFILE=deep`, `make test-deep`) draws new ones, HYPOTHESIS_DEPTH times as many (20) as each test asks for.
"""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Answers say which prices are old: to tests it is always the same day.
os.environ["SOURCE_DATE_EPOCH"] = "1795305600"  # 2026-11-22

# Names that no card lists are looked for on the Hub: not by tests, but of a server of their own.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_CACHE"] = os.devnull

sys.path.insert(0, str(Path(__file__).parent))

_IS_DEEP = os.environ.get("HYPOTHESIS_PROFILE") == "deep"
_DEPTH = int(os.environ.get("HYPOTHESIS_DEPTH", "20"))

# No deadlines: these machines are shared
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("deep", max_examples=100 * _DEPTH, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a test asks for by itself overrides its profile, so that is multiplied, too."""
    name = "_hypothesis_internal_use_settings"
    tests = {item.obj for item in items if isinstance(item, pytest.Function) and hasattr(item.obj, name)}
    for test in tests if _IS_DEEP else ():
        own: settings = getattr(test, name)
        if own.max_examples != 100 * _DEPTH:  # the profile's own
            setattr(test, name, settings(own, max_examples=own.max_examples * _DEPTH, deadline=None))
