"""The kinds of `perfmodel validate`: rows and predictions as one report."""
