"""`perfmodel web`: the planner in a browser, on this machine."""

__all__ = ["web"]

from typing import Annotated

import typer

from perfmodel.cli.terminal import say
from perfmodel.errors import MissingExtraError


def web(
    host: Annotated[
        str, typer.Option("--host", metavar="HOST", help="Where to listen; this machine alone.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="PORT", help="0 takes a free one.", min=0, max=65535)] = 0,
    is_opened: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
) -> None:
    """Open a page on which deployments are changed by hand and looked at: memory, steps, traffic, plans; until ctrl-C.

    Everything runs on this machine, offline; every view says the command that gives the same figures.
    """
    try:
        from perfmodel.web.server import serve_page
    except ImportError as error:
        raise MissingExtraError(
            f"perfmodel web needs {error.name}, which is not installed: pip install '.[web]' in the checkout."
        ) from None

    def on_ready(address: str) -> None:
        say(f"listening on {address}")
        if is_opened:
            import webbrowser

            webbrowser.open(address)

    serve_page(host, port, on_ready)
