#!/bin/sh
# The server behind tests/data/bench: what a reader's own script looks like.
MODEL=meta-llama/Llama-3.1-8B-Instruct
exec vllm serve "$MODEL" \
  --max-num-seqs 256 \
  --port 8000
