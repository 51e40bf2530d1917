"""Sockets that are listened on, and how many files that takes."""

__all__ = ["allow_files", "bound_socket"]

import socket
import sys
from contextlib import suppress

from perfmodel.errors import SpecError

_BACKLOG = 2048
_SPARE_FILES = 64  # that the process opens beside connections


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that listens at `host`; port 0: any free one. Raises SpecError for an address that cannot be had."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
        if sys.platform != "win32":  # where it would let another process take the port as well
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise SpecError(f"{host}:{port}: nothing can listen there ({why}); choose another") from None
    sock.listen(_BACKLOG)
    sock.setblocking(False)
    return sock


def allow_files(num_connections: int) -> None:
    """Let this process have as many files open as connections, as far as the machine lets it."""
    if sys.platform != "win32":  # whose sockets are no files
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = num_connections + _SPARE_FILES
        if soft != resource.RLIM_INFINITY and soft < wanted:
            most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            with suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
