"""Picture of `audit_table`: how far each bound stands above the exact residual.

python -m eval.studies.plot_audit_table docs/studies/audit_table.json docs/studies/audit_table.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LABELS = {
    ("sketch", "pps"): "sketch, draws by gap",
    ("sketch", "boundary"): "sketch, boundary + uniform draws",
    ("box", "pps"): "min-max boxes only",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    table = json.loads(args.table.read_text())
    lengths = sorted({row["length"] for row in table["rows"]})
    figure, axes = plt.subplots(1, len(lengths), figsize=(5.2 * len(lengths), 3.4), sharex=True, squeeze=False)
    for axis, length in zip(axes[0], lengths, strict=True):
        rows = [row for row in table["rows"] if row["length"] == length]
        bars = [(f"{LABELS[row['bounds'], row['design']]}, {row['rate']:.0%} read", row["bound"]) for row in rows]
        bars.insert(0, ("sketch bounds, nothing read", rows[0]["cap"]))
        names, values = zip(*bars, strict=True)
        axis.barh(names, values, color="#4c78a8")
        axis.axvline(rows[0]["R"], color="#e45756", label=f"exact residual {rows[0]['R']:.3f}")
        axis.set(xscale="log", title=f"{length} tokens, 10% of the pages", xlabel="bound on the step's residual")
        axis.set_xlim(right=20)
        axis.invert_yaxis()
        axis.legend(loc="center right", frameon=False)
        for place, value in enumerate(values):
            axis.text(value, place, f" {value:.3g}", va="center", fontsize=8)
    for axis in axes[0][1:]:
        axis.set_yticklabels([])
    figure.suptitle(
        f"{table['model']}: error {table['alpha_per_step']:g} a step, {rows[0]['steps']} steps a cell", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(args.picture, dpi=130)


if __name__ == "__main__":
    main()
