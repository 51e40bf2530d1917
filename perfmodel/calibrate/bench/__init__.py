"""What load tools write about a server, read without conversion: `recognise` finds the format by content."""

__all__: list[str] = []
