"""The best candidates of a plan, simulated; the choice among them, its confidence, as text, tables and files."""
