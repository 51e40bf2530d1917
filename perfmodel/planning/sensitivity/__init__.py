"""What if: values varied one at a time or on a grid, elasticities, crossovers."""
