"""`Guard`: who may ask. The Host header, by which a page in a browser is kept from reaching this machine under a name
of its own (DNS rebinding); the API key; and that weights are loaded."""

__all__ = ["Guard"]

import hmac
from hashlib import sha256
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import Scope

from perfmodel.serve.http.errors import HttpError
from perfmodel.serve.paced_clock import PacedClock
from perfmodel.serve.settings import ServerSettings

_LOCAL = ("localhost", "127.0.0.1", "[::1]", "::1")
_KEYED = "/v1"  # vLLM's server asks for its key below this path alone
_ANYTIME = ("/metrics", "/version", "/openapi.json")  # before weights are loaded, too


class Guard:
    """Lets requests in by `settings`.

    clock: of the deployment, whose weights load from its beginning on
    """

    def __init__(self, settings: ServerSettings, clock: PacedClock) -> None:
        self._settings, self._clock = settings, clock
        self._names = {*_LOCAL, settings.host.lower(), *(name.lower() for name in settings.allowed_hosts)}
        self._key = None if settings.api_key is None else sha256(settings.api_key.encode()).digest()

    def check(self, scope: Scope) -> None:
        """Raises HttpError for a request that is not to be answered."""
        headers, path = Headers(scope=scope), scope["path"]
        self._check_size(scope)
        self._check_host(headers)
        if self._key is not None and path.startswith(_KEYED) and scope["method"] != "OPTIONS":
            self._check_key(headers.get("authorization", ""))
        if self._settings.cold_start_s and path not in _ANYTIME:
            self._check_ready()

    def _check_size(self, scope: Scope) -> None:
        size = sum(len(name) + len(value) for name, value in scope["headers"]) + len(scope.get("raw_path") or b"")
        size += len(scope.get("query_string") or b"")
        if size > self._settings.max_header_bytes:
            limit = self._settings.max_header_bytes
            raise HttpError(431, f"the headers have more than {limit} bytes; send fewer")

    def _check_host(self, headers: Headers) -> None:
        given = headers.get("host")
        if given is None or "*" in self._names:
            return  # browsers always send one
        name = given.lower().rsplit(":", 1)[0] if not given.endswith("]") and ":" in given else given.lower()
        if name in self._names or (not self._settings.is_loopback and _is_address(name)):
            return
        raise HttpError(400, f"Invalid host header: found {name[:80]!r}; name it in --allowed-host")

    def _check_key(self, given: str) -> None:
        scheme, _, key = given.partition(" ")
        digest = sha256(key.encode("utf-8", "surrogateescape")).digest()
        assert self._key is not None
        is_right = hmac.compare_digest(digest, self._key)
        if scheme.lower() != "bearer" or not is_right:
            raise HttpError(401, "Unauthorized", headers={"www-authenticate": "Bearer"})

    def _check_ready(self) -> None:
        left = (self._settings.cold_start_s - self._clock.elapsed_s) / self._clock.speed
        if left > 0:
            after = {"retry-after": str(int(left) + 1)}
            raise HttpError(503, f"weights are loading for {left:.1f} s more", "ServiceUnavailableError", headers=after)


def _is_address(name: str) -> bool:
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
