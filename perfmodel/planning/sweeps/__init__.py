"""Many scenarios at once: points and the metrics asked of them, over processes or Ray, kept in a store."""
