"""Tokens of several sequences behind one another, and who works on which."""
