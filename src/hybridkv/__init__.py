"""Plan, share, schedule and simulate the KV cache of hybrid LLMs."""
