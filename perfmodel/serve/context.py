"""`beyond_context`: what is said of a request that no context of the model holds: vLLM's words, which clients know."""

__all__ = ["beyond_context"]

from perfmodel.errors import WorkloadError


def beyond_context(max_model_len: int, found: str, way_out: str) -> WorkloadError:
    """The error that says so.

    max_model_len: tokens of the context; found: what does not fit; way_out: what the client can do
    """
    return WorkloadError(f"This model's maximum context length is {max_model_len} tokens. However, {found}; {way_out}.")
