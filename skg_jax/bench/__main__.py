import sys

from skg_jax.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
