"""Parameters in buckets: one flat buffer for the gradients of each, so that one collective reduces them all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from farandole.parallel.flat import FlatLayout
from farandole.parallel.gathering import GatheredWeights
from farandole.parallel.gradients import Gradients
from farandole.parallel.sharded_gradient import GradientNorms, ShardedGradient
from farandole.parallel.weights import Weights


class Bucket:
    """Trained parameters of one type and device, with their weights and gradients.

    `weights` are None where the model and the optimizer share the parameters as they are: with `zero=0` and one type.
    `pieces` are what an optimizer updates on this rank: for each parameter its master, or the part of it in
    this rank's shard, number `shard`, or None where that has no part of it.  Those that are to be `offloaded` are flat.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: FlatLayout,
        own: int,
        weights: Weights | GatheredWeights | None,
        gradients: Gradients,
        *,
        offloaded: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.shard = own
        self.weights = weights
        self.gradients = gradients
        self.pieces: list[nn.Parameter | None] = [None] * len(self.parameters)
        self.starts = [0] * len(self.parameters)  # of a piece in its flattened parameter
        self._shapes: dict[int, Sequence[int]] = {}  # of each piece's share of the gradient
        self._handed: list[Tensor | None] | None = None
        self._marks: list[ShardedGradient | None] = [None] * len(self.parameters)
        self._awaited: set[int] = set()
        self._parts: dict[int, slice] = {}  # where a piece lies in the shard
        for piece in layout.pieces(own):
            parameter = self.parameters[piece.index]
            whole = piece.length == parameter.numel() and not offloaded
            shape = parameter.shape if whole else (piece.length,)
            part = slice(piece.offset, piece.offset + piece.length)
            self._parts[piece.index] = part
            self._shapes[piece.index] = shape
            self.starts[piece.index] = piece.start
            if weights is not None:
                assert weights.master is not None  # these are trained
                self.pieces[piece.index] = nn.Parameter(weights.master[part].view(shape))
        if weights is None:
            self.pieces = list(self.parameters)
        self.begin_pass()

    @property
    def _shares(self) -> list[Tensor | None]:
        """Of the gradient, for each piece."""
        if self.weights is None:
            return [*self.gradients.views()]
        if self._handed is None:
            reduced = self.gradients.reduced
            self._handed = [
                reduced[self._parts[index]].view(self._shapes[index]) if index in self._parts else None
                for index in range(len(self.parameters))
            ]
        return self._handed

    def clear(self) -> None:
        """Begin a new step, without gradients."""
        self.gradients.clear()
        self._drop_marks()
        if not self.gradients.held:
            self._handed = None
        self.begin_pass()

    @property
    def taken(self) -> bool:
        """Whether somebody has taken away all gradients that were handed out, to begin a new step."""
        shares = self._shares
        return all(self._is_taken(index, shares[index]) for index in range(len(self.parameters)))

    def resume(self, used: Tensor) -> None:
        """Have a further pass add to the gradients that were handed out, but for those that were taken away.

        `used` says which parameters have a gradient.
        """
        self.gradients.resume()
        shares = self._shares
        for index, share in enumerate(shares):
            if self._is_taken(index, share):
                used[index] = 0
                if share is not None:
                    share.zero_()

    def _is_taken(self, index: int, share: Tensor | None) -> bool:
        """Whether the gradient of a parameter was taken away, or there was none."""
        piece, mark = self.pieces[index], self._marks[index]
        if mark is not None and self.parameters[index].grad is not mark:
            return True
        if piece is None or share is None:
            return mark is None
        return piece.grad is None or _is_another(piece.grad, share)

    def _is_dropped(self, index: int) -> bool:
        """Whether the `.grad` of a parameter, which stood for the gradient of a piece, was set to None."""
        mark = self._marks[index]
        return mark is not None and self.parameters[index].grad is not mark

    def _drop_marks(self) -> None:
        for parameter, mark in zip(self.parameters, self._marks, strict=True):
            if mark is not None and parameter.grad is mark:
                parameter.grad = None
        self._marks = [None] * len(self.parameters)

    def before_update(self) -> None:
        """Leave pieces without a gradient whose parameters have none any more."""
        for index, (parameter, piece) in enumerate(zip(self.parameters, self.pieces, strict=True)):
            if piece is not None and self._is_dropped(index):
                if parameter.grad is not None:
                    raise RuntimeError(
                        f"a parameter of shape {tuple(parameter.shape)} was assigned a gradient, and the optimizer updates another "
                        f"tensor than it: change gradients through engine.gradients() or engine.scale_gradients(factor)"
                    )
                piece.grad = None

    def take_gradient(self, index: int) -> Tensor:
        """The gradient that autograd has accumulated for a parameter."""
        gradient = self.parameters[index].grad
        if isinstance(gradient, ShardedGradient):
            gradient, self.parameters[index].grad = gradient.received, None
        assert gradient is not None  # the hook runs because there is one
        return gradient

    def take_away(self) -> None:
        """Leave nothing with a gradient."""
        for parameter in (*self.parameters, *self.pieces):
            if parameter is not None:
                parameter.grad = None

    def handed_out(self) -> Iterator[tuple[int, Tensor]]:
        """(index, gradient) of the pieces that have one."""
        if not self.gradients.held:
            return
        for index, (piece, share) in enumerate(zip(self.pieces, self._shares, strict=True)):
            if piece is not None and share is not None and piece.grad is not None:
                yield index, share

    def bring_gradients(self) -> None:
        """Copy gradients to where pieces are, if that is another device than theirs."""
        for piece, share in zip(self.pieces, self._shares, strict=True):
            if piece is not None and share is not None and piece.grad is not None:
                piece.grad = share.to(piece.device)

    def take_weights(self, pieces: Iterable[nn.Parameter]) -> None:
        """Have the model compute with what offloaded `pieces` hold now."""
        assert self.weights is not None
        wanted = {id(piece) for piece in pieces}
        for index, part in self._parts.items():
            piece = self.pieces[index]
            if piece is not None and id(piece) in wanted:
                self.weights.take(part.start, piece.detach())

    def values_of_piece(self, index: int) -> Tensor:
        """Return the values of piece `index`, in its shape, or flat.

        A piece whose values are kept elsewhere reads as NaN; the model then computes with a copy in the shard.
        """
        piece, weights = self.pieces[index], self.weights
        assert piece is not None
        if weights is None or weights.master is not None:
            return piece.detach()
        return weights.own[self._parts[index]]

    def lay_pieces(self, shard: Tensor) -> list[tuple[nn.Parameter, Tensor]]:
        """Have the pieces lie in `shard` from now on; returns them with the data that they had."""
        before = []
        for index, part in self._parts.items():
            piece = self.pieces[index]
            assert piece is not None
            before.append((piece, piece.data))
            piece.data = shard[part].view(piece.shape)
        return before

    def begin_pass(self) -> None:
        """Expect a gradient of every parameter."""
        self._awaited = set(range(len(self.parameters)))

    def complete(self, index: int) -> bool:
        """Note that parameter `index` expects nothing more in this pass; true when that holds for all."""
        self._awaited.discard(index)
        return self.full

    @property
    def full(self) -> bool:
        """Whether no parameter expects anything more in this pass."""
        return not self._awaited

    def hand_out(self, used: Sequence[bool], norms: GradientNorms, first: int) -> None:
        """Give the pieces of parameters that any rank used their gradients, and the others none.

        The parameters are those from number `first` on of `norms`.
        """
        for index, (parameter, piece, share, anybody) in enumerate(
            zip(self.parameters, self.pieces, self._shares, used, strict=True)
        ):
            parameter.grad = None
            if self.weights is not None:
                mark = (
                    ShardedGradient(parameter, share if piece is not None else None, norms, first + index)
                    if anybody
                    else None
                )
                self._marks[index] = parameter.grad = mark
            if piece is not None and share is not None:
                here = share.device == piece.device
                handed = share if here else piece.new_zeros(1).expand(piece.shape)  # a mark, without memory
                piece.grad = handed if anybody else None


