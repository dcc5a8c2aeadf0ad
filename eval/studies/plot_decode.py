"""Picture of `bench decode --config`: where the time of a step goes, kernel by kernel, for every mode of a cell.

python -m eval.studies.plot_decode docs/benchmarks/raw/decode_llama8b_h200.json docs/benchmarks/decode_llama8b.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# What the name of a kernel begins with or holds; the first that fits counts.
PARTS = {
    "matrix products": ("gemm",),
    "attention": ("paged_decode", "sdpa", "cudnn"),
    "sketch scoring": ("sketch_score",),
    "selection": ("select_pages",),
    "append": ("paged_append", "input_scatter"),
    "audit: keys read": ("audit_mass",),
}
REST = "everything else"
COLORS = ["#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#e45756", "#bab0ac"]


def part_of(kernel: str) -> str:
    """Name of the part that a kernel belongs to."""
    return next((part for part, words in PARTS.items() if any(word in kernel for word in words)), REST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    record = json.loads(args.record.read_text())
    cells = [cell for cell in record["cells"] if any("kernels" in mode for mode in cell["modes"].values())]
    figure, axes = plt.subplots(len(cells), 1, figsize=(9, 3.2 * len(cells)), squeeze=False)
    for axis, cell in zip(axes[:, 0], cells, strict=True):
        modes = {name: mode for name, mode in cell["modes"].items() if "kernels" in mode}
        left = dict.fromkeys(modes, 0.0)
        for part, color in zip([*PARTS, REST], COLORS, strict=True):
            width = {
                name: sum(k["us"] for kernel, k in mode["kernels"].items() if part_of(kernel) == part) / 1e3
                for name, mode in modes.items()
            }
            axis.barh(list(modes), list(width.values()), left=list(left.values()), color=color, label=part)
            left = {name: left[name] + width[name] for name in modes}
        for place, mode in enumerate(modes.values()):
            step = mode["step_ms"]
            axis.text(step["p99"], place, f"  P99 {step['p99']:.1f} (n={step['n']})", va="center", fontsize=8)
        axis.set(xlabel="ms a step", title=f"batch {cell['batch']}, {cell['context']:,} tokens", xlim=(0, 26))
        axis.invert_yaxis()
    axes[0, 0].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    figure.suptitle(f"{record['settings']['config']}, one H200: device time of the kernels of a step", fontsize=10)
    figure.tight_layout()
    figure.savefig(args.picture, dpi=130, bbox_inches="tight")


if __name__ == "__main__":
    main()
