"""`PageGuard`: only pages of this server may ask. The Host header, against pages elsewhere that reach this machine
under a name of their own (DNS rebinding); a token, against pages elsewhere that send forms here; headers that keep the
page from loading, or being framed by, anything else."""

__all__ = ["HEADERS", "TOKEN_HEADER", "PageGuard"]

import hmac
import re
import secrets

from starlette.requests import Request

from perfmodel.listening import HostCheck

TOKEN_HEADER = "x-perfmodel-token"

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'; font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),  # inline styles: plotly and progress bars set some
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}

_HOST = re.compile(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


class PageGuard:
    """token: what a page of this server sends with all that changes state"""

    def __init__(self, host: str) -> None:
        self._hosts = HostCheck(host)
        self.token = secrets.token_urlsafe(24)

    def refusal(self, request: Request) -> tuple[int, str] | None:
        """Status and sentence for a request that is not to be answered; else None."""
        host = ", ".join(request.headers.getlist("host"))
        refusal = self._hosts.refusal(host)
        if refusal is not None or not _HOST.fullmatch(host):
            return 400, f"the request is for {host[:80]!r}; open the page by the address that perfmodel web says."
        if request.method in ("GET", "HEAD"):
            return None
        origin = request.headers.get("origin")
        if origin is not None and origin != f"{request.url.scheme}://{host}":
            return 403, "the request came from another page; only this server's own may ask."
        if not hmac.compare_digest(request.headers.get(TOKEN_HEADER, "").encode(), self.token.encode()):
            return 403, "the page is of a server that has ended; load it again."
        return None
