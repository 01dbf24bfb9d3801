"""Measure accuracy over epochs and over time with a parameter server and four workers, one of which is slow.

    python -m benchmarks.parameter_server

This program runs labs/parameter_server_digits.py, which requires scikit-learn, and draws
docs/pictures/parameter_server.png.  Every worker sleeps for 4 ms per batch, and the last worker for another 12 ms.  The
picture therefore shows how workers wait for each other, not how they share cores.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import PercentFormatter

from benchmarks.measure import arguments, save
from farandole.launch.local import launch

ROOT = Path(__file__).parent.parent
LAB = ROOT / "labs" / "parameter_server_digits.py"
PICTURE = ROOT / "docs" / "pictures" / "parameter_server.png"
WORKERS, STALENESS, EPOCHS, WORK_MS, STRAGGLER_MS = 4, 3, 8, 4, 12
STYLES = {
    "sync": ("#0b6e4f", "synchronous"),
    "async": ("#c8553d", "asynchronous"),
    "ssp": ("#3d5a80", f"asynchronous, staleness {STALENESS}"),
}


def main() -> None:
    """Run the lab, save its curves and draw them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "curves.json")
        numbers = {
            "--staleness": STALENESS,
            "--epochs": EPOCHS,
            "--work": WORK_MS,
            "--straggler": STRAGGLER_MS,
            "--json": path,
        }
        words = [str(word) for pair in numbers.items() for word in pair]
        status = launch(str(LAB), words, ranks=WORKERS + 1, pin=False)
        if status:
            sys.exit(status)
        curves = json.loads(path.read_text())
    settings = {
        "workers": WORKERS,
        "staleness": STALENESS,
        "work_ms": WORK_MS,
        "straggler_ms": STRAGGLER_MS,
    }
    print(f"results written to {save('parameter-server', {**settings, 'curves': curves})}")
    draw(curves, PICTURE)
    print(f"picture written to {PICTURE}")


def draw(curves: dict[str, Any], path: Path) -> None:
    """Draw the accuracy over epochs (left) and over seconds (right)."""
    figure, axes = plt.subplots(1, 2, figsize=(10.4, 4.0), sharey=True, layout="constrained")
    for axis, key, label in zip(
        axes, ("epochs", "seconds"), ("epochs (of all workers together)", "seconds"), strict=True
    ):
        for name, (color, words) in STYLES.items():
            *own, end = curves[name]
            axis.plot(
                [p[key] for p in own],
                [p["accuracy"] for p in own],
                "-o",
                color=color,
                markersize=4,
                label=words,
            )
            # from this point on, only slower workers train
            tail = [own[-1], end]
            axis.plot([p[key] for p in tail], [p["accuracy"] for p in tail], ":", color=color)
            axis.plot(end[key], end["accuracy"], "o", color=color, markerfacecolor="white", markersize=6)
        axis.set_xlabel(label)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlim(left=0)
    axes[0].set_ylabel("accuracy on test digits")
    axes[0].set_ylim(0, 1)
    axes[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes[1].legend(frameon=False, loc="lower right", title="dotted: only slower workers still train")
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    arguments(__doc__).parse_args()
    main()
