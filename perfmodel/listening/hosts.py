"""`HostCheck`: by which names a server is called. A page in a browser can reach a machine under a name of its own (DNS
rebinding), and says so in the Host header."""

__all__ = ["HostCheck", "is_loopback"]

from ipaddress import ip_address

_LOCAL = ("localhost", "127.0.0.1", "[::1]", "::1")
_LONGEST_SAID = 80


class HostCheck:
    """Which Host headers are answered.

    host:          where the server listens. What is bound beyond loopback answers to any address in figures, which no
                   rebinding of a domain's name can give
    allowed_hosts: names beside those of this machine; "*" = any
    """

    def __init__(self, host: str, allowed_hosts: tuple[str, ...] = ()) -> None:
        self._names = {*_LOCAL, host.lower(), *(name.lower() for name in allowed_hosts)}
        self._is_loopback = is_loopback(host)

    def refusal(self, host_header: str | None) -> str | None:
        """Why a request with this Host header is not answered; None: it is. Browsers always send one."""
        if host_header is None or "*" in self._names:
            return None
        given = host_header.lower()
        name = given.rsplit(":", 1)[0] if not given.endswith("]") and ":" in given else given
        if name in self._names or (not self._is_loopback and _is_address(name)):
            return None
        return f"Invalid host header: found {name[:_LONGEST_SAID]!r}; name it in --allowed-host"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens at `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_address(name: str) -> bool:
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
