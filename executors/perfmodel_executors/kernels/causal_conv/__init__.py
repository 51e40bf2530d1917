"""The causal convolution in front of a scan."""
