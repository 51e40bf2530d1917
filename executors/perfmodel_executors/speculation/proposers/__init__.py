"""Who drafts: text, a decoder, heads or a layer on the model's own states."""
