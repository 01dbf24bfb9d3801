"""A stage that dies, is stuck or raises an exception is named by all ranks."""

from __future__ import annotations

import itertools
import logging
import pickle
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import farandole
from farandole.comm import RankLate
from farandole.parallel.engine import Engine
from farandole.parallel.pipeline.stage import Absent
from farandole.parallel.pipeline.stage_error import StageError
from farandole.plan import MODEL_AXES, Plan
from tests.comm.jobs import Job, survivors_of
from tests.parallel.pipeline.models import (
    CLIP,
    RATE,
    Batch,
    alone,
    batches,
    build,
    compare,
    loss,
    state_of,
)

STUCK_S = 5.5


def _train(
    rank: int, size: int, tell: Callable[[Any], None], schedule: str, broken: int, sleep_s: float
) -> None:
    """Run a step; a block of rank `broken` sleeps in its second call.

    Tells the warnings of this rank, each with its delay after the start of the rank's longest wait.
    """
    engine = farandole.parallelize(build("gpt"), Plan(pipeline=size, schedule=schedule))
    calls = itertools.count(1)

    def sleep(*_: Any) -> None:
        if next(calls) == 2:
            tell("sleeps")
            time.sleep(sleep_s)

    if rank == broken:
        block = next(block for block in engine.model if not isinstance(block, Absent))
        block.register_forward_hook(sleep)
    warnings: list[tuple[str, float]] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append((record.getMessage(), time.perf_counter()))  # type: ignore[method-assign]
    logging.getLogger("farandole").addHandler(handler)
    engine.forward_backward(batches("gpt", 0, 0, 4), loss)
    assert engine.pipeline is not None
    waits = itertools.pairwise(engine.pipeline.spans)
    longest = max(waits, key=lambda spans: spans[1].start - spans[0].end)
    tell([(text, at - longest[0].end) for text, at in warnings])
    engine.close()


@pytest.mark.parametrize(
    ("schedule", "broken", "stages"),
    [("1f1b", 1, "stage 1"), ("zb-v", 3, "stages 3 and 4"), ("gems", 0, "stages 0 and 3")],
)
def test_a_killed_stage_is_named_by_all_ranks(schedule: str, broken: int, stages: str) -> None:
    with Job(4, _train, schedule, broken, 60) as job:
        assert job.hear(broken) == "sleeps"
        killed = job.kill(broken, signal.SIGKILL)
        survivors_of(job, broken, killed, "RankDied", rf"^rank {broken} \(process \d+, {stages}\) died")


