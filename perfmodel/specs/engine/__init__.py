"""The serving engine as a deployment has it: its arguments, its KV cache beyond paging, speculation."""
