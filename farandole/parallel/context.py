"""Context parallelism: each rank of an axis has some positions of each sequence; queries attend to all ranks' keys.

All layers except attention process each position separately.  For attention, the ranks form a grid, ring x heads:

- *Heads* (Jacobs et al., 2023, "DeepSpeed Ulysses"): before attention, an all-to-all gives each rank all positions of
  some heads, instead of some positions of all heads.  After attention, a second all-to-all reverses the exchange.
- *Ring* (Liu et al., 2023, "Ring Attention with Blockwise Transformers"): keys and values travel around the ring.
  Each rank computes attention between its queries and the keys that it currently holds, and adds the result to its
  output.  The next keys arrive during the computation.

The number of heads limits the number of ranks in the first method, so a ring divides the work further.  With causal
attention, late positions need more work.  Therefore a ring of R ranks cuts the sequence into 2 R parts, and rank r has
parts r and 2 R - 1 - r.  All ranks then have the same amount of work.  Blocks of keys that no query attends to are
skipped.

A partial result is the attention output over some keys, together with the logarithm of the softmax denominator.  Two
partial results are combined as follows:

    l = log(e^l1 + e^l2)        o = o1 e^(l1 - l) + o2 e^(l2 - l)

In the backward pass, the gradients of keys and values travel around the ring with the keys and values, and end on the
rank to which the keys and values belong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from farandole.layout import chunk
from farandole.memory.call_wrappers import wrap_calls, wrapper_of
from farandole.models.chunks import chunks
from farandole.models.deepseek import LatentAttention
from farandole.models.derivatives import first_order
from farandole.models.dropout import DropoutWrapper, OwnPositions, dropout, with_positions
from farandole.models.layers import SelfAttention
from farandole.models.moe import MixtureOfExperts
from farandole.models.sequence import SequenceInfo, SequenceShard, Transformer
from farandole.parallel.axes import AxisCommunicator, Layouts, Position
from farandole.plan import Plan, PlanError

AXIS = "context"

SCORES_BYTES = 16 << 20
"""The maximum size in bytes of the attention scores that are computed at once."""


def apply(model: nn.Module, position: Position, plan: Plan, layouts: Layouts) -> None:
    """Split the sequences of a decoder-only `Transformer` over the ranks of the context axis.

    Raises:
        PlanError: if the model's attention is not supported, or `plan.ring` does not fit the number of heads.
    """
    ranks = position.size(AXIS)
    if ranks == 1:
        return
    modules = [module for module in model.modules() if isinstance(module, SelfAttention | LatentAttention)]
    if getattr(type(model), "_plain", type(model)) is not Transformer or not modules:
        raise PlanError(
            f"context={ranks}: expected a decoder-only Transformer, got {type(model).__name__}; nearest plan: context=1"
        )
    for module in modules:
        if module.dropout:
            raise PlanError(
                f"context={ranks}: attention dropout is not supported, got {module.dropout}; nearest plan: context=1, or "
                "a model with attention_dropout=0"
            )
        if isinstance(module, SelfAttention) and not module.causal:
            raise PlanError(
                f"context={ranks}: expected causal attention, got bidirectional attention; nearest plan: context=1"
            )
        if module.rotary is not None and module.rotary.depends_on_length:
            raise PlanError(
                f"context={ranks}: {module.rotary.scaling} RoPE scaling is not supported, because it depends on the "
                "length of the whole sequence; nearest plan: context=1"
            )
    if any(isinstance(m, MixtureOfExperts) and m.balance.capacity is not None for m in model.modules()):
        raise PlanError(
            f"context={ranks}: expert capacities are not supported, because they apply to complete sequences; nearest "
            "plan: context=1, or a model without a capacity"
        )
    # tensor-parallel ranks may have different numbers of heads, but must have the same positions
    heads = math.gcd(*(count for module in modules for count in _shared_heads(module, position, layouts)))
    ring = plan.ring or ranks // max(n for n in range(1, ranks + 1) if ranks % n == 0 and heads % n == 0)
    if heads % (ranks // ring):
        near = [n for n in range(1, ranks + 1) if ranks % n == 0 and heads % (ranks // n) == 0]
        raise PlanError(
            f"context={ranks} with ring={ring}: {heads} heads cannot be split over {ranks // ring} ranks; nearest "
            f"plan: ring={min(near)}"
        )
    if position.comm(AXIS) is not None:
        wrap_calls(model, _ShareSequences(Grid.of(position, ring)))
        for block in model.children():
            wrap_calls(block, _OwnPositions())
        for inner in model.modules():
            if isinstance(inner, nn.Dropout) and wrapper_of(inner, DropoutWrapper) is None:
                wrap_calls(inner, DropoutWrapper(dropout))  # draws the mask for complete sequences


def _shared_heads(module: SelfAttention | LatentAttention, position: Position, layouts: Layouts) -> list[int]:
    """Return, for each tensor-parallel rank, the number of heads that can be split over the context axis."""
    # the key-value heads or, with latent attention, all heads
    width = module.value_width if isinstance(module, LatentAttention) else module.head_width * module.group
    layout = layouts.of(module.out.get_parameter("weight"))
    return [
        sum(end - start for _, (start, end) in layout.boxes(position.mesh, cell)) // width
        for cell in position.along("tensor")
    ]


@dataclass(frozen=True)
class Grid:
    """The `ring` x `heads` grid of the ranks over which sequences are split.

    Args:
        place: this rank's row and column.
        all: the communicator of all ranks in the grid.
        ring_comm: the communicator of this rank's column; None for a single rank.
        heads_comm: the communicator of this rank's row; None for a single rank.
    """

    ring: int
    heads: int
    place: tuple[int, int]
    all: AxisCommunicator
    ring_comm: AxisCommunicator | None
    heads_comm: AxisCommunicator | None

    @classmethod
    def of(cls, position: Position, ring: int) -> Grid:
        """Return the grid of the ranks along the context axis of `position`, with `ring` rows."""
        comm = position.comm(AXIS)
        assert comm is not None
        heads = comm.size // ring
        row, column = divmod(comm.rank, heads)
        return cls(
            ring,
            heads,
            (row, column),
            comm,
            position.part_of(AXIS, range(column, comm.size, heads)),
            position.part_of(AXIS, range(row * heads, (row + 1) * heads)),
        )

    def ring_index(self, length: int, row: int) -> Tensor:
        """Return the positions that row `row` of the grid holds, in a sequence of `length` positions."""
        parts = [chunk(length, 2 * self.ring, part) for part in (row, 2 * self.ring - 1 - row)]
        with unset_fake_temporarily():  # positions have values in dry runs too
            return torch.cat([torch.arange(start, end) for start, end in parts])

    def index(self, length: int, rank: int) -> Tensor:
        """Return the positions that rank `rank` holds, in a sequence of `length` positions."""
        row, column = divmod(rank, self.heads)
        places = self.ring_index(length, row)
        with unset_fake_temporarily():
            return places[slice(*chunk(len(places), self.heads, column))]


class _ShareSequences:
    """Wraps the model: splits the positions over the ranks, and returns the loss or the logits of all positions."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        inputs, info, targets = _arguments(*args, **kwargs)
        info = info or SequenceInfo()
        # in generation, every rank computes all positions; the call of a pipeline has split them for its stages
        if info.cache is not None or info.shard is not None:
            return call(inputs, info, targets)
        length, grid = inputs.shape[1], self._grid
        if length < grid.all.size:
            raise ValueError(
                f"expected at least {grid.all.size} positions (one per rank on the context axis), got {length}; "
                "use longer sequences or a smaller context axis"
            )
        for name, each in (
            ("targets", targets),
            ("documents", info.documents),
            ("positions", info.positions),
        ):
            if each is not None and each.shape[-1] != length:
                raise ValueError(
                    f"inputs {tuple(inputs.shape)} do not match {name} {tuple(each.shape)}: expected (..., {length}), "
                    "one value per position of the inputs"
                )
        index = grid.index(length, grid.all.rank).to(inputs.device)
        documents = info.documents
        attend = ContextAttention(grid, length, documents)
        positions = info.positions_of(length, inputs.device)
        own = replace(
            info,
            positions=positions[..., index],
            documents=None if documents is None else documents[:, index],
            shard=SequenceShard(index, length, documents, targets, attend, grid.all.all_reduce),
        )
        output = call(inputs[:, index], own, None if targets is None else targets[:, index])
        if targets is not None:
            total, count = output
            return _sum_of_all(total, count, grid.all)
        indices = [grid.index(length, rank) for rank in range(grid.all.size)]
        parts = _GatherPositions.apply(output, [len(each) for each in indices], grid.all)
        back = torch.empty(length, dtype=torch.int64)
        back[torch.cat(indices)] = torch.arange(length)
        return parts.index_select(1, back.to(parts.device))


