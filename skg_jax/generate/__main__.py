import sys

from skg_jax.generate.cli import main

if __name__ == "__main__":
    sys.exit(main())
