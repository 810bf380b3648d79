"""TESSA: shard-aligned slice adapters, trained through PEFT and served by vLLM."""
