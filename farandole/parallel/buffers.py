"""Average the buffers of a model, such as BatchNorm statistics, over their replicas.

Each rank updates buffers with its own samples.  The replicas of a buffer are the ranks that store the same
elements, according to its `Layout`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from farandole.layout import Layout
from farandole.mesh import Groups, Mesh
from farandole.parallel.zero.sharding import ranks_of


def with_buffers(model: nn.Module, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Return `layouts` plus a replicated layout for each buffer of `model` without a layout."""
    buffers = {name: Layout(name, tuple(buffer.shape)) for name, buffer in model.named_buffers()}
    return {**layouts, **{name: layout for name, layout in buffers.items() if name not in layouts}}


class ReplicatedBuffers:
    """Averages the floating-point buffers of `model` over their replicas, if a step has changed them.

    Buffers that a step creates, and buffers whose shape has changed on any replica, are not averaged.

    Args:
        layouts: the layouts of all parameters and buffers, by name.
        groups: the groups of ranks that store the same elements.

    Raises:
        LayoutError: if parts of a buffer have different replicas.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, layouts: Mapping[str, Layout], groups: Groups) -> None:
        self._model, self._groups = model, groups
        self._names: dict[tuple[int, ...], list[str]] = {}  # by replicas, in the same order on all of them
        self._shapes = {name: b.shape for name, b in model.named_buffers(remove_duplicate=False)}
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                replicas = ranks_of(mesh, layouts[name], groups.comm.rank, 0).copies
                self._names.setdefault(replicas, []).append(name)
        self._known = self._versions()

    @property
    def changed(self) -> bool:
        """Return whether this rank has changed a buffer since the last call of `average`."""
        return self._versions() != self._known

    def has_layout(self, name: str, buffer: Tensor) -> bool:
        """Return whether the layout of `name` describes `buffer`; False if a step has created or resized the buffer."""
        return buffer.shape == self._shapes.get(name)

    def accept(self, buffers: Iterable[Tensor]) -> None:
        """Mark the current values of `buffers` as averaged; all replicas must have made the same changes."""
        accepted = {id(buffer): buffer._version for buffer in buffers}
        self._known = [(key, accepted.get(key, version)) for key, version in self._known]

    def average(self) -> None:
        """Average all buffers of each module in which any replica has changed a buffer.

        This is a collective call.  Other buffers are not averaged, because the mean of equal values can differ from
        these values in the last bit.
        """
        known = dict(self._known)
        changed = {
            id(buffer)
            for module in self._model.modules()
            if any(known.get(id(b)) != b._version for b in module.buffers(recurse=False))
            for buffer in module.buffers(recurse=False)
        }
        now = dict(self._model.named_buffers(remove_duplicate=False))
        for replicas, names in sorted(self._names.items()):  # in one order on all ranks
            comm = self._groups.of_ranks(replicas)
            if comm is None:
                continue
            fitting = {
                name: now[name]
                for name in names
                if name in now and self.has_layout(name, now[name]) and now[name].is_floating_point()
            }
            flags = torch.tensor(
                [
                    [name in fitting and id(fitting[name]) in changed for name in names],
                    [name not in fitting for name in names],
                ],
                dtype=torch.uint8,
            )
            comm.all_reduce(flags, "max")
            chosen = [
                fitting[name]
                for name, is_changed, is_unfit in zip(names, *flags.tolist(), strict=True)
                if is_changed and not is_unfit
            ]
            for members in _alike(chosen):
                with torch.no_grad():
                    flat = torch.cat([buffer.detach().reshape(-1) for buffer in members])
                    comm.all_reduce(flat, "avg")
                    means = flat.split([buffer.numel() for buffer in members])
                    for buffer, mean in zip(members, means, strict=True):
                        buffer.copy_(mean.view(buffer.shape))
        self._known = self._versions()

    def _versions(self) -> list[tuple[int, int]]:
        # BatchNorm's kernel increments only the version of its batch counter, so the versions of all buffers are compared
        return [(id(buffer), buffer._version) for buffer in self._model.buffers()]


def _alike(buffers: Iterable[Tensor]) -> list[Sequence[Tensor]]:
    """Group the buffers by dtype and device."""
    found: dict[object, list[Tensor]] = {}
    for buffer in buffers:
        found.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    return list(found.values())
