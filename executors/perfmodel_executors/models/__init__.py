"""One decoder, configured by a `ModelSpec`."""
