"""Anytime-valid statistics in pure JAX: one process a file, `init`, `update`, bound. Knows nothing of attention."""
