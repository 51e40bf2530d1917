"""`serve`: the emulator's applications on their ports, as its settings say."""

__all__ = ["serve"]

from collections.abc import Callable, Sequence

from perfmodel.listening import Listening, serve_apps
from perfmodel.serve.http.errors import HttpError, error_body
from perfmodel.serve.settings import ServerSettings


async def serve(
    apps: Sequence[Listening],
    settings: ServerSettings,
    on_ready: Callable[[list[int]], None] = lambda _: None,
    on_stalled: Callable[[], None] = lambda: None,
) -> None:
    """Serve `apps` until SIGTERM or SIGINT, as of `serve_apps`.

    settings: where they listen, what they bound, how long answers have at the end
    on_ready, on_stalled: as of `serve_apps`

    Raises SpecError for an address that cannot be had.
    """
    await serve_apps(apps, settings.host, settings.bounds, settings.drain_s, _refusal, on_ready, on_stalled)


def _refusal(status: int, message: str) -> tuple[str, bytes]:
    return "application/json", error_body(HttpError(status, message))
