"""The base of every specification read from a file: frozen, unknown keys refused."""

__all__ = ["Spec"]

from pydantic import BaseModel, ConfigDict


class Spec(BaseModel):
    """Immutable, validated, and closed: a key that is not a field is an error, never ignored."""

    # Validators are built when something is first read with them: a run uses a third of the specs that it imports.
    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=False, allow_inf_nan=False, defer_build=True
    )
