"""Draw the pictures in the documentation from data and code in the repository: `make pictures`.

Each picture stores a digest of its sources.  A test compares this digest with the current sources, and fails if a
picture is outdated.  Changes to comments and docstrings do not affect the digest.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path as Curve
from PIL import Image
from PIL.PngImagePlugin import PngInfo

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DATA = DOCS / "benchmarks"
DIGEST = "sources"
FLOPS = {"fp32": 50e9, "bf16": 100e9, "fp16": 100e9}
SPEEDS = {"flops": FLOPS, "stream": 8e9, "bandwidth": 8e9, "process": 250 << 20, "libraries": 110 << 20}
"""The speeds and the process memory for the picture of the plans, which does not depend on the machine that draws it."""

ABOUT = {
    "cli": "commands",
    "bench": "benchmarks and measurements",
    "horovod": "farandole.horovod",
    "serve": "in-flight batched text generation",
    "train": "training loop, tasks, reports",
    "launch": "starts and finds ranks, divides cores",
    "planner": "predicts memory and time",
    "parallel": "engine, axes, ZeRO, checkpoints, LoRA",
    "memory": "offload, recomputation, swapping",
    "comm": "collectives, groups, MPI, torch's backend",
    "native": "C: shared memory, TCP, decoding",
    "models": "Llama, Mixtral, BERT, T5, ResNet ...",
    "data": "text, tokens, sampling",
}


@dataclass(frozen=True)
class Picture:
    """A picture: its path, the source files and other data on which it depends, and the function that draws it."""

    path: Path
    sources: tuple[Path, ...]
    draw: Callable[[Path], None]
    data: Callable[[], str] = str

    def digest(self) -> str:
        """Return the digest of the current sources."""
        found = hashlib.sha256()
        for source in self.sources:
            found.update(code_of(source).encode() if source.suffix == ".py" else source.read_bytes())
        found.update(self.data().encode())
        return found.hexdigest()

    def stored_digest(self) -> str | None:
        """Return the digest of the sources from which the picture was drawn."""
        with Image.open(self.path) as image:
            return str(image.info[DIGEST]) if DIGEST in image.info else None


def code_of(path: Path) -> str:
    """Return the code of a Python file without comments and docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)


def pictures() -> list[Picture]:
    """Return all pictures in the documentation."""
    from benchmarks import compression, parameter_server, picture
    from docs.pictures import axes, pipeline, serving

    found = []
    for data in sorted(DATA.glob("*.json")):
        if not data.with_suffix(".png").exists():
            continue
        draw = picture.draw_zero if data.stem.startswith("zero") else picture.draw_latencies
        found.append(
            _of_data(
                data, data.with_suffix(".png"), Path(picture.__file__), lambda d, p, draw=draw: draw(d, p)
            )
        )
    here = DOCS / "pictures"
    planner = sorted((ROOT / "farandole/planner").glob("*.py"))
    timelines = ("schedule", "unidirectional", "v_shaped", "mirrored", "list_scheduling", "simulate", "draw")
    schedules = [ROOT / f"farandole/parallel/pipeline/{name}.py" for name in timelines]
    found += [
        _of_data(
            DATA / "compression.json", here / "compression.png", Path(compression.__file__),
            lambda data, path: compression.draw(data["runs"], path),
        ),
        _of_data(
            DATA / "parameter-server.json", here / "parameter_server.png", Path(parameter_server.__file__),
            lambda data, path: parameter_server.draw(data["curves"], path),
        ),
        Picture(here / "plans.png", (ROOT / "farandole/bench/plan_picture.py", *planner, Path(__file__)), draw_plans),
        Picture(here / "packages.png", (Path(__file__),), draw_packages, shown_imports),
        *(
            Picture(here / f"{name}.png", (here / "serving.py", *sources), draw)
            for name, (sources, draw) in serving.drawings().items()
        ),
        *(
            Picture(here / f"{name}.png", (here / "axes.py", *sorted((ROOT / "farandole/parallel").glob(sources))), draw)
            for name, sources, draw in (
                ("tensor", "tensor/*.py", axes.draw_tensor), ("context", "context.py", axes.draw_context),
                ("expert", "expert.py", axes.draw_expert),
            )
        ),
        *(
            Picture(here / f"{name}.png", (here / "pipeline.py", *schedules), draw)
            for name, draw in pipeline.drawings().items()
        ),
    ]  # fmt: skip
    return found


def _of_data(data: Path, path: Path, code: Path, draw: Callable[..., None]) -> Picture:
    return Picture(path, (data, code), lambda target: draw(json.loads(data.read_text()), target))


