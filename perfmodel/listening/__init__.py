"""Listening on a socket, safely: connections within bounds, Host headers, and applications until a signal ends them.

It knows HTTP as uvicorn speaks it, and not what is answered: that is an ASGI application's.
"""

__all__ = [
    "ARRIVED",
    "BoundedProtocol",
    "Bounds",
    "HostCheck",
    "Listening",
    "is_cross_site",
    "is_loopback",
    "serve_apps",
]

from perfmodel.listening.bounds import ARRIVED, BoundedProtocol, Bounds
from perfmodel.listening.hosts import HostCheck, is_loopback
from perfmodel.listening.origins import is_cross_site
from perfmodel.listening.server import Listening, serve_apps
