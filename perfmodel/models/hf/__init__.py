"""Reading a Hugging Face `config.json`: fields under all their names, then mixers, feed-forwards and layer patterns."""

__all__: list[str] = []