def draw_plans(path: Path) -> None:
    """Draw the plans for a GPT on two ranks with fixed speeds; some of the plans do not fit."""
    from farandole.bench import plan_picture, planning
    from farandole.bench.machine import Speeds

    setup = planning.PlanSetup(("gpt2-small", "batch=16", "plan.precision=bf16"), ranks=2, memory=5 << 30)
    with mock.patch.object(planning, "speeds", return_value=Speeds(**SPEEDS)):
        plan_picture.draw(planning.plan(setup), str(path))


def imports() -> set[tuple[str, str]]:
    """Return pairs (importing package, imported package), without imports that longer paths imply."""
    from tests.test_imports import FILES, PACKAGE, imported_packages

    arrows = set()
    for file in FILES:
        own = file.relative_to(PACKAGE).parts[0]
        arrows |= {
            (own, other)
            for _, other in imported_packages(file)
            if own in ABOUT and other in ABOUT and own != other
        }
    return arrows - implied(arrows)


def rows_of_packages() -> list[list[str]]:
    """Return the packages of the picture by level, with the highest level first."""
    from tests.test_imports import LEVELS, LOW

    rows = [[name for name in ABOUT if name in level] for level in reversed(LEVELS)]
    return [*filter(None, rows), sorted(LOW & ABOUT.keys())]


def shown_imports() -> str:
    """Return the rows and the arrows of the picture of the packages, as text."""
    return f"{rows_of_packages()} {sorted(imports())}"


def draw_packages(path: Path) -> None:
    """Draw the packages in import order, with an arrow for each import that is not implied by other arrows."""
    rows = rows_of_packages()
    width, height = 3.3, 0.72
    places = {
        name: ((number - (len(row) - 1) / 2) * (width + 0.7), -level * 1.22)
        for level, row in enumerate(rows)
        for number, name in enumerate(row)
    }
    figure, axis = plt.subplots(figsize=(9.5, 10), layout="constrained")
    for own, other in sorted(imports()):
        (x, y), (to_x, to_y) = places[own], places[other]
        side = 1 if x + to_x >= 0 else -1
        if y == to_y:
            toward = 1 if x < to_x else -1
            curve = Curve([(x + toward * width / 2, y), (to_x - toward * width / 2, y)])
        elif y - to_y > 1.3:  # the arrow passes other rows, so bend it around their boxes
            start, end = (x + side * width / 2, y), (to_x + side * width / 2, to_y)
            # the curve arrives from outside, at a right angle to the edge of the box
            outside = max(side * start[0], side * end[0]) + 0.35 + 0.28 * (y - to_y)
            curve = Curve(
                [start, (side * outside, y), (side * outside, to_y), end],
                [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4],
            )
        else:
            curve = Curve([(x, y - height / 2), (to_x, to_y + height / 2)])
        axis.add_patch(
            FancyArrowPatch(
                path=curve, arrowstyle="-|>", color="#9aa5ad", linewidth=0.9, mutation_scale=11, zorder=5
            )
        )
    for name, (x, y) in places.items():
        color = "#c8553d" if name in rows[-1] else "#0b6e4f"
        corner = (x - width / 2, y - height / 2)
        axis.add_patch(
            FancyBboxPatch(
                corner,
                width,
                height,
                boxstyle="round,pad=0,rounding_size=0.1",
                fc=color,
                ec="none",
                zorder=3,
            )
        )
        axis.text(
            x,
            y + 0.13,
            name,
            color="white",
            weight="bold",
            family="monospace",
            fontsize=12,
            ha="center",
            va="center",
            zorder=4,
        )
        axis.text(x, y - 0.18, ABOUT[name], color="white", fontsize=8.5, ha="center", va="center", zorder=4)
    axis.set(xlim=(-6.2, 6.2), ylim=(min(y for _, y in places.values()) - 0.6, 0.6))
    axis.axis("off")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def implied(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the arrows between packages that are also connected by a longer path."""

    def reachable(start: str) -> set[str]:
        found: set[str] = set()
        for own, other in arrows:
            if own == start:
                found |= {other} | reachable(other)
        return found

    return {(a, c) for a, c in arrows if any(a == own and c in reachable(b) for own, b in arrows)}


def main() -> None:
    """Draw the pictures whose sources have changed; with --all, draw all pictures."""
    for picture in pictures():
        if "--all" not in sys.argv and picture.path.exists() and picture.stored_digest() == picture.digest():
            continue
        picture.draw(picture.path)
        info = PngInfo()
        info.add_text(DIGEST, picture.digest())
        with Image.open(picture.path) as image:
            image.load()
        image.quantize(256).save(picture.path, pnginfo=info, optimize=True)
        print(f"drew {picture.path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
