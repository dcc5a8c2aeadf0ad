"""`python -m skg_jax.bench COMMAND`: measurements, with dense always beside. A command is a module with a `main`."""
