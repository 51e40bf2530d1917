"""Detection of this machine's processor, memory bandwidth and GPUs."""
