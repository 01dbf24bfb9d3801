"""Schedules with two replicas of the model on the same ranks, in opposite order.

Rank r has stage r of replica A and stage D - 1 - r of replica B, so that it can run a pass of one replica when it would
otherwise wait for the other replica.  The gradients of the two copies of a stage are summed.  Each rank stores two
stages, and therefore twice as many weights as with one replica.  See `unidirectional` for the symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from farandole.parallel.pipeline.schedule import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Schedule,
    ScheduleError,
    freeze,
    mirror,
    of_first,
    register,
)


@register("gems", "GEMS-MAST: two alternating mirrored replicas; a rank keeps one micro-batch's activations")
def gems(ranks: int, micro_batches: int, parts: int = 1) -> Schedule:
    """Return the GEMS-MAST schedule (Jain et al., 2020, "GEMS: GPU-Enabled Memory-Aware Model-Parallelism System").

    Passes of `parts` micro-batches alternate between the replicas: while the backward pass of one replica moves from
    rank to rank, the forward pass of the other replica follows in the same direction.  A rank holds the activations
    of one pass at a time.  The gradients of the replicas are summed after each pair of passes.

    For parts = 1, the makespan is N (D B + F) + (D - 1) F.  Activations: `parts`.
    """
    pairs = -(-micro_batches // (2 * parts))
    return _gems("gems", ranks, micro_batches, parts, (Backward,), pairs)


@register("gems-master", "GEMS-MASTER: like gems, but sums the replicas' gradients once per step")
def gems_master(ranks: int, micro_batches: int, parts: int = 1) -> Schedule:
    """Return the GEMS-MASTER schedule (Jain et al., 2020): GEMS-MAST with one sum of the replicas' gradients per step.

    The makespan and the activations are the same as for `gems`.
    """
    return _gems("gems-master", ranks, micro_batches, parts, (Backward,), 1)


@register("gems-w", "GEMS with separate weight gradients, which do not delay the previous stage")
def gems_w(ranks: int, micro_batches: int, parts: int = 1) -> Schedule:
    """Return GEMS-MASTER with separate weight gradients, which are computed after a pass has sent its input gradients.

    For parts = 1 and F = I = W, the makespan is N (D + 2) + D - 1 instead of N (2 D + 1) + D - 1.  Activations:
    `parts`.
    """
    return _gems("gems-w", ranks, micro_batches, parts, (BackwardInput, BackwardWeight), 1)


def _gems(
    name: str,
    ranks: int,
    micro_batches: int,
    parts: int,
    backward: tuple[Callable[[int, int], Action], ...],
    reductions: int,
) -> Schedule:
    passes = [range(first, min(first + parts, micro_batches)) for first in range(0, micro_batches, parts)]
    placement = mirror(ranks)

    def of_rank(rank: int) -> Iterator[Action]:
        for number, numbers in enumerate(passes):
            stage = ranks - 1 - rank if number % 2 else rank
            for kind in (Forward, *backward):
                yield from (kind(stage, m) for m in numbers)

    replicas = tuple(number % 2 for number, numbers in enumerate(passes) for _ in numbers)
    return Schedule(name, freeze(of_rank(rank) for rank in range(ranks)), placement, replicas, reductions)


@register("chimera", "Chimera: two mirrored replicas at the same time, for an even number of ranks")
def chimera(ranks: int, micro_batches: int) -> Schedule:
    """Return the Chimera schedule.

    Li and Hoefler, 2021, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines".

    The idle fraction is (D - 2) / (2 N + D - 2) if N is a multiple of D and B = F.  With B = 2 F, there is additional
    idle time between units of D micro-batches.  Activations: D / 2 + 1 to D.

    Raises:
        ScheduleError: for an odd number of ranks.
    """
    if ranks % 2:
        raise ScheduleError(
            f"chimera needs an even number of ranks, got {ranks}; nearest: {ranks + 1} ranks, or gems"
        )
    units = -(-micro_batches // ranks)
    numbers = [(unit, place) for unit in range(units) for place in range(ranks // 2)]

    def of_rank(rank: int) -> list[Action]:
        timed: list[tuple[int, Action]] = []
        for replica, stage in enumerate((rank, ranks - 1 - rank)):
            for unit, place in numbers:
                # If F and B take one slot each, the two replicas use slots of different parity, and a unit of D
                # micro-batches fills all slots of a rank modulo 2 D.
                forward = 2 * ranks * unit + 2 * place + stage
                backward = forward + 2 * (ranks - 1 - stage) + 1
                m = ranks * unit + 2 * place + replica
                timed += [(forward, Forward(stage, m)), (backward, Backward(stage, m))]
        return [action for _, action in sorted(timed, key=lambda item: item[0])]

    replicas = tuple(m % 2 for m in range(units * ranks))
    actions = freeze(of_rank(rank) for rank in range(ranks))
    return of_first(Schedule("chimera", actions, mirror(ranks), replicas), micro_batches)
