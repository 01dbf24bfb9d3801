"""Train a network on handwritten digits with parameter servers, in several modes.

    farandole launch --ranks 4 labs/parameter_server_digits.py            one server (rank 0), three workers
    farandole launch --ranks 4 labs/parameter_server_digits.py --modes ssp --staleness 2 --straggler 30

The modes are synchronous training (sync), asynchronous training (async), and asynchronous training with bounded
staleness (ssp).  In each mode, the lab trains a small network on scikit-learn's 1797 digits of 8 x 8 pixels
(pip install scikit-learn).  With `--straggler MS`, the last worker takes MS milliseconds longer per batch, like a
slower machine.  For each mode, the lab prints the test accuracy and the epochs per second of all workers together.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import farandole
from farandole.parallel.parameter_server import ParameterServer, Report

MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "async": {"mode": "async"},
    "ssp": {"mode": "async"},  # with `staleness`
}


def main() -> None:
    """Train in each mode as one rank; the first worker prints the results."""
    options = read_options()
    torch.set_num_threads(1)
    digits = load_digits()
    curves: dict[str, Any] = {}
    with farandole.init() as runtime, ParameterServer(runtime.comm, options.servers, timeout_s=60) as roles:
        for name in options.modes:
            curve = Curve(digits)
            report = train(roles, name, options, digits, curve)
            if report is not None and runtime.rank == 0:
                staleness = (
                    f"staleness {np.mean(report.staleness):.1f} on average, {max(report.staleness)} maximum"
                )
                print(
                    f"{name}, server: {report.updates} updates, {staleness}, maximum lead {report.most_lead}"
                )
            if runtime.rank == roles.workers[0]:
                curves[name] = curve.points
                print(f"{name}: {curve.summary()}", flush=True)
    if options.json and curves:
        Path(options.json).write_text(json.dumps(curves) + "\n")


def train(
    roles: ParameterServer, name: str, options: argparse.Namespace, digits: Digits, curve: Curve
) -> Report | None:
    """Train in one mode; the first worker records `curve`, and servers return their reports."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    bound = {"staleness": options.staleness} if name == "ssp" else {}
    # in sync mode, an update uses one batch from every worker; in other modes, one batch from one worker
    images_per_update = options.batch * (len(roles.workers) if name == "sync" else 1)

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=options.rate)

    def record() -> None:
        if session.worker == 0:
            curve.record(model, session.version * images_per_update)

    with roles.session(model, optimizer, **MODES[name], **bound) as session:
        if session.is_worker:
            assert session.worker is not None
            slow = options.straggler if session.worker == session.workers - 1 else 0.0
            mine = torch.arange(session.worker, len(digits.labels), session.workers)
            session.pull()  # returns when all workers have started and have the initial parameters
            curve.start()
            for epoch in range(options.epochs):
                record()
                for batch in shuffled(mine, options.batch, seed=epoch):
                    session.pull()
                    F.cross_entropy(model(digits.images[batch]), digits.labels[batch]).backward()
                    time.sleep((options.work + slow) / 1e3)
                    session.push()
            session.pull()
            record()
    if session.worker == 0:  # record again, with the updates of slower workers
        curve.record(model, options.epochs * len(digits.labels) // images_per_update * images_per_update)
    return session.report


@dataclass(frozen=True)
class Digits:
    """Training and test images (N, 64) with values from 0 to 1, and labels."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


class Curve:
    """Records the test accuracy over epochs and over seconds, excluding the time for measuring the accuracy."""

    def __init__(self, digits: Digits) -> None:
        self.points: list[dict[str, float]] = []
        self._digits = digits
        self._started = 0.0

    def start(self) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    @torch.no_grad()
    def record(self, model: nn.Module, images: int) -> None:
        """Record the test accuracy after `images` training images."""
        now = time.perf_counter()
        correct = model(self._digits.test_images).argmax(1) == self._digits.test_labels
        self.points.append(
            {
                "epochs": images / len(self._digits.labels),
                "seconds": now - self._started,
                "accuracy": correct.float().mean().item(),
            }
        )
        self._started += time.perf_counter() - now

    def summary(self) -> str:
        """Return a line with the accuracy when the first worker finished and when all workers finished."""
        own, end = self.points[-2:]
        return (
            f"{own['epochs'] / own['seconds']:.1f} epochs/s; accuracy {own['accuracy']:.1%} after {own['seconds']:.2f} s "
            f"when the first worker finished, {end['accuracy']:.1%} after {end['seconds']:.2f} s when all finished"
        )


def shuffled(mine: Tensor, batch: int, seed: int) -> Iterator[Tensor]:
    """Yield a worker's samples in shuffled batches, without an incomplete last batch."""
    order = mine[torch.randperm(len(mine), generator=torch.Generator().manual_seed(seed))]
    yield from order[: len(order) // batch * batch].split(batch)


def load_digits() -> Digits:
    """Return scikit-learn's digits; every fifth image belongs to the test set."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise SystemExit(f"this lab requires scikit-learn (pip install scikit-learn): {error}") from None
    digits = datasets.load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    test = torch.arange(len(images)) % 5 == 0
    return Digits(images[~test], labels[~test], images[test], labels[test])


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=list(MODES), help="modes to run (default: all)"
    )
    parser.add_argument("--servers", type=int, default=1, help="number of server ranks (default 1)")
    parser.add_argument("--staleness", type=int, default=3, help="staleness bound of ssp (default 3)")
    parser.add_argument("--epochs", type=int, default=10, help="epochs per worker (default 10)")
    parser.add_argument("--batch", type=int, default=16, help="batch size per worker (default 16)")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate (default 0.1)")
    parser.add_argument("--work", type=float, default=0.0, help="additional milliseconds per batch")
    parser.add_argument(
        "--straggler", type=float, default=0.0, help="further milliseconds per batch for the last worker"
    )
    parser.add_argument("--json", help="also write the curves to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
