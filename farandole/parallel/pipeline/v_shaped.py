"""V-shaped schedules: micro-batches pass through ranks 0, 1, ..., D - 1, and then back to rank 0 in reverse order.

Each rank has two chunks.  Rank 0 computes the loss, so it can start a backward pass as soon as a micro-batch has
returned.  See `unidirectional` for the symbols; here F, I and W are the total times of a rank's two chunks.
"""

from __future__ import annotations

import itertools

from farandole.parallel.pipeline.list_scheduling import delay_weights
from farandole.parallel.pipeline.schedule import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Schedule,
    freeze,
    of_first,
    register,
    v_shape,
)


@register("zb-v", "ZB-V (zero bubble): two chunks per rank in a V; idle time only for the first micro-batch")
def zb_v(ranks: int, micro_batches: int) -> Schedule:
    """Return the ZB-V schedule (Qi et al., 2023, "Zero Bubble Pipeline Parallelism", section 6).

    Idle time (D - 1) F / 2 if F = I = W and N >= 2 D - 1.  Activations: D.
    """
    every = max(micro_batches, 2 * ranks - 1)
    actions = [_Rank(rank, ranks).zb_v(every) for rank in range(ranks)]
    return of_first(Schedule("zb-v", freeze(actions), v_shape(ranks), (0,) * every), micro_batches)


@register("v-half", "V-Half: a V that holds about half of 1F1B's activations")
def v_half(ranks: int, micro_batches: int) -> Schedule:
    """Return the V-Half schedule (Qi et al., 2024, "Pipeline Parallelism with Controllable Memory").

    The idle time is about half of the idle time of 1F1B.  Activations: about (D + 2) // 2.
    """
    return _repeat("v-half", ranks, micro_batches, down=2, up=1)


@register("v-min", "V-Min: a V that holds about a third of 1F1B's activations")
def v_min(ranks: int, micro_batches: int) -> Schedule:
    """Return the V-Min schedule (Qi et al., 2024, "Pipeline Parallelism with Controllable Memory").

    The idle time is about 2/3 of the idle time of 1F1B.  Activations: about (D + 4) // 3.
    """
    return _repeat("v-min", ranks, micro_batches, down=1, up=1)


@register(
    "dualpipe-v",
    "DualPipeV: two chunks per rank, with pairs of forward and backward passes of both chunks",
)
def dualpipe_v(ranks: int, micro_batches: int) -> Schedule:
    """Return the DualPipeV schedule (Qi et al., 2025).

    DualPipeV is the V-shaped variant of DualPipe (DeepSeek-AI, 2024, "DeepSeek-V3 Technical Report").

    In the steady state, each forward pass of a chunk is paired with a backward pass of the other chunk, so that
    accelerators can overlap the two passes.  Without overlap, the idle time is (D - 1) F / 2 for F = I = W.
    Activations: D + 1/2.
    """
    every = max(micro_batches, 2 * ranks)
    actions = [_Rank(rank, ranks).dualpipe_v(every) for rank in range(ranks)]
    return of_first(Schedule("dualpipe-v", freeze(actions), v_shape(ranks), (0,) * every), micro_batches)


# ---- phases ----


