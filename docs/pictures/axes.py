"""Draw which parts of a weight and which positions each rank stores, from the layouts of small models."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from farandole.mesh import Mesh
from farandole.models.llama import LlamaConfig, llama
from farandole.models.mixtral import MixtralConfig, mixtral
from farandole.parallel import expert, tensor
from farandole.parallel.axes import Layouts, Position
from farandole.parallel.context import Grid
from farandole.plan import Plan

COLORS = ("#0b6e4f", "#c8553d", "#3d6cb9", "#d9a441")
COPIES = "#c9d1d6"


def draw_tensor(path: Path) -> None:
    """Draw the weights of a Llama block, its embedding and its normalization on two tensor-parallel ranks."""
    with torch.device("meta"):
        model = llama(LlamaConfig(vocabulary=24, layers=1, heads=4, kv_heads=2, width=16, inner=24))
    titles = {
        "0.tokens.weight": "token embedding\n(split by vocabulary)",
        "1.norm_attention.weight": "normalization\n(copied)",
        "1.attention.qkv.weight": "queries, keys, values\n(split by outputs)",
        "1.attention.out.weight": "attention output\n(split by inputs)",
        "1.feed_forward.gate_up.weight": "gate and up\n(split by outputs)",
        "1.feed_forward.down.weight": "down\n(split by inputs)",
    }
    mesh, layouts = Mesh.box(2, tensor=2), Layouts(model)
    tensor.apply(model, Position(mesh, mesh.cells[0]), Plan(tensor=2), layouts)
    figure, axes = plt.subplots(1, len(titles), figsize=(11, 3.6), layout="constrained")
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        _draw_boxes(axis, layouts, mesh, name)
        axis.set_title(title, fontsize=9)
    _legend(figure, ["rank 0", "rank 1"], copies=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_boxes(axis: Axes, layouts: Layouts, mesh: Mesh, name: str) -> None:
    """Draw a matrix, of shape (outputs, inputs), with the boxes of each rank; a vector is one column wide."""
    layout = layouts[name]
    for cell in mesh.cells:
        for box in layout.boxes(mesh, cell):
            (top, bottom), (left, right) = box if len(box) == 2 else (box[0], (0, 2))
            color = COLORS[cell.rank] if layout.shards else COPIES
            axis.add_patch(Rectangle((left, top), right - left, bottom - top, fc=color, ec="white", lw=0.8))
    axis.set(xlim=(-1, 25), ylim=(49, -1), aspect="equal")
    axis.axis("off")


def draw_context(path: Path) -> None:
    """Draw the positions of a sequence on four ranks, for a ring, for heads, and for both."""
    figure, axes = plt.subplots(3, 1, figsize=(9, 4.4), layout="constrained")
    length = 64
    for axis, ring in zip(axes, (4, 1, 2), strict=True):
        grid = Grid(ring, 4 // ring, (0, 0), SimpleNamespace(size=4), None, None)  # type: ignore[arg-type]
        for rank in range(4):
            for place in grid.index(length, rank).tolist():
                axis.add_patch(Rectangle((place, 0), 1, 1, fc=COLORS[rank], ec="white", lw=0.5))
        axis.set(xlim=(0, length), ylim=(0, 1), yticks=[])
        axis.set_title(
            f"context=4, ring={ring}: "
            + {
                4: "keys and values circulate",
                1: "ranks exchange heads",
                2: "two rings of ranks that exchange heads",
            }[ring],
            fontsize=9,
            loc="left",
        )
    axes[-1].set_xlabel("position in the sequence")
    _legend(figure, [f"rank {rank}" for rank in range(4)])
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_expert(path: Path) -> None:
    """Draw the experts and the other weights of a Mixtral layer on four expert-parallel ranks."""
    with torch.device("meta"):
        model = mixtral(MixtralConfig(vocabulary=8, layers=1, heads=2, width=8, inner=6, experts=8, top=2))
    mesh, layouts = Mesh.box(4, expert=4), Layouts(model)
    expert.apply(model, Position(mesh, mesh.cells[0]), Plan(expert=4), layouts)
    layout = layouts["1.feed_forward.experts.gate_up.weight"]
    figure, axis = plt.subplots(figsize=(9, 1.6), layout="constrained")
    for number, name in enumerate(("attention", "router")):
        axis.add_patch(Rectangle((2.2 * number, 0), 2, 1, fc=COPIES, ec="none"))
        axis.text(2.2 * number + 1, 0.5, name, ha="center", va="center", fontsize=9)
    for cell in mesh.cells:
        for (first, end), *_ in layout.boxes(mesh, cell):
            for each in range(first, end):
                left = 5 + 1.1 * each
                axis.add_patch(Rectangle((left, 0), 1, 1, fc=COLORS[cell.rank], ec="none"))
                axis.text(
                    left + 0.5, 0.5, f"expert\n{each}", color="white", ha="center", va="center", fontsize=8
                )
    axis.set(xlim=(-0.1, 13.9), ylim=(-0.1, 1.1), aspect="equal")
    axis.axis("off")
    _legend(figure, [f"rank {rank}" for rank in range(4)], copies=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _legend(figure: plt.Figure, names: list[str], copies: bool = False) -> None:
    handles = [Rectangle((0, 0), 1, 1, fc=color) for color, _ in zip(COLORS, names, strict=False)]
    if copies:
        handles, names = [*handles, Rectangle((0, 0), 1, 1, fc=COPIES)], [*names, "copy on every rank"]
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)
