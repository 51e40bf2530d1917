"""A study's file, the points that it is made of, measured quality beside them."""
