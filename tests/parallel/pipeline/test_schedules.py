"""Schedules: complete and free of deadlock for any size, with the idle time and activations of the literature.

`torch.distributed.pipelining` is the second opinion: its schedules take as long as ours in the simulator.
"""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from farandole.parallel.pipeline import schedule as registry
from farandole.parallel.pipeline.schedule import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Schedule,
    ScheduleError,
    build,
    linear,
    register,
    registered,
    v_shape,
)
from farandole.parallel.pipeline.simulate import Costs, simulate

NAMES = [
    "layer", "layer-w", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "v-min", "dualpipe-v", "gems",
    "gems-master", "gems-w", "chimera",
]  # fmt: skip

TABLE = [  # name, options, costs, then (idle or lost fraction, activations) for 4 and 8 ranks; F = I = W = 1, N = 16
    ("layer", {}, Costs(), (0.750, 1), (0.875, 1)),
    ("layer-w", {}, Costs(), (0.667, 1), (0.824, 1)),
    ("gems", {}, Costs(), (0.673, 1), (0.828, 1)),
    ("gems-master", {}, Costs(), (0.673, 1), (0.828, 1)),
    ("gems-w", {}, Costs(), (0.515, 1), (0.713, 1)),
    ("gems-w", {"parts": 2}, Costs(), (0.360, 2), (0.568, 2)),
    ("1f1b", {}, Costs(), (0.158, 4), (0.304, 8)),
    ("1f1b", {}, Costs(recompute=True), (0.368, 1), (0.478, 1)),
    ("zb-v", {}, Costs(), (0.030, 4), (0.068, 8)),
    ("dualpipe-v", {}, Costs(), (0.030, 4.5), (0.068, 8.5)),
]


@pytest.mark.parametrize(("name", "options", "costs", "four", "eight"), TABLE)
def test_idle_time_and_activations_are_those_of_the_literature(name, options, costs, four, eight):
    for ranks, (idle, activations) in ((4, four), (8, eight)):
        timeline = simulate(build(name, ranks, 16, **options), costs)
        assert round(timeline.lost, 3) == idle
        assert timeline.peak == activations


COSTS = [Costs(1, 1, 1), Costs(2, 3, 1), Costs(1, 4, 3)]


def _idle_time(name: str, ranks: int, micro_batches: int, costs: Costs, **options: int) -> float:
    timeline = simulate(build(name, ranks, micro_batches, **options), costs)
    return timeline.makespan - micro_batches * (costs.forward + costs.input + costs.weight)


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_idle_times_are_those_of_the_formulas(ranks, costs):
    n, f, i, w = 3 * ranks, costs.forward, costs.input, costs.weight
    assert _idle_time("gpipe", ranks, n, costs) == (ranks - 1) * (f + i + w)
    assert _idle_time("1f1b", ranks, n, costs) == (ranks - 1) * (f + i + w)
    for chunks in (2, 3):
        found = _idle_time("interleaved", ranks, n, costs, chunks=chunks)
        assert found == pytest.approx((ranks - 1) * (f + i + w) / chunks)
    if w <= min(f, i):  # the weight gradients fit in the idle time
        assert _idle_time("zb-h1", ranks, n, costs) == (ranks - 1) * (f + i - w)
    for name in ("gems", "gems-master"):
        timeline = simulate(build(name, ranks, n), costs)
        assert timeline.makespan == n * (ranks * (i + w) + f) + (ranks - 1) * f


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
@pytest.mark.parametrize("units", [1, 2, 4])
def test_chimera_is_idle_for_as_long_as_in_the_paper(ranks, units):
    n = units * ranks
    timeline = simulate(build("chimera", ranks, n), Costs(1, 0.5, 0.5))
    assert timeline.idle == pytest.approx((ranks - 2) / (2 * n + ranks - 2))
    assert timeline.peaks[0] == ranks // 2 + 1
    assert timeline.peak == ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_activations_are_those_of_the_papers(ranks):
    def peak(name, **options):
        return simulate(build(name, ranks, 4 * ranks, **options)).peak

    assert peak("gpipe") == 4 * ranks
    assert peak("1f1b") == peak("zb-h1") == peak("zb-v") == ranks
    assert peak("interleaved") == ranks + (ranks - 1) / 2
    assert peak("v-half") == (ranks + 2) // 2
    assert peak("v-min") == (ranks + 4) // 3 if ranks != 3 else 2
    assert peak("dualpipe-v") == (ranks + 0.5 if ranks > 1 else 1.5)
    assert peak("gems", parts=2) == peak("gems-w", parts=2) == 2


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(ranks=st.integers(1, 9), micro_batches=st.integers(1, 20))
@example(ranks=4, micro_batches=1)
@example(ranks=8, micro_batches=7)
def test_any_size_is_complete_and_free_of_deadlock(name, ranks, micro_batches):
    if name == "chimera" and ranks % 2:
        with pytest.raises(ScheduleError, match="even number of ranks"):
            build(name, ranks, micro_batches)
        return
    timeline = simulate(build(name, ranks, micro_batches), Costs(1.0, 0.7, 0.4, send=0.1))
    work = micro_batches * (1.0 + 0.7 + 0.4)
    assert timeline.busy == pytest.approx([work] * ranks)
    assert timeline.makespan >= work - 1e-9


