"""Models read from the headers of files with weights (GGUF, safetensors)."""
