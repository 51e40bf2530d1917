"""Block-sparse attention over paged keys and values."""
