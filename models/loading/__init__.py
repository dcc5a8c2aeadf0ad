"""Formats on disk: GGUF files, Hugging Face folders, orbax checkpoints."""
