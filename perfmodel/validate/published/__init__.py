"""What papers, blogs and documentation published, beside what the model predicts for the same setup."""
