"""Keeps every version that an install may meet, transitive ones too, pinned in pyproject.toml.

    python3 .ci/pins.py            resolves anew and rewrites the two lists of pins
    python3 .ci/pins.py --check    exits 1 when a package is missing from the lists, or stands there for nothing

uv's own lock file names hosts and stays out of git, so the pins are uv constraints: they bind what `uv sync` and
`uv run` resolve, and install nothing by themselves. The resolution happens in a temporary folder.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTS = ("constraint-dependencies", "build-constraint-dependencies")  # what is installed; what builds the package


def uv(*args: str, cwd: Path) -> str:
    """Runs uv and returns its standard output; its errors go to the terminal."""
    command = [sys.executable, "-m", "uv", *args]
    return subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


def with_pins(text: str, pins: dict[str, list[str]]) -> str:
    """Returns the text of pyproject.toml with both lists of pins replaced."""
    for name, versions in pins.items():
        body = "".join(f'  "{version}",\n' for version in versions)
        text, found = re.subn(rf"(?m)^{name} = \[[^\]]*\]", f"{name} = [\n{body}]", text)
        if found != 1:
            raise ValueError(f"pyproject.toml must hold exactly one list {name}, has {found}.")
    return text


def locked(lock: str) -> list[str]:
    """Lists `name==version` of every package in the text of a uv.lock, but for the project itself."""
    packages = [package for package in tomllib.loads(lock)["package"] if "registry" in package["source"]]
    names = [package["name"] for package in packages]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(twice)} resolve to several versions; give the pins markers before going on.")
    return sorted(f"{package['name']}=={package['version']}" for package in packages)


def resolve(text: str) -> dict[str, list[str]]:
    """Resolves a pyproject.toml in a temporary folder and returns both lists of pins."""
    tables = tomllib.loads(text)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pyproject.toml").write_text(text)
        (folder / "README.md").touch()
        shutil.copy(ROOT / ".python-version", folder)
        uv("lock", "--quiet", cwd=folder)
        (folder / "build.in").write_text("\n".join(tables["build-system"]["requires"]))
        (folder / "pins.txt").write_text("\n".join(tables["tool"]["uv"][LISTS[1]]))
        flags = ("--quiet", "--universal", "--no-header", "--no-annotate", "--no-emit-index-url")
        build = uv("pip", "compile", *flags, "--constraints", "pins.txt", "build.in", cwd=folder)
        return {LISTS[0]: locked((folder / "uv.lock").read_text()), LISTS[1]: sorted(build.splitlines())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when the pins are not complete")
    check = parser.parse_args().check
    path = ROOT / "pyproject.toml"
    text = path.read_text()
    new = with_pins(text, resolve(text if check else with_pins(text, {name: [] for name in LISTS})))
    if check and new != text:
        sys.exit("The pins in pyproject.toml are not complete: run `python3 .ci/pins.py` and commit the result.")
    path.write_text(new)
    print(f"pins: {sum(len(tomllib.loads(new)['tool']['uv'][name]) for name in LISTS)} versions")


if __name__ == "__main__":
    main()