class _Rank:
    """Builds the list of actions of one rank."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.stages = (rank, 2 * ranks - 1 - rank)
        self.actions: list[Action] = []
        self._forward, self._backward = [0, 0], [0, 0]
        self._waiting: list[BackwardWeight] = []

    def forward(self, chunk: int) -> None:
        self.actions.append(Forward(self.stages[chunk], self._forward[chunk]))
        self._forward[chunk] += 1

    def backward(self, chunk: int) -> None:
        self.actions.append(Backward(self.stages[chunk], self._backward[chunk]))
        self._backward[chunk] += 1

    def input_gradient(self, chunk: int) -> None:
        where = (self.stages[chunk], self._backward[chunk])
        self.actions.append(BackwardInput(*where))
        self._waiting.append(BackwardWeight(*where))
        self._backward[chunk] += 1

    def weight_gradient(self) -> None:
        if self._waiting:
            self.actions.append(self._waiting.pop(0))

    def zb_v(self, micro_batches: int) -> list[Action]:
        rank, ranks = self.rank, self.ranks
        # warm-up: fill the V
        for _ in range(2 * (ranks - rank) - 1):
            self.forward(0)
        for _ in range(rank):
            self.forward(1)
            self.forward(0)
        for _ in range(ranks - rank):
            self.forward(1)
            self.input_gradient(1)
            self.weight_gradient()
        # steady state: one micro-batch forward and backward through both chunks
        while self._forward[1] < micro_batches:
            if self._forward[0] < micro_batches:
                self.forward(0)
            self.input_gradient(0)
            self.weight_gradient()
            self.forward(1)
            self.input_gradient(1)
            self.weight_gradient()
        # cool-down: weight gradients fill the idle time
        for _ in range(rank):
            self.input_gradient(0)
            self.input_gradient(1)
        for _ in range(ranks - rank):
            self.input_gradient(0)
            self.weight_gradient()
        while self._waiting:
            self.weight_gradient()
        return self.actions

    def dualpipe_v(self, micro_batches: int) -> list[Action]:
        before, after = self.rank, self.ranks - 1 - self.rank
        # warm-up
        for _ in range(2 * after):
            self.forward(0)
        for _ in range(before + 1):
            self.forward(0)
            self.forward(1)
        for _ in range(after):
            self.input_gradient(1)
            self.weight_gradient()
            self.forward(1)
        # steady state: pairs of passes of different chunks
        for _ in range(micro_batches - 2 * self.ranks + before + 1):
            self.forward(0)
            self.backward(1)
            self.forward(1)
            self.backward(0)
        # cool-down, whose second half delays weight gradients
        for _ in range(after):
            self.backward(1)
            self.forward(1)
            self.backward(0)
        last = [chunk for _ in range(before + 1) for chunk in (1, 0)]
        for chunk in last[: before + 1]:
            self.backward(chunk)
        for chunk in last[before + 1 :]:
            self.input_gradient(chunk)
        for _ in range(after):
            self.weight_gradient()
            self.input_gradient(0)
        while self._waiting:
            self.weight_gradient()
        return self.actions


# ---- building blocks ----


def _repeat(name: str, ranks: int, micro_batches: int, down: int, up: int) -> Schedule:
    """Return the schedule that repeats one micro-batch's building block every 6 time units."""
    # A chunk's F, I and W take one unit each, so the 6 actions of a micro-batch occupy a rank completely.
    # From one rank to the next in the direction of the pass, F0 and I1 are delayed by `down` units, and F1
    # and I0 by `up` units.  The activations on a rank are proportional to the time between F and W.
    starts = _building_block(ranks, down, up)
    actions = []
    for rank, block in enumerate(starts):
        timed = [
            (start + 6 * m, kind(stage, m))
            for m in range(micro_batches)
            for start, kind, stage in (
                (block[0], Forward, rank),
                (block[1], Forward, 2 * ranks - 1 - rank),
                (block[2], BackwardInput, 2 * ranks - 1 - rank),
                (block[3], BackwardInput, rank),
                (block[4], BackwardWeight, 2 * ranks - 1 - rank),
                (block[5], BackwardWeight, rank),
            )
        ]
        actions.append([action for _, action in sorted(timed, key=lambda item: item[0])])
    return delay_weights(Schedule(name, freeze(actions), v_shape(ranks), (0,) * micro_batches))


def _building_block(ranks: int, down: int, up: int) -> list[tuple[int, ...]]:
    """Return, for each rank, the start times of F0, F1, I1, I0, W1 and W0, which are distinct modulo 6."""
    # Passes can pause at the ends of the V.  The chosen pauses minimize the maximum number of activations on a
    # rank, and then the total pause.
    last = ranks - 1
    choices = []
    for pauses in itertools.product(range(6), repeat=3):
        turn = down * last + 1 + pauses[0]  # F1 on the last rank
        loss = turn + up * last + 1 + pauses[1]  # I1 on rank 0
        back = loss + down * last + 1 + pauses[2]  # I0 on the last rank
        block = [
            (down * r, turn + up * (last - r), loss + down * r, back + up * (last - r)) for r in range(ranks)
        ]
        if all(len({start % 6 for start in starts}) == 4 for starts in block):
            complete = [_with_weights(starts) for starts in block]
            choices.append((max(map(_held, complete)), sum(pauses), complete))
    return min(choices)[2]


def _held(starts: tuple[int, ...]) -> int:
    """Return the maximum number of activations that a rank stores if it repeats `starts` every 6 time units."""
    spans = ((starts[0], starts[5] + 1), (starts[1], starts[4] + 1))
    return max(sum((t - first) // 6 - (t - end) // 6 for first, end in spans) for t in range(6))


def _with_weights(starts: tuple[int, ...]) -> tuple[int, ...]:
    """Return `starts` followed by the start times of W1 and W0, which use the two free time units modulo 6."""
    free = [unit for unit in range(6) if unit not in {start % 6 for start in starts}]
    _, _, second, first = starts
    choices = []
    for unit, other in (free, reversed(free)):
        w1 = second + 1 + (unit - second - 1) % 6
        w0 = first + 1 + (other - first - 1) % 6
        choices.append((w1 + w0, w1, w0))
    return (*starts, *min(choices)[1:])
