"""A deployed serving engine: arguments, KV cache beyond paging, speculation."""
