"""Handwritten digits through parameter servers: synchronous, asynchronous, and with bounded staleness.

    farandole launch --ranks 4 labs/parameter_server_digits.py            rank 0 serves, three ranks train
    farandole launch --ranks 4 labs/parameter_server_digits.py --modes ssp --staleness 2 --straggler 30

Trains a small network on scikit-learn's 1797 digits of 8 x 8 pixels (pip install scikit-learn), in one mode
after the other.  With `--straggler MS` the last worker takes that many milliseconds longer for every batch, as
one on a slower or busier machine would.  Prints, for every mode, the accuracy on digits that were not trained
on, and how many epochs all workers together got through per second.
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
    """Train in each of the modes, as one rank; the first worker reports."""
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
                    f"staleness {np.mean(report.staleness):.1f} on average, {max(report.staleness)} at most"
                )
                print(f"{name}, server: {report.updates} updates, {staleness}, most lead {report.most_lead}")
            if runtime.rank == roles.workers[0]:
                curves[name] = curve.points
                print(f"{name}: {curve.summary()}", flush=True)
    if options.json and curves:
        Path(options.json).write_text(json.dumps(curves) + "\n")


def train(
    roles: ParameterServer, name: str, options: argparse.Namespace, digits: Digits, curve: Curve
) -> Report | None:
    """Train in one mode; the first worker draws the curve, a server returns its report."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    bound = {"staleness": options.staleness} if name == "ssp" else {}
    # an update of sync mode is of a batch of every worker, one of the others of a batch of one
    images_per_update = options.batch * (len(roles.workers) if name == "sync" else 1)

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=options.rate)

    def look() -> None:
        if session.worker == 0:
            curve.look(model, session.version * images_per_update)

    with roles.session(model, optimizer, **MODES[name], **bound) as session:
        if session.is_worker:
            assert session.worker is not None
            slow = options.straggler if session.worker == session.workers - 1 else 0.0
            mine = torch.arange(session.worker, len(digits.labels), session.workers)
            session.pull()  # every worker is there, and has the first parameters
            curve.start()
            for epoch in range(options.epochs):
                look()
                for batch in shuffled(mine, options.batch, seed=epoch):
                    session.pull()
                    F.cross_entropy(model(digits.images[batch]), digits.labels[batch]).backward()
                    time.sleep((options.work + slow) / 1e3)
                    session.push()
            session.pull()
            look()
    if session.worker == 0:  # now with what the slower ones have added
        curve.look(model, options.epochs * len(digits.labels) // images_per_update * images_per_update)
    return session.report


@dataclass(frozen=True)
class Digits:
    """Images (64 values of 0 to 1 each) and labels, to train on and to test on."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


class Curve:
    """How accuracy grows with images and with seconds; the seconds that looking takes do not count."""

    def __init__(self, digits: Digits) -> None:
        self.points: list[dict[str, float]] = []
        self._digits = digits
        self._started = 0.0

    def start(self) -> None:
        """Training begins."""
        self._started = time.perf_counter()

    @torch.no_grad()
    def look(self, model: nn.Module, images: int) -> None:
        """Test the model, into which so many training images have gone."""
        now = time.perf_counter()
        right = model(self._digits.test_images).argmax(1) == self._digits.test_labels
        self.points.append(
            {
                "epochs": images / len(self._digits.labels),
                "seconds": now - self._started,
                "accuracy": right.float().mean().item(),
            }
        )
        self._started += time.perf_counter() - now

    def summary(self) -> str:
        """The accuracy when the first worker was through its epochs, and when all were."""
        own, end = self.points[-2:]
        return (
            f"{own['epochs'] / own['seconds']:.1f} epochs/s; accuracy {own['accuracy']:.1%} after {own['seconds']:.2f} s "
            f"when the first worker was through, {end['accuracy']:.1%} after {end['seconds']:.2f} s when all were"
        )


def shuffled(mine: Tensor, batch: int, seed: int) -> Iterator[Tensor]:
    """The samples of a worker in batches; what does not fill a batch is left out."""
    order = mine[torch.randperm(len(mine), generator=torch.Generator().manual_seed(seed))]
    yield from order[: len(order) // batch * batch].split(batch)


def load_digits() -> Digits:
    """Every fifth image is to test on."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise SystemExit(f"the digits come with scikit-learn (pip install scikit-learn): {error}") from None
    digits = datasets.load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    test = torch.arange(len(images)) % 5 == 0
    return Digits(images[~test], labels[~test], images[test], labels[test])


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="one after the other")
    parser.add_argument("--servers", type=int, default=1, help="ranks that keep parameters (default 1)")
    parser.add_argument("--staleness", type=int, default=3, help="of ssp (default 3)")
    parser.add_argument(
        "--epochs", type=int, default=10, help="of every worker, through its share (default 10)"
    )
    parser.add_argument("--batch", type=int, default=16, help="of every worker (default 16)")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate (default 0.1)")
    parser.add_argument("--work", type=float, default=0.0, help="milliseconds that every batch takes longer")
    parser.add_argument("--straggler", type=float, default=0.0, help="and how many more with the last worker")
    parser.add_argument("--json", help="also write the points there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
