"""What a technique costs in quality: perplexity of a real model on real text, and outputs that stay the same."""
