"""Llama and Qwen2 decoders: configuration, forward pass, loading. Attention is an argument; no policy lives here."""
