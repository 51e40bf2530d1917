"""HTTP: the routes, bodies and errors of OpenAI's API as vLLM's server has them, in front of an `Emulator`."""

__all__ = ["build_app", "serve"]

from perfmodel.serve.http.app import build_app, serve
