"""`python -m skg_jax.generate --prompt "..."`: text on stdout, statistics and the certificate on stderr."""
