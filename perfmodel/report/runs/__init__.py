"""A run as files: its records, and a timeline."""
