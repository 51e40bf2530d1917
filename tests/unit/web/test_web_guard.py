"""Who may ask: only pages of this server."""

import pytest

pytest.importorskip("starlette", reason="the page needs starlette, of the extra web")

from starlette.requests import Request

from perfmodel.web.app import HEADERS, TOKEN_HEADER, PageGuard


def refusal(guard, method="POST", host="127.0.0.1:8080", **headers):
    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    hosts = [host] if isinstance(host, str) else host
    raw += [(b"host", each.encode("latin-1")) for each in hosts]
    scope = {"type": "http", "method": method, "path": "/ask", "query_string": b"", "headers": raw, "scheme": "http"}
    return guard.refusal(Request(scope | {"server": ("127.0.0.1", 8080)}))


@pytest.fixture
def guard():
    return PageGuard("127.0.0.1")


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost", "LOCALHOST:1", "[::1]:8080"])
def test_this_machine_is_called_by_its_names(guard, host):
    assert refusal(guard, "GET", host) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "127.0.0.1.evil.example",
        "localhost.evil.example:80",
        "",
        [],
        ["127.0.0.1", "evil.example"],
        ["evil.example", "127.0.0.1"],
        "localhost:[",
        "localhost:80@evil.example",
        "localhost:80/x",
        "user@localhost",
        "[::1",
        "127.0.0.1:999999",
        "loc\xe4lhost",
        "0.0.0.0",
        "10.0.0.1",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_another_name_is_refused_as_of_a_page_that_rebinds_its_own(guard, host, method):
    status, sentence = refusal(guard, method, host, x_perfmodel_token=guard.token)
    assert status == 400
    assert sentence.isprintable()
    assert len(sentence) < 250


def test_what_changes_state_needs_the_token_and_this_origin(guard):
    good = {TOKEN_HEADER: guard.token}
    assert refusal(guard, **good) is None
    assert refusal(guard, origin="http://127.0.0.1:8080", **good) is None
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"):
        assert refusal(guard, method)[0] == 403
    for origin in ("http://evil.example", "null", "https://127.0.0.1:8080", "http://127.0.0.1:8081", ""):
        assert refusal(guard, origin=origin, **good)[0] == 403
    for token in ("", guard.token[:-1], guard.token + "x", "\xff" * 40, PageGuard("127.0.0.1").token):
        assert refusal(guard, **{TOKEN_HEADER: token})[0] == 403


def test_each_server_has_a_token_of_its_own():
    assert len({PageGuard("127.0.0.1").token for _ in range(20)}) == 20


def test_a_page_loads_from_here_alone_and_is_framed_by_nothing():
    policy = dict(part.strip().split(" ", 1) for part in HEADERS["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"  # no inline script, no eval
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert not any("http" in sources or "*" in sources for sources in policy.values())
