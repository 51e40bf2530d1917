"""Where the page is served: to this machine alone."""

import pytest

pytest.importorskip("jinja2", reason="pages need jinja2, of the extra web")

from perfmodel.errors import SpecError
from perfmodel.web.app import serve_page


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.20", "example.org", ""])
def test_other_machines_are_not_listened_to(host):
    def on_ready(address):
        raise AssertionError(f"listens at {address}")

    with pytest.raises(SpecError, match="expected this machine's own"):
        serve_page(host, 0, on_ready)
