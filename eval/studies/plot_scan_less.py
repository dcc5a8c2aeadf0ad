"""Picture of `scan_less`: what a step that reads fewer bytes can certify, and what it drops.

python -m eval.studies.plot_scan_less docs/studies/scan_less.json docs/studies/scan_less.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# How the names of a family's variants begin and end, its label, color and marker.
FAMILIES = (
    ("full", "", "full scan", "#000000", "*"),
    ("reuse", "norm", "old scores, key norms", "#f58518", "o"),
    ("reuse", "ball", "old scores, centre and radius", "#e45756", "s"),
    ("reuse", "box", "old scores, min-max boxes", "#b279a2", "D"),
    ("limits", "estimate", "boxes, then 25% or 50%, by centre", "#4c78a8", "^"),
    ("limits", "upper", "the same, by upper bound", "#72b7b2", "v"),
    ("limits", "truth", "the same, by the true masses", "#9ecae9", "P"),
    ("1 bit", "", "1 leading bit, then 0, 25% or 50%", "#54a24b", "<"),
    ("2 bit", "", "2 leading bits, then 0, 25% or 50%", "#9d755d", ">"),
    ("3 bit", "", "3 leading bits, then 0, 25% or 50%", "#bab0ac", "h"),
)
PANELS = (("bound_2%", "bound, 2% audited"), ("delta_over_full", "dropped mass over that of the full scan"))
TAU = 0.27


def draw(table: dict, picture: Path) -> None:
    """Save the picture of a table that `scan_less` wrote."""
    cells = [(model, cell) for model, cells in table["models"].items() for cell in cells]
    figure, axes = plt.subplots(2, len(cells), figsize=(4.1 * len(cells), 7), sharex=True, sharey="row", squeeze=False)
    for column, (model, cell) in zip(axes.T, cells, strict=True):
        for axis, (name, label) in zip(column, PANELS, strict=True):
            _panel(axis, cell["rows"], name)
            column[0].set_title(f"{model}\n{cell['length']:,} tokens, {cell['steps']} steps", fontsize=9)
            if axis in axes[:, 0]:
                axis.set_ylabel(label)
        column[0].axhline(TAU, color="#e45756", linewidth=0.8)
        column[0].set_yscale("log")
        column[1].set_xlabel("bytes read for scores, of a full scan")
    axes[0, 0].annotate(f"tau {TAU}", (0.1, TAU), (0, 3), textcoords="offset points", fontsize=8, color="#e45756")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="lower center", ncols=min(len(cells), 4), frameon=False, fontsize=9
    )
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(picture, dpi=110)


def _panel(axis, rows: list[dict], name: str) -> None:
    for start, end, label, color, marker in FAMILIES:
        own = [row for row in rows if row["variant"].startswith(start) and row["variant"].endswith(end)]
        own.sort(key=lambda row: row["bytes"])
        x, y = [row["bytes"] for row in own], [row[name]["mean"] for row in own]
        spread = [
            [row[name]["mean"] - row[name]["least"] for row in own],
            [row[name]["most"] - row[name]["mean"] for row in own],
        ]
        axis.errorbar(
            x, y, spread, color=color, marker=marker, markersize=6, linewidth=0.8, elinewidth=0.4, label=label
        )
    axis.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    draw(json.loads(args.table.read_text()), args.picture)


if __name__ == "__main__":
    main()
