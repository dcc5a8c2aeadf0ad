"""Llama and Qwen2 decoders: configuration, forward pass, loading. The attention is an argument; no policy lives here."""