@settings(max_examples=15, deadline=None)
@given(
    ranks=st.integers(1, 6),
    micro_batches=st.integers(1, 13),
    parts=st.integers(1, 5),
    chunks=st.integers(1, 4),
)
def test_options_allow_any_size(ranks, micro_batches, parts, chunks):
    simulate(build("interleaved", ranks, micro_batches, chunks=chunks))
    for name in ("gems", "gems-w"):
        timeline = simulate(build(name, ranks, micro_batches, parts=parts))
        assert timeline.peak == min(parts, micro_batches)


# ---- a second opinion ----


class _Stage:
    """The attributes of a pipeline stage that torch's schedules read."""

    def __init__(self, rank: int, ranks: int, index: int, stages: int) -> None:
        self.group_rank, self.group_size, self.stage_index, self.num_stages = rank, ranks, index, stages
        self.is_first, self.is_last, self.has_backward, self.submod = (
            index == 0,
            index == stages - 1,
            True,
            None,
        )
        self.stage_index_to_group_rank = {stage: stage % ranks for stage in range(stages)}


KINDS = {"F": Forward, "B": Backward, "I": BackwardInput, "W": BackwardWeight}
KINDS_OF_TORCH = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def _of_torch(kind: type, ranks: int, micro_batches: int, chunks: int, placement) -> Schedule:
    """Return a schedule of torch as a schedule of ours."""
    stages = [_Stage(0, ranks, number, ranks * chunks) for number in range(chunks)]
    made = kind(stages, micro_batches, loss_fn=lambda output, target: output)

    def flat(actions):
        for action in actions:
            if action is not None:
                yield from flat(action.sub_actions) if action.sub_actions else [action]

    actions = tuple(
        tuple(
            KINDS[KINDS_OF_TORCH[a.computation_type.name]](a.stage_index, a.microbatch_index)
            for a in flat(made.pipeline_order[rank])
        )
        for rank in range(ranks)
    )
    return Schedule(kind.__name__, actions, placement, (0,) * micro_batches)


TORCH = [
    ("1f1b", {}, "ScheduleInterleaved1F1B", 1, linear),
    ("interleaved", {"chunks": 2}, "ScheduleInterleaved1F1B", 2, lambda ranks: linear(ranks, 2)),
    ("interleaved", {"chunks": 3}, "ScheduleInterleaved1F1B", 3, lambda ranks: linear(ranks, 3)),
    ("zb-h1", {}, "ScheduleInterleavedZeroBubble", 1, linear),
    ("zb-v", {}, "ScheduleZBVZeroBubble", 2, v_shape),
    ("dualpipe-v", {}, "ScheduleDualPipeV", 2, v_shape),
]


