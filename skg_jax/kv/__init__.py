"""The paged KV cache, its key sketch and its integrity metadata."""