def test_a_stuck_stage_is_named_within_five_seconds() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2."""
    with Job(3, _train, "1f1b", 2, STUCK_S) as job:
        assert job.hear(2) == "sleeps"
        warnings = [job.hear(rank) for rank in range(3)]
        stuck = rf"the message from rank 2 \(process {job.pid(2)}, stage 2\) has not arrived"
    assert warnings[2] == []
    for rank in range(2):
        ((text, waited_s),) = warnings[rank]
        assert re.search(
            rf"rank {rank} \(process \d+, stage {rank}\) has waited \d+ s in recv\(.*; {stuck}", text
        )
        assert waited_s < 5


def _late(rank: int, size: int) -> None:
    """Rank 0 sends nothing to rank 1, before and after the engine is closed."""

    def receive() -> str:
        group = dist.new_group(timeout=timedelta(seconds=0.3))
        text = ""
        if rank == 1:
            with pytest.raises(RankLate) as caught:
                dist.recv(torch.ones(2), 0, group)
            text = str(caught.value)
        dist.barrier()
        dist.destroy_process_group(group)
        return re.sub(r"process \d+", "process", text)

    engine = farandole.parallelize(build("gpt"), Plan(pipeline=size, schedule="1f1b"))
    with_stages = receive()
    engine.close()
    without = receive()
    if rank == 1:
        for text, first, second in ((with_stages, ", stage 0", ", stage 1"), (without, "", "")):
            assert text.startswith(
                f"rank 0 (process{first}) did not send the message that rank 1 (process{second}) expected"
            )


def test_a_late_stage_is_named_until_the_engine_is_closed(ranks: Any) -> None:
    ranks(2).run(_late)


class _Broken(Exception):
    """Raised by a stage of a test."""


def _broken_loss(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    if len(batch[0]) == 2:
        raise _Broken("no such class")
    return loss(output, batch)


def _break(engine: Engine, kind: str) -> Any:
    """Let block 3 fail in its second forward or backward pass; return the handle of its hook."""
    return _break_block(engine.model[3], kind)


def _break_block(block: nn.Module, kind: str) -> Any:
    """Let a block fail in its second forward or backward pass; return the handle of its hook."""
    calls = itertools.count(1)

    def fail(gradient: Tensor) -> None:
        if next(calls) == 2:
            raise _Broken("no such row")

    def hook(block: nn.Module, inputs: Any, output: Tensor) -> None:
        if kind == "forward":
            fail(output)
        elif output.requires_grad:
            output.register_hook(fail)

    return block.register_forward_hook(hook)


def _raises(rank: int, size: int, plan: Plan, kinds: list[str]) -> tuple[list[str], Any]:
    """Return the errors of steps in which a stage fails, and the results of the step that follows."""
    model, micro_batches = build("gpt"), 4
    engine = farandole.parallelize(model, plan)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), RATE))
    replica = engine.mesh.replica_of(rank)
    samples = batches("gpt", 0, replica, micro_batches)
    found = []
    for kind in kinds:
        handle = _break(engine, kind) if kind in ("forward", "backward") and not replica else None
        broken = _broken_loss if kind in ("loss", "metric") and not replica else loss
        run = engine.evaluate if kind == "metric" else engine.forward_backward
        with pytest.raises(StageError) as caught:
            run(samples, broken)
        if handle is not None:
            handle.remove()
        own = caught.value.__cause__
        found.append(f"{caught.value} ({type(own).__name__})")
    losses = [engine.forward_backward(samples, loss).loss]
    norms = [engine.clip(CLIP)]
    optimizer.step()
    optimizer.zero_grad()
    metric = engine.evaluate(batches("gpt", 9, replica, micro_batches), loss)
    names = {p: n for n, p in model.named_parameters()}
    state = state_of(model, ((names[p], value) for p, value in engine.whole_parameters()))
    engine.close()
    return found, (state, losses, norms, metric)


@pytest.mark.parametrize("schedule", ["1f1b", "gems", "zb-v"])
@pytest.mark.parametrize("stages", [2, 4])
def test_an_exception_is_raised_on_all_ranks_and_the_next_step_works(
    ranks: Any, schedule: str, stages: int
) -> None:
    kinds = ["loss", "forward", "backward", "metric"]
    results = ranks(stages).run(_raises, Plan(pipeline=stages, schedule=schedule), kinds)
    passes = ["forward pass", "forward pass", "backward pass|input gradient", "forward pass"]
    errors = ["no such class", "no such row", "no such row", "no such class"]
    last = {"1f1b": stages - 1, "gems": stages - 1, "zb-v": 2 * stages - 1}[schedule]
    for number, (kind, what) in enumerate(zip(passes, errors, strict=True)):
        found = [each[0][number] for each in results]
        pattern = rf"rank (\d): the ({kind}) of micro-batch \d failed in stage (\d): .*_Broken: {what}; see 'farandole "
        matches = [re.match(pattern, text) for text in found]
        assert all(matches), found
        assert len({match[0] for match in matches if match}) == 1, found
        rank, stage = int(matches[0][1]), int(matches[0][3])  # type: ignore[index]
        assert found[rank].endswith("(_Broken)")
        assert stage == last or "row" in what
    compare([each[1] for each in results], alone("gpt", 4, steps=1))


def test_an_exception_is_raised_in_other_replicas_and_precisions(ranks: Any) -> None:
    kinds = ["loss", "backward"]
    results = ranks(4).run(_raises, Plan(data=2, pipeline=2, zero=1), kinds)
    for found, _ in results:
        assert found[0].startswith("rank 1: the forward pass of micro-batch 1 failed in stage 1: ")
        assert "_Broken: no such row" in found[1]
    compare([each[1] for each in results], alone("gpt", 4, replicas=2, steps=1))
    for found, (_, losses, *_) in ranks(2).run(_raises, Plan(pipeline=2, precision="fp16"), kinds):
        assert "_Broken: no such class" in found[0] and "_Broken: no such row" in found[1]
        assert losses == pytest.approx(alone("gpt", 4, steps=1)[1], rel=0.01)


def _raises_on_one_peer(rank: int, size: int, name: str, plan: Plan, failures: list[tuple[int, str]]) -> Any:
    """Let one rank of a stage fail in each step; return the errors and their seconds, and the results of the last step."""
    model = build(name)
    engine = farandole.parallelize(model, plan)
    optimizer = engine.optimizer(torch.optim.SGD(model.parameters(), RATE))
    samples = batches("gpt", 0, engine.mesh.replica_of(rank), 4)
    found = []
    for broken, kind in failures:
        fails = rank == broken
        handles = []
        if fails and kind != "loss":
            block = next(block for block in engine.model if not isinstance(block, Absent))
            handles = [_break_block(block, kind)]
        begun = time.perf_counter()
        with pytest.raises(StageError) as caught:
            engine.forward_backward(samples, _broken_loss if fails and kind == "loss" else loss)
        found.append((str(caught.value), time.perf_counter() - begun))
        for handle in handles:
            handle.remove()
    losses = [engine.forward_backward(samples, loss).loss]
    norms = [engine.clip(CLIP)]
    optimizer.step()
    optimizer.zero_grad()
    metric = engine.evaluate(batches("gpt", 9, engine.mesh.replica_of(rank), 4), loss)
    names = {p: n for n, p in model.named_parameters()}
    state = state_of(model, ((names[p], value) for p, value in engine.whole_parameters()))
    engine.close()
    return found, (state, losses, norms, metric)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(pipeline=2, tensor=2),
        Plan(pipeline=2, tensor=2, sequence=True, schedule="zb-v", zero=1),
        Plan(pipeline=2, context=2),
        Plan(pipeline=2, tensor=2, schedule="gems"),
        Plan(pipeline=2, expert=2),
    ],
    ids=lambda plan: f"{plan.schedule}-{next(axis for axis in MODEL_AXES if getattr(plan, axis) > 1)}",
)
def test_an_exception_of_one_rank_of_a_stage_is_raised_on_all_ranks(ranks: Any, plan: Plan) -> None:
    """The other rank of the stage waits for the failed rank in a collective, and the timeout is 1800 s."""
    failures = [(broken, kind) for broken in range(4) for kind in ("forward", "backward")]
    last = [2, 3] if plan.schedule == "1f1b" else [0, 1]  # where the loss of micro-batch 1 is computed
    failures += [(broken, "loss") for broken in last]
    name = "gpt" if plan.expert == 1 else "mixtral"
    results = ranks(4).run(_raises_on_one_peer, name, plan, failures)
    _check_failures(results, failures)
    compare([each[1] for each in results], alone(name, 4, replicas=plan.expert, steps=1))


def _check_failures(results: list[Any], failures: list[tuple[int, str]]) -> None:
    """Check that all ranks raised the same error soon after each failure."""
    for number, (broken, kind) in enumerate(failures):
        texts = {found[number][0] for found, _ in results}
        assert len(texts) == 1, texts
        action = {"backward": "backward pass|input gradient|weight gradient"}.get(kind, "forward pass")
        what = "no such class" if kind == "loss" else "no such row"
        pattern = rf"rank {broken}: the ({action}) of micro-batch \d failed in stage \d: .*_Broken: {what}; "
        assert re.match(pattern, texts.pop())
        assert max(found[number][1] for found, _ in results) < 3


def _raises_on_hosts(
    rank: int, size: int, tell: Callable[[Any], None], plan: Plan, failures: list[tuple[int, str]]
) -> None:
    tell(pickle.dumps(_raises_on_one_peer(rank, size, "gpt", plan, failures)))


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 0, 1]], ids=["stages", "tensor"])
def test_an_exception_is_raised_on_all_hosts(hosts: list[int]) -> None:
    """A message between stages or a collective within a stage crosses the network."""
    failures = [(0, "forward"), (1, "backward"), (2, "backward"), (3, "loss")]
    with Job(4, _raises_on_hosts, Plan(pipeline=2, tensor=2), failures, hosts=hosts) as job:
        results = [pickle.loads(job.hear(rank)) for rank in range(4)]
    _check_failures(results, failures)
    compare([each[1] for each in results], alone("gpt", 4, steps=1))


def test_an_exception_is_raised_over_gloo(ranks: Any) -> None:
    results = ranks(2, "gloo").run(_raises, Plan(pipeline=2), ["loss", "backward"])
    compare([each[1] for each in results], alone("gpt", 4, steps=1))


def _generates(rank: int, size: int) -> str:
    engine = farandole.parallelize(build("gpt"), Plan(pipeline=2))
    engine.model.eval()
    handle = engine.model[-1].register_forward_hook(lambda *_: 1 / 0)
    with torch.no_grad(), pytest.raises(StageError) as caught:
        engine(torch.ones(1, 4, dtype=torch.int64))
    handle.remove()
    with torch.no_grad():
        assert engine(torch.ones(1, 4, dtype=torch.int64)).shape[:2] == (1, 4)
    engine.close()
    return str(caught.value)


def test_an_exception_in_a_call_of_the_model_is_raised_on_all_ranks(ranks: Any) -> None:
    for text in ranks(2).run(_generates):
        assert text.startswith(
            "rank 1: the forward pass of micro-batch 0 failed in stage 1: ZeroDivisionError"
        )
