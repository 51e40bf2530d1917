"""What a softmax over keys has beside scores: a cap, a sink."""