class _OwnPositions:
    """Wraps a block, so that its dropout draws the random numbers for complete sequences."""

    def __call__(
        self, module: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        infos = [each for each in (*args, *kwargs.values()) if isinstance(each, SequenceInfo)]
        shard = infos[0].shard if infos else None
        if shard is None or infos[0].shape is None:
            return call(*args, **kwargs)
        with with_positions(OwnPositions(infos[0].shape[0], shard.length, shard.index)):
            return call(*args, **kwargs)


def _arguments(
    inputs: Tensor, info: SequenceInfo | None = None, targets: Tensor | None = None
) -> tuple[Tensor, SequenceInfo | None, Tensor | None]:
    return inputs, info, targets


def _sum_of_all(
    total: Tensor, count: Tensor | float, comm: AxisCommunicator
) -> tuple[Tensor, Tensor | float]:
    """Return the sums of `total` (a sum of losses) and `count` over all ranks."""
    both = torch.stack((total.detach().double().cpu(), torch.as_tensor(count).double().cpu()))
    comm.all_reduce(both)
    if isinstance(both, FakeTensor):
        return total, count
    # the engine averages gradients over the ranks, so the gradient is multiplied by their number
    return _Total.apply(total, both[0], comm.size), float(both[1])


class _Total(torch.autograd.Function):
    """Returns `total`; in the backward pass, multiplies the gradient by `ranks` and passes it to `own`."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, total: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return total.to(own.device, own.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return grad_outputs[0] * ctx.ranks, None, None


class _GatherPositions(torch.autograd.Function):
    """Concatenates the outputs of all ranks.  The backward pass sums the gradients over the ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, lengths: list[int], comm: AxisCommunicator) -> Tensor:
        ctx.lengths, ctx.comm = lengths, comm
        parts = [own.new_empty((own.shape[0], length, *own.shape[2:])) for length in lengths]
        comm.all_gather(parts, own.detach().contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        parts = [part.contiguous() for part in grad_outputs[0].split(ctx.lengths, 1)]
        own = torch.empty_like(parts[ctx.comm.rank])
        # a sum of equal terms, because all ranks compute the same loss; the engine averages over the context axis
        ctx.comm.reduce_scatter(own, parts)
        return own, None, None


# ---- attention ----


class ContextAttention:
    """Computes attention between this rank's queries and all keys, in sequences of `length` positions."""

    def __init__(self, grid: Grid, length: int, documents: Tensor | None) -> None:
        self._grid, self._length, self._documents = grid, length, documents

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Return the output for this rank's queries; see `models.attention.attention`."""
        grid, scale = self._grid, query.shape[3] ** -0.5 if scale is None else scale
        rows = [len(grid.ring_index(self._length, row)) for row in range(grid.ring)]
        own = rows[grid.place[0]]
        lengths = [end - start for start, end in (chunk(own, grid.heads, n) for n in range(grid.heads))]
        comm = grid.heads_comm
        if comm is not None:
            query, key, value = (_SplitHeads.apply(each, lengths, comm) for each in (query, key, value))
        indices = [grid.ring_index(self._length, row) for row in range(grid.ring)]
        mask = Visibility(indices, self._documents, causal, window)
        output: Tensor = _RingAttention.apply(query, key, value, mask, scale, grid.ring_comm, grid.place[0])
        if comm is not None:
            output = _JoinHeads.apply(output, lengths, comm)
        return output


class _SplitHeads(torch.autograd.Function):
    """Exchanges this rank's positions of all heads for all positions of this rank's heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: list[int], comm: AxisCommunicator) -> Tensor:
        ctx.lengths, ctx.comm = lengths, comm
        return _split_heads(x, lengths, comm)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return _join_heads(grad_outputs[0], ctx.lengths, ctx.comm), None, None


class _JoinHeads(torch.autograd.Function):
    """Reverses `_SplitHeads`.  Each function is also the backward pass of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: list[int], comm: AxisCommunicator) -> Tensor:
        ctx.lengths, ctx.comm = lengths, comm
        return _join_heads(x, lengths, comm)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return _split_heads(grad_outputs[0], ctx.lengths, ctx.comm), None, None


