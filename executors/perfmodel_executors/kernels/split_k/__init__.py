"""Products whose K is cut into slices, so that few tiles still fill the device."""
