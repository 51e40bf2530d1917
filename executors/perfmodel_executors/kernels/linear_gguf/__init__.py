"""Matrix multiplication by a weight in llama.cpp's blocks, at the activations' own precision."""