def _split_heads(x: Tensor, lengths: list[int], comm: AxisCommunicator) -> Tensor:
    batch, heads, _, width = x.shape
    sent = [part.contiguous() for part in x.detach().chunk(comm.size, 1)]
    parts = [x.new_empty((batch, heads // comm.size, length, width)) for length in lengths]
    comm.all_to_all(parts, sent)
    return torch.cat(parts, 2)


def _join_heads(x: Tensor, lengths: list[int], comm: AxisCommunicator) -> Tensor:
    sent = [part.contiguous() for part in x.detach().split(lengths, 2)]
    parts = [torch.empty_like(sent[comm.rank]) for _ in lengths]
    comm.all_to_all(parts, sent)
    return torch.cat(parts, 1)


@dataclass(frozen=True)
class Visibility:
    """Determines the keys that each query attends to.

    `indices[r]` are the positions that rank r of the ring holds, in order.
    """

    indices: Sequence[Tensor]
    documents: Tensor | None
    causal: bool
    window: int | None

    def blocks(self, queries: int, keys: int) -> Iterator[tuple[slice, slice, Tensor | None]]:
        """Yield (query slice, key slice, mask) for each block in which a query attends to a key.

        `queries` and `keys` are the ring ranks that hold the queries and the keys.
        """
        found = self._blocks(queries, keys)
        while True:
            with unset_fake_temporarily():
                block = next(found, None)
            if block is None:
                return
            yield block

    def _blocks(self, queries: int, keys: int) -> Iterator[tuple[slice, slice, Tensor | None]]:
        for own, there in ((a, b) for a in _runs(self.indices[queries]) for b in _runs(self.indices[keys])):
            at, to = self.indices[queries][own], self.indices[keys][there]
            if self.causal and at[-1] < to[0]:
                continue
            if self.window is not None and at[0] - to[-1] >= self.window:
                continue
            mask = self._mask(at, to)
            if mask is None or bool(mask.any()):
                yield own, there, mask

    def _mask(self, at: Tensor, to: Tensor) -> Tensor | None:
        """Return the mask (1 or batch, 1, 1, queries, keys); None if nothing is masked."""
        distance, mask = at[:, None] - to, None
        if self.causal and at[0] < to[-1]:
            mask = distance >= 0
        if self.window is not None:
            near = distance < self.window if self.causal else distance.abs() < self.window
            mask = near if mask is None else mask & near
        mask = None if mask is None else mask[None]
        if self.documents is not None:
            same = self.documents[:, at, None] == self.documents[:, None, to]
            mask = same if mask is None else mask.to(same.device) & same
        return None if mask is None else mask[:, None, None]


def _runs(index: Tensor) -> Iterator[slice]:
    """Yield the slice of each run of consecutive positions in `index`."""
    cuts = [0, *((index.diff() != 1).nonzero()[:, 0] + 1).tolist(), len(index)]
    yield from (slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False) if a < b)


class _RingAttention(torch.autograd.Function):
    """Attention of this rank's queries to the keys of all ranks; `row` is this rank's index in `comm`."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visibility: Visibility,
        scale: float,
        comm: AxisCommunicator | None,
        row: int,
    ) -> Tensor:
        output = query.new_zeros((*query.shape[:3], value.shape[3]), dtype=_wide(query))
        logs = query.new_full((*query.shape[:3], 1), -math.inf, dtype=_wide(query))
        for there, (keys, values) in _circulate((key, value), visibility, comm, row):
            for own, others, mask in visibility.blocks(row, there):
                for part, seen in _query_parts(query, own, others, mask):
                    _add_partial(
                        output, logs, query, keys[:, :, others], values[:, :, others], part, seen, scale
                    )
        ctx.save_for_backward(query, key, value, output, logs)
        ctx.visibility, ctx.scale, ctx.comm, ctx.row = visibility, scale, comm, row
        return output.to(query.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logs = ctx.saved_tensors
        (outer,) = grad_outputs
        delta = (outer * output).sum(-1, keepdim=True, dtype=_wide(query))
        to_query = torch.zeros_like(query, dtype=_wide(query), memory_format=torch.contiguous_format)
        comm, row, visibility = ctx.comm, ctx.row, ctx.visibility
        gradients = [
            torch.zeros_like(each, dtype=_wide(query), memory_format=torch.contiguous_format)
            for each in (key, value)
        ]
        for there, (keys, values) in _circulate((key, value), visibility, comm, row):
            for own, others, mask in visibility.blocks(row, there):
                for part, seen in _query_parts(query, own, others, mask):
                    _add_gradients(
                        to_query,
                        gradients,
                        query,
                        keys,
                        values,
                        outer,
                        logs,
                        delta,
                        part,
                        others,
                        seen,
                        ctx.scale,
                    )
            if comm is not None:
                gradients = _pass_on(gradients, visibility, comm, there)
        return (
            to_query.to(query.dtype),
            gradients[0].to(key.dtype),
            gradients[1].to(value.dtype),
            *(None,) * 4,
        )


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _circulate(
    own: Sequence[Tensor], visibility: Visibility, comm: AxisCommunicator | None, row: int
) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """Yield (rank, its keys and values) for each rank of the ring, while receiving the next keys and values."""
    held = [each.detach().contiguous() for each in own]
    if comm is None:
        yield row, held
        return
    after, before = (row + 1) % comm.size, (row - 1) % comm.size
    for step in range(comm.size):
        there = (row - step) % comm.size
        works, arriving = [], []
        if step < comm.size - 1:
            length = len(visibility.indices[(there - 1) % comm.size])
            arriving = [each.new_empty((*each.shape[:2], length, each.shape[3])) for each in held]
            works = [comm.isend(each, after, tag) for tag, each in enumerate(held)]
            works += [comm.irecv(each, before, tag) for tag, each in enumerate(arriving)]
        yield there, held
        for work in works:
            work.wait()
        held = arriving


def _pass_on(
    gradients: list[Tensor], visibility: Visibility, comm: AxisCommunicator, there: int
) -> list[Tensor]:
    """Send the `gradients` of rank `there` to the next rank; return the gradients received from the previous rank."""
    length = len(visibility.indices[(there - 1) % comm.size])
    arriving = [each.new_empty((*each.shape[:2], length, each.shape[3])) for each in gradients]
    works = [comm.isend(each, (comm.rank + 1) % comm.size, 2 + tag) for tag, each in enumerate(gradients)]
    works += [comm.irecv(each, (comm.rank - 1) % comm.size, 2 + tag) for tag, each in enumerate(arriving)]
    for work in works:
        work.wait()
    return arriving


def _query_parts(
    query: Tensor, own: slice, others: slice, mask: Tensor | None
) -> Iterator[tuple[slice, Tensor | None]]:
    """Split the queries so that their scores need at most `SCORES_BYTES`; yield (slice, mask)."""
    keys = others.stop - others.start
    rows = max(1, SCORES_BYTES // (4 * query.shape[0] * query.shape[1] * keys))
    for each in chunks(own.stop - own.start, rows, query):
        seen = None if mask is None else mask[..., each, :].to(query.device)
        yield slice(own.start + each.start, own.start + each.stop), seen


def _scores(query: Tensor, keys: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """Return the masked attention scores (batch, key-value heads, group x queries, keys)."""
    kv_heads, queries = keys.shape[1], query.shape[2]
    grouped = query.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    scores = (grouped @ keys.transpose(2, 3)).to(_wide(query)).mul_(scale)
    if seen is not None:
        scores.unflatten(2, (-1, queries)).masked_fill_(~seen, -math.inf)
    return scores


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """Reshape `x` from (batch, heads, queries, width) to (batch, key-value heads, group x queries, width)."""
    return x.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def _add_partial(
    output: Tensor,
    logs: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    part: slice,
    seen: Tensor | None,
    scale: float,
) -> None:
    """Merge the attention between queries `part` and `keys` into the partial result (`output`, `logs`)."""
    heads, queries = query.shape[1], part.stop - part.start
    scores = _scores(query[:, :, part], keys, seen, scale)
    log = scores.logsumexp(-1, keepdim=True)
    weights = scores.sub_(log.masked_fill(log == -math.inf, 0)).exp_()
    partial = (weights.to(values.dtype) @ values).to(output.dtype)
    log, partial = (each.reshape(len(query), heads, queries, -1) for each in (log, partial))
    old, before = output[:, :, part], logs[:, :, part]
    total = torch.logaddexp(before, log)
    finite = total.masked_fill(total == -math.inf, 0)
    old.mul_((before - finite).exp()).add_(partial.mul_((log - finite).exp()))
    before.copy_(total)


def _add_gradients(
    to_query: Tensor,
    gradients: Sequence[Tensor],
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    outer: Tensor,
    logs: Tensor,
    delta: Tensor,
    part: slice,
    others: slice,
    seen: Tensor | None,
    scale: float,
) -> None:
    """Add the gradients of queries `part` to `to_query`, and the gradients of keys `others` to `gradients`."""
    # with p = exp(score - log), the output o and the gradient g of o:
    #     dv = p^T g        ds = p (g v^T - sum(g o))        dq = ds k        dk = ds^T q
    kv_heads, kind = keys.shape[1], query.dtype
    k, v = keys[:, :, others], values[:, :, others]
    q, g, log, d = (_grouped(each[:, :, part], kv_heads) for each in (query, outer, logs, delta))
    p = _scores(query[:, :, part], k, seen, scale).sub_(log).exp_()
    gradients[1][:, :, others] += p.to(kind).transpose(2, 3) @ g
    to_scores = (g @ v.transpose(2, 3)).to(p.dtype).sub_(d).mul_(p).mul_(scale).to(kind)
    gradients[0][:, :, others] += to_scores.transpose(2, 3) @ q
    to_query[:, :, part] += (to_scores @ k).reshape(to_query[:, :, part].shape)
