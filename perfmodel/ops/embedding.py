"""Token embedding: a gather of rows."""

__all__ = ["embedding"]

from perfmodel.ops.work import Work


def embedding(num_tokens: float, hidden_size: int, element_bytes: float, *, num_tables: int = 1) -> Work:
    """One row of each table (tokens, learned positions) per token, read; their sum written: (t + 1) n d b bytes.

    Rows that repeat within a step are counted each time; only the touched rows move, never the table. Under tensor
    parallelism each rank owns a slice of the vocabulary, gathers its rows and writes zeros elsewhere, so the traffic
    is counted in full. Source: identity.
    """
    row_bytes = hidden_size * element_bytes
    return Work(
        "embedding",
        "embedding",
        weight_bytes=num_tables * num_tokens * row_bytes,
        activation_bytes=num_tokens * row_bytes,
    )
