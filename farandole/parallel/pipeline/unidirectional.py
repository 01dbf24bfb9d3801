"""Schedules in which all micro-batches pass through the ranks in the same direction.

D is the number of ranks, N the number of micro-batches.  For one micro-batch on one rank, F, I and W are the times of
the forward pass, the input gradient and the weight gradient, and B = I + W.  Activation memory is given in units of one
micro-batch's activations on one rank.
"""

from __future__ import annotations

from farandole.parallel.pipeline.schedule import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Schedule,
    freeze,
    linear,
    of_first,
    register,
)


@register("layer", "layer parallelism: one micro-batch at a time")
def layer(ranks: int, micro_batches: int) -> Schedule:
    """Return the schedule of layer parallelism: a micro-batch starts when the previous one has left the pipeline.

    Idle fraction (D - 1) / D.  Activations: 1.
    """
    numbers = range(micro_batches)
    actions = [[kind(rank, m) for m in numbers for kind in (Forward, Backward)] for rank in range(ranks)]
    return Schedule("layer", freeze(actions), linear(ranks), (0,) * micro_batches)


@register("layer-w", "layer parallelism; weight gradients run after the input gradient has been sent")
def layer_w(ranks: int, micro_batches: int) -> Schedule:
    """Return the schedule of layer parallelism with separate weight gradients.

    Weight gradients are computed after the input gradient has been sent, so they do not delay the previous stage.

    A micro-batch takes D (F + I) + W.  Activations: 1.
    """
    kinds = (Forward, BackwardInput, BackwardWeight)
    numbers = range(micro_batches)
    actions = [[kind(rank, m) for m in numbers for kind in kinds] for rank in range(ranks)]
    return Schedule("layer-w", freeze(actions), linear(ranks), (0,) * micro_batches)


@register("gpipe", "GPipe: all forward passes, then all backward passes")
def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """Return the GPipe schedule (Huang et al., 2019): all forward passes, then all backward passes.

    Idle fraction (D - 1) / (N + D - 1).  Activations: N.
    """
    numbers = range(micro_batches)
    actions = [
        [*(Forward(rank, m) for m in numbers), *(Backward(rank, m) for m in numbers)] for rank in range(ranks)
    ]
    return Schedule("gpipe", freeze(actions), linear(ranks), (0,) * micro_batches)


@register("1f1b", "1F1B: each rank alternates between forward and backward passes")
def one_forward_one_backward(ranks: int, micro_batches: int) -> Schedule:
    """Return the 1F1B schedule (Narayanan et al., 2019, "PipeDream"; Fan et al., 2021, "DAPPLE").

    Idle time (D - 1)(F + B).  Activations: min(D - r, N) on rank r.
    """
    actions = []
    for rank in range(ranks):
        warm_up = min(ranks - 1 - rank, micro_batches)
        forward = [Forward(rank, m) for m in range(micro_batches)]
        backward = [Backward(rank, m) for m in range(micro_batches)]
        actions.append(_alternate(forward, backward, warm_up))
    return Schedule("1f1b", freeze(actions), linear(ranks), (0,) * micro_batches)


@register("interleaved", "interleaved 1F1B: several chunks of the model per rank")
def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Return the interleaved 1F1B schedule.

    Narayanan et al., 2021, "Efficient Large-Scale Language Model Training on GPU Clusters".

    Micro-batches pass through the chunks in groups of D.  Idle time (D - 1)(F + B) / chunks.
    Activations: D + (D - 1) / chunks.
    """
    rounds = -(-micro_batches // ranks)
    every = rounds * ranks
    actions = []
    for rank in range(ranks):
        passes = [
            (chunk, number * ranks + place)
            for number in range(rounds)
            for chunk in range(chunks)
            for place in range(ranks)
        ]
        forward = [Forward(chunk * ranks + rank, m) for chunk, m in passes]
        backward = [Backward((chunks - 1 - chunk) * ranks + rank, m) for chunk, m in passes]
        # the last rank needs all chunks of the first round; each hop away from it takes one forward and one backward
        warm_up = min((chunks - 1) * ranks + 2 * (ranks - 1 - rank), len(passes))
        actions.append(_alternate(forward, backward, warm_up))
    schedule = Schedule("interleaved", freeze(actions), linear(ranks, chunks), (0,) * every)
    return of_first(schedule, micro_batches)


@register("zb-h1", "ZB-H1 (zero bubble): 1F1B whose idle time is filled with weight gradients")
def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """Return the ZB-H1 schedule (Qi et al., 2023, "Zero Bubble Pipeline Parallelism"), also called ZB-1P.

    Rank r delays weight gradients by r micro-batches, so every rank holds the activations of D micro-batches.

    Idle time (D - 1)(F + I - W).
    """
    actions = []
    for rank in range(ranks):
        warm_up = min(ranks - 1 - rank, micro_batches)
        order: list[Action] = [Forward(rank, m) for m in range(warm_up)]
        waiting: list[int] = []
        for m in range(micro_batches):
            if warm_up + m < micro_batches:
                order.append(Forward(rank, warm_up + m))
            order.append(BackwardInput(rank, m))
            waiting.append(m)
            if len(waiting) > rank:
                order.append(BackwardWeight(rank, waiting.pop(0)))
        actions.append([*order, *(BackwardWeight(rank, m) for m in waiting)])
    return Schedule("zb-h1", freeze(actions), linear(ranks), (0,) * micro_batches)


def _alternate(forward: list[Forward], backward: list[Backward], warm_up: int) -> list[Action]:
    """Return `warm_up` forward passes, then forward/backward pairs, then the remaining backward passes."""
    steady = len(forward) - warm_up
    pairs = zip(forward[warm_up:], backward[:steady], strict=True)
    return [*forward[:warm_up], *(action for pair in pairs for action in pair), *backward[steady:]]
