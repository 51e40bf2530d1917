"""Prefill and decode pools: prompts computed by one, answers by the other, KV on its way between them."""
