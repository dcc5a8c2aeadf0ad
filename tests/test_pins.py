"""Every package that an install brings along is pinned in pyproject.toml, and the pin is what is installed."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
PINS = dict(pin.split("==") for pin in PROJECT["tool"]["uv"]["constraint-dependencies"])
WITHOUT_DEPENDENCIES = {entry["name"] for entry in PROJECT["tool"]["uv"]["dependency-metadata"]}


def installed(name: str) -> str | None:
    """Version of an installed package, None when it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def requires(name: str, extras: set[str]) -> list[Requirement]:
    """What an installed package asks for, on this machine and with these extras."""
    known = name not in WITHOUT_DEPENDENCIES and installed(name)
    asked = [Requirement(text) for text in (metadata.requires(name) or [] if known else [])]
    environments = [{"extra": extra} for extra in extras | {""}]
    return [r for r in asked if r.marker is None or any(r.marker.evaluate(e) for e in environments)]


def closure() -> set[str]:
    """Names of all packages that the project and its extra `dev` bring along, found by walking what is installed."""
    project = PROJECT["project"]
    queue = [Requirement(text) for extra in ("dev", "eval") for text in project["optional-dependencies"][extra]]
    queue += [Requirement(text) for text in project["dependencies"]]
    seen: set[tuple[str, frozenset[str]]] = set()
    while queue:
        requirement = queue.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name != project["name"] and (name, extras) not in seen:
            seen.add((name, extras))
            queue += requires(name, set(extras))
    return {name for name, _ in seen}


def test_installed_packages_are_the_pinned_ones():
    names = closure()
    assert len(names) > 60
    wrong = {name: (installed(name), PINS.get(name)) for name in names if installed(name) != PINS.get(name, "")}
    assert not wrong, "(installed, pinned) differ: run `python3 -m uv sync --extra dev`"


def test_torch_is_nowhere():
    assert not {"torch", "transformers", "llama-cpp-python"} & PINS.keys()


def test_pins_are_exact_sorted_and_unique():
    for key in ("constraint-dependencies", "build-constraint-dependencies"):
        pins = PROJECT["tool"]["uv"][key]
        assert pins == sorted(set(pins)) and all(re.fullmatch(r"[a-z0-9.-]+==[^ ]+", pin) for pin in pins)


def test_python_version_file_is_the_oldest_supported():
    text = (Path(__file__).parent.parent / ".python-version").read_text().strip()
    assert PROJECT["project"]["requires-python"] == f">={text}"
