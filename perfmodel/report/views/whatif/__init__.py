"""A what-if as a document: its answer in sentences, its tables, its pictures."""
