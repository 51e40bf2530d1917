"""Both products with experts in 8 or 4 bits."""
