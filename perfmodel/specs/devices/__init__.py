"""Where devices are described: files of their own, and tables of siblings; how their names are spelt."""

__all__: list[str] = []
