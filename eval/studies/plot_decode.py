"""Pictures of `bench decode --config`: where the time of a step goes in every mode, and latency against context.

python -m eval.studies.plot_decode docs/benchmarks/raw/decode_llama8b_h200.json docs/benchmarks/decode_llama8b.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# What the name of a kernel begins with or holds; the first that fits counts.
PARTS = {
    "matrix products": ("gemm",),
    "attention": ("paged_decode", "sdpa", "cudnn"),
    "sketch scoring": ("sketch_score",),
    "selection": ("select_pages",),
    "append": ("paged_append",),
    "audit: bounds to units": ("audit_units",),
    "audit: keys read": ("audit_mass",),
}
REST = "everything else"
COLORS = ["#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#eeca3b", "#e45756", "#bab0ac"]
EXACT, GUARDED, SPARSE, BASELINE = "forced-fallback", "guarded", "sparse", "cudnn"
LINES = {BASELINE: "dense, cuDNN", EXACT: "exact over pages", GUARDED: "guarded", SPARSE: "sparse, no audit"}


def times_of_parts(kernels: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of the parts of a step, from its kernels. Where none is made to append, scatters do it."""
    scatters = not any("paged_append" in kernel for kernel in kernels)
    found = dict.fromkeys([*PARTS, REST], 0.0)
    for kernel, times in kernels.items():
        part = next((part for part, words in PARTS.items() if any(word in kernel for word in words)), REST)
        found["append" if scatters and "input_scatter" in kernel else part] += times["us"] / 1e3
    return found


def crossover(cells: list[dict[str, Any]]) -> float | None:
    """Context at which the medians of guarded and exact steps are equal, between the two measured ones around it.

    Where the exact mode was not measured, cuDNN stands for it.
    """
    points = []
    for cell in sorted(cells, key=lambda cell: cell["context"]):
        exact = cell["modes"].get(EXACT) or cell["modes"][BASELINE]
        points.append((cell["context"], cell["modes"][GUARDED]["step_ms"]["p50"] - exact["step_ms"]["p50"]))
    for (left, above), (right, below) in zip(points, points[1:], strict=False):
        if above > 0 >= below:
            return left + (right - left) * above / (above - below)
    return None


def waterfall(axis, cell: dict[str, Any]) -> None:
    """Kernel time of a step by part, and the 99th percentile of the whole step."""
    modes = {name: mode for name, mode in cell["modes"].items() if "kernels" in mode}
    left = dict.fromkeys(modes, 0.0)
    parts = {name: times_of_parts(mode["kernels"]) for name, mode in modes.items()}
    for part, color in zip([*PARTS, REST], COLORS, strict=True):
        width = {name: parts[name][part] for name in modes}
        axis.barh(list(modes), list(width.values()), left=list(left.values()), color=color, label=part)
        left = {name: left[name] + width[name] for name in modes}
    for place, mode in enumerate(modes.values()):
        step = mode["step_ms"]
        axis.text(max(step["p99"], 0), place, f"  P99 {step['p99']:.1f} (n={step['n']})", va="center", fontsize=8)
    axis.set(xlabel="ms a step", title=f"batch {cell['batch']}, {cell['context']:,} tokens", xlim=(0, 26))
    axis.invert_yaxis()


def latency(axis, cells: list[dict[str, Any]]) -> None:
    """Median of a step against the context, and where guarded and exact steps take equally long."""
    for (name, label), color in zip(LINES.items(), ["#4c78a8", "#72b7b2", "#e45756", "#54a24b"], strict=True):
        points = [(c["context"], c["modes"][name]["step_ms"]["p50"]) for c in cells if name in c["modes"]]
        axis.plot(*zip(*sorted(points), strict=True), "o-", color=color, label=label, markersize=4) if points else None
    where = crossover(cells)
    if where:
        axis.axvline(where, color="#888", linestyle=":")
        axis.text(where, axis.get_ylim()[1], f" {where:,.0f}", fontsize=8, va="top")
    ticks = sorted(cell["context"] for cell in cells)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{tick // 1024}K" for tick in ticks])
    axis.set(xlabel="tokens of context", ylabel="ms a step (P50)", title=f"batch {cells[0]['batch']}")
    axis.set_ylim(bottom=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    record = json.loads(args.record.read_text())
    whole = [cell for cell in record["cells"] if cell["context"] == cell["capacity"]]
    sizes = dict.fromkeys((cell["batch"], cell["capacity"]) for cell in record["cells"])
    by_size = [[c for c in record["cells"] if (c["batch"], c["capacity"]) == size] for size in sizes]
    several = [cells for cells in by_size if len(cells) > 1]
    rows = [max(len(cell["modes"]), 2) for cell in whole]
    figure = plt.figure(figsize=(9, 0.45 * sum(rows) + 1.1 * len(rows) + 3), layout="constrained")
    panels: Any = figure.subfigures(2, 1, height_ratios=[0.45 * sum(rows) + 1.1 * len(rows), 3])
    upper, lower = panels
    axes = upper.subplots(len(whole), 1, squeeze=False, height_ratios=rows)
    for axis, cell in zip(axes[:, 0], whole, strict=True):
        waterfall(axis, cell)
    axes[0, 0].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    for axis, cells in zip(lower.subplots(1, len(several), squeeze=False)[0], several, strict=True):
        latency(axis, cells)
        axis.legend(frameon=False, fontsize=7)
    figure.suptitle(f"{record['settings']['config']}, one H200: device time of a step, kernel by kernel", fontsize=10)
    figure.savefig(args.picture, dpi=130)


if __name__ == "__main__":
    main()