def _is_another(gradient: Tensor, share: Tensor) -> bool:
    return gradient is not share and gradient.device == share.device


def fill(
    parameters: Iterable[nn.Parameter], bucket_bytes: int, apart: Collection[int] = ()
) -> list[list[nn.Parameter]]:
    """Divide parameters into buckets of about `bucket_bytes` in the order given, one type and device in each.

    A parameter of that size or more has one for itself, so that its gradient need not be copied (`lender`).  The parameters
    whose identities are in `apart` have buckets without others.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device, bool], list[nn.Parameter]] = {}
    full: list[list[nn.Parameter]] = []
    for parameter in parameters:
        if parameter.nbytes >= bucket_bytes:
            full.append([parameter])
            continue
        kind = (parameter.dtype, parameter.device, id(parameter) in apart)
        members = open_buckets.setdefault(kind, [])
        members.append(parameter)
        if sum(member.nbytes for member in members) >= bucket_bytes:
            full.append(open_buckets.pop(kind))
    return full + list(open_buckets.values())


Filling = Literal["slowly", "at once", "adopts"]
"""How a bucket gets its gradients: one by one; the only one, which is copied; or the only one, as autograd has made it."""


def filling_of(layout: FlatLayout, *, same_type: bool) -> Filling:
    """How a bucket laid out so does; `same_type` says whether autograd makes its gradients in the type they are reduced in."""
    if len(layout.counts) > 1:
        return "slowly"
    return "adopts" if same_type and layout.length == layout.counts[0] else "at once"


def total_norm(tensors: Iterable[Tensor]) -> float:
    """The Euclidean norm of all elements of `tensors` together; infinite or NaN if any element is."""
    norms = [
        torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)).double()
        for tensor in tensors
    ]
    if not norms:
        return 0.0
    return float(torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms])))
