"""Compiled programs on disk: only the first run of a size waits for the compiler."""

from __future__ import annotations

import os
from pathlib import Path

import jax

VARIABLE = "SKG_COMPILE_CACHE"


def enable() -> Path | None:
    """Keep compiled programs in the user's cache folder; for command lines, a library leaves this to its user.

    `$SKG_COMPILE_CACHE` names another folder, or is `off`. A folder that jax was told itself
    (`JAX_COMPILATION_CACHE_DIR`) stays.

    Returns: the folder, or None where there is none or none can be written.
    """
    named = os.environ.get(VARIABLE, "")
    if jax.config.jax_compilation_cache_dir is not None or named == "off":
        return None
    user = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "skg_jax" / "compiled"
    folder = (Path(named) if named else user).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a read-only home is no reason not to run
        return None
    if not os.access(folder, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder
