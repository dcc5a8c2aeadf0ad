"""Computes the golden values anew and runs the tests that use them, so that nothing rests on stored numbers:

    python -m tests.golden.compare_live --oracle PYTHON --models DIR [pytest arguments]

`PYTHON` is an interpreter with what make_golden.py needs; this program runs in the project's own environment.
"""

import argparse
import os
import subprocess
import sys
import tempfile

TESTS = ["tests/models/test_golden.py", "tests/models/test_decoder.py", "tests/models/test_gguf.py"]
TESTS += ["tests/test_tokenizer.py", "tests/test_chat.py"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oracle", required=True, help="interpreter with torch and transformers")
    parser.add_argument("--models", required=True, help="folder with NAME.gguf of the built-in models")
    args, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        make = [args.oracle, "-m", "tests.golden.make_golden", "--models", args.models, "--out", folder]
        subprocess.run(make, check=True)
        environment = os.environ | {"SKG_GOLDEN": folder, "SKG_MODELS": args.models}
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "", *TESTS, *rest], env=environment
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
