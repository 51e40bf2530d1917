"""A page in this process, and one where no work may begin."""

import pytest


@pytest.fixture(scope="module")
def site():
    from web_site import Site

    found = Site()
    yield found
    found.close()


@pytest.fixture
def nobody_works(monkeypatch, site):
    """Fails where a job begins."""

    def begin(*_):
        raise AssertionError("a question went to a worker")

    monkeypatch.setattr(site.desk.jobs, "begin", begin)
