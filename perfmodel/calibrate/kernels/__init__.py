"""Tables of measured kernels: one file per kind of kernel turns rows into the sizes of a physical form."""

__all__: list[str] = []
