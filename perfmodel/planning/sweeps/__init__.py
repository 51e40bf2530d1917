"""Many scenarios at once: points and the metrics asked of them, over processes or Ray, with a store."""
