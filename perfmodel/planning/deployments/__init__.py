"""The best candidates of a plan, simulated; the choice among them, its doubt, in words, tables and files."""
