"""Questions that a page asks of fewer requests than a command would by itself, so that nobody waits long for them."""

__all__ = ["fewer_requests"]

from perfmodel.web.state import PageState

_FIELD, _DURATION = "traffic.num_requests", "traffic.duration_s"


def fewer_requests(state: PageState, num_requests: int) -> tuple[str, ...]:
    """The value of `--set` that bounds traffic; nothing where the page says itself how many requests there are,
    or for how long they come."""
    return () if state.get(_FIELD) or state.get(_DURATION) else (f"{_FIELD}={num_requests}",)
