"""Settings that every test shares."""

import os
import re

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# Signatures are checked at run time, every item of a container included. This is what `--jaxtyping-packages` does;
# jaxtyping 0.3.11 misreads that option when it holds both two packages and a checker with arguments.
install_import_hook(
    ["skg_jax", "models"], "beartype.beartype(conf=beartype.BeartypeConf(strategy=beartype.BeartypeStrategy.On))"
)

# The default profile draws the same examples in every run; `--hypothesis-profile=explore` looks for new ones.
settings.register_profile("fixed", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("fixed")


def pytest_configure(config: pytest.Config) -> None:
    """Runs jax on the CPU, even where there is a GPU, unless GPU tests were asked for (`-m gpu`).

    The reference values are the CPU's, and a busy device must not fail the tests.
    """
    if not re.search(r"(?<!not )\b(multi)?gpu\b", config.option.markexpr):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what the machine cannot run, and says why."""
    needed = 2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
    if not needed:
        return
    import jax

    found = sum(device.platform == "gpu" for device in jax.devices())
    if found < needed:
        pytest.skip(f"needs {needed} GPU(s), and jax sees {found}")