@pytest.mark.parametrize(("name", "options", "other", "chunks", "placement"), TORCH)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 16), (3, 12)])
@pytest.mark.parametrize("costs", COSTS)
def test_torch_takes_as_long(name, options, other, chunks, placement, ranks, micro_batches, costs):
    theirs = _of_torch(getattr(torch_schedules, other), ranks, micro_batches, chunks, placement(ranks))
    ours = build(name, ranks, micro_batches, **options)
    assert simulate(ours, costs).makespan == pytest.approx(simulate(theirs, costs).makespan)


# ---- mistakes ----


def test_incomplete_and_deadlocked_schedules_are_refused():
    good = build("1f1b", 2, 2)
    first, second = good.actions
    with pytest.raises(ScheduleError, match="B1 of stage 0 on rank 0 runs twice"):
        simulate(replace(good, actions=((*first, Backward(0, 1)), second)))
    with pytest.raises(ScheduleError, match="F1 of stage 1 is missing"):
        simulate(replace(good, actions=(first, second[:2])))
    with pytest.raises(ScheduleError, match="B0 of stage 1 on rank 1 runs before F0 of stage 1"):
        simulate(replace(good, actions=(first, (second[1], second[0], *second[2:]))))
    with pytest.raises(ScheduleError, match="F0 of stage 0 on rank 1: expected this action on rank 0"):
        simulate(replace(good, actions=((), (first[0], *second))))
    waits = (Forward(0, 0), Backward(0, 0), Forward(0, 1), Backward(0, 1))
    crossed = (Forward(1, 1), Backward(1, 1), Forward(1, 0), Backward(1, 0))
    with pytest.raises(
        ScheduleError,
        match="rank 0 cannot run B0 of stage 0 before I of stage 1; rank 1 cannot run F1 of stage 1",
    ):
        simulate(replace(good, actions=(waits, crossed)))


def test_wrong_names_options_and_sizes_are_refused():
    with pytest.raises(ScheduleError, match="unknown schedule 'gem'; did you mean gems"):
        build("gem", 2, 2)
    with pytest.raises(ScheduleError, match="1f1b has no option 'parts'; options of 1f1b: none"):
        build("1f1b", 2, 2, parts=2)
    with pytest.raises(ScheduleError, match="expected parts of at least 1, got 0"):
        build("gems", 2, 2, parts=0)
    with pytest.raises(ScheduleError, match="at least 1 rank and 1 micro-batch"):
        build("gems", 2, 0)
    with pytest.raises(
        ScheduleError, match="forward: expected one cost for each of the 2 stages of gpipe, got 3"
    ):
        simulate(build("gpipe", 2, 2), Costs(forward=[1, 2, 3]))


def test_users_register_schedules(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))

    @register("reversed", "the last micro-batch first")
    def reverse(ranks: int, micro_batches: int) -> Schedule:
        actions = tuple(
            tuple(kind(rank, m) for m in reversed(range(micro_batches)) for kind in (Forward, Backward))
            for rank in range(ranks)
        )
        return Schedule("reversed", actions, linear(ranks), (0,) * micro_batches)

    assert "reversed" in [each.name for each in registered()]
    assert simulate(build("reversed", 3, 4)).idle == simulate(build("layer", 3, 4)).idle


def test_every_schedule_is_documented():
    assert [each.name for each in registered()] == NAMES
    for each in registered():
        text = inspect.getdoc(each.builder) or ""
        assert "ctivations" in text
        assert "dle" in text or "akespan" in text or "takes" in text
        assert len(each.summary) < 90


def test_costs_may_differ_between_stages_and_sends_take_time():
    timeline = simulate(build("layer", 2, 1), Costs(forward=[1, 2], input=[3, 4], weight=[5, 6], send=0.5))
    assert [(s.start, s.end) for s in timeline.spans[0]] == [(0, 1), (14, 22)]
    assert [(s.start, s.end) for s in timeline.spans[1]] == [(1.5, 3.5), (3.5, 13.5)]
    assert timeline.messages == (1, 1)
