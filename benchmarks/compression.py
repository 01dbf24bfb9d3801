"""Train a small GPT on two hosts with one rank each, once with each compression method.  Requires root.

    python -m benchmarks.compression [--steps 300]

All runs use the same processes, model, text, sample order and optimizer, in fp32.  The table shows the loss and the
number of bytes per step that the kernel counted on the link.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot as plt

import farandole
from benchmarks.measure import RESULTS, arguments, markdown_table, save
from benchmarks.namespaces import launch_on_hosts
from farandole.data.text import Text
from farandole.launch.runtime import Runtime
from farandole.train.config import load_config
from farandole.train.text import TextTask, open_text
from farandole.train.trainer import Trainer

NAMES = ["none", "bf16", "fp16", "int8", "topk", "powersgd"]
MODEL = ["model.width=96", "model.heads=2", "model.layers=3", "model.context=128", "model.vocabulary=2048"]
AVERAGED = 15
"""The number of steps over which the curves are smoothed."""


def bytes_sent() -> int:
    """Return the number of bytes that this host has sent."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith(f"{interface}:"))


def train(name: str, steps: int, runtime: Runtime, text: Text) -> dict[str, Any]:
    """Train with the compression `name`, and return the losses, the seconds per step and the bytes per step."""
    keys = [*MODEL, f"steps={steps}", "batch=16", f"plan.compression={name}"]
    config = load_config(overrides=keys)
    trainer = Trainer(config, TextTask(config, text=text), "fp32", runtime.comm, runtime.device)
    before, started = bytes_sent(), time.perf_counter()
    training = [trainer.step().loss for _ in range(steps)]
    seconds, sent = time.perf_counter() - started, bytes_sent() - before
    losses = {"training": training, "validation": trainer.evaluate()["loss"]}
    return losses | {"bytes_per_step": sent / steps, "seconds_per_step": seconds / steps}


def run_rank(steps: int, rate: str) -> None:
    """Train with each compression method as one rank; rank 0 prints the report."""
    torch.set_num_threads(1)
    config = load_config(overrides=MODEL)
    with farandole.init() as runtime:
        if runtime.rank == 0:
            open_text(config)  # tokenize once
        runtime.comm.barrier()
        text = open_text(config)
        runs = {}
        for name in NAMES:
            runs[name] = train(name, steps, runtime, text)
            if runtime.rank == 0:
                print(f"{name}: {runs[name]['validation']:.4f}", flush=True)
        if runtime.rank == 0:
            print(table(runs))
            save("compression", {"rate": rate, "steps": steps, "runs": runs})
            picture = RESULTS.parent / "pictures" / "compression.png"
            draw(runs, picture)
            print(f"results written to {RESULTS / 'compression.json'} and {picture}")


def table(runs: dict[str, dict[str, Any]]) -> str:
    """Return a table with one row per compression method."""
    plain = runs["none"]
    rows = [
        [
            name,
            f"{run['validation']:.3f}",
            f"{100 * (run['validation'] / plain['validation'] - 1):+.1f} %",
            f"{run['bytes_per_step'] / 2**20:.2f} MiB",
            f"{plain['bytes_per_step'] / run['bytes_per_step']:.1f}x",
        ]
        for name, run in runs.items()
    ]
    head = [
        "compression",
        "validation loss",
        "relative to none",
        "sent per step and host",
        "compression ratio",
    ]
    return markdown_table(head, rows)


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the training loss over steps and over bytes."""
    colors = ["#222222", "#35b07f", "#0b6e4f", "#3d5a80", "#c8553d", "#e0a030"]
    figure, (by_step, by_bytes) = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
    for (name, run), color in zip(runs.items(), colors, strict=True):
        losses = torch.tensor(run["training"]).unfold(0, AVERAGED, 1).mean(1).tolist()
        steps = [step + AVERAGED for step in range(len(losses))]
        style = {"color": color, "linewidth": 2.6 if name == "none" else 1.4, "label": name}
        by_step.plot(steps, losses, **style)
        by_bytes.plot([step * run["bytes_per_step"] / 2**20 for step in steps], losses, **style)
    by_step.set(xlabel="step", ylabel=f"training loss, nats per token, mean of {AVERAGED} steps")
    by_bytes.set(xlabel="MiB that each host has sent", xscale="log")
    by_step.legend(frameon=False, title="compression")
    for axis in (by_step, by_bytes):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Simulate the hosts and start their ranks, or run as one of these ranks."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps per run (default 300)")
    parser.add_argument(
        "--rate", default="1gbit", help="rate of the link, in the notation of tc (default 1gbit)"
    )
    options = parser.parse_args()
    if options.as_rank:
        run_rank(options.steps, options.rate)
        return
    flags = ["--as-rank", "--steps", str(options.steps), "--rate", options.rate]
    sys.exit(launch_on_hosts("benchmarks.compression", flags, 1, options.rate))


if __name__ == "__main__":
    main()
