"""The comparison with published figures, made once for all tests that read it: they share a worker."""

from functools import cache

import pytest

from perfmodel.evidence.kinds.published import validate_published
from perfmodel.evidence.report import ValidationReport
from perfmodel.specs import data_dir

PUBLISHED = data_dir("scenarios") / "published"
IN_ONE_WORKER = pytest.mark.xdist_group("published figures")


@cache
def published_report() -> ValidationReport:
    return validate_published(PUBLISHED)
