"""`Guard`: who may ask. The size of headers and their Host; the API key; and that weights are loaded."""

__all__ = ["Guard"]

import hmac
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.types import Scope

from perfmodel.listening import HostCheck, is_cross_site
from perfmodel.serve.http.errors import HttpError
from perfmodel.serve.paced_clock import PacedClock
from perfmodel.serve.settings import ServerSettings

# vLLM's server asks for its key below /v1 alone; its /invocations and /generative_scoring generate for anybody, and its
# /reset_prefix_cache, which is there in development mode only (VLLM_SERVER_DEV_MODE=1), asks nobody.
_KEYED = ("/v1", "/reset_prefix_cache", "/invocations", "/generative_scoring")
_CHANGES = ("/reset_prefix_cache",)  # something without a body that no form could have sent
_ANYTIME = ("/metrics", "/version", "/openapi.json")  # before weights are loaded, too


class Guard:
    """Lets requests in by `settings`.

    clock: of the deployment, whose weights load from its beginning on
    """

    def __init__(self, settings: ServerSettings, clock: PacedClock) -> None:
        self._settings, self._clock = settings, clock
        self._hosts = HostCheck(settings.host, settings.allowed_hosts)
        self._key = None if settings.api_key is None else sha256(settings.api_key.encode()).digest()

    def check(self, scope: Scope) -> None:
        """Raises HttpError for a request that is not to be answered."""
        headers, path = Headers(scope=scope), scope["path"]
        if (why := self._settings.bounds.refusal(scope)) is not None:
            raise HttpError(431, why)
        if (why := self._hosts.refusal(headers.get("host"))) is not None:
            raise HttpError(400, why)
        if self._key is not None and path.startswith(_KEYED) and scope["method"] != "OPTIONS":
            self._check_key(headers.get("authorization", ""))
        if path in _CHANGES and is_cross_site(headers):
            raise HttpError(403, "a form, or a page of another site, asks for it; send it from a program")
        if self._settings.cold_start_s and path not in _ANYTIME:
            self._check_ready()

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
