"""Expert parallelism: ranks that share experts give the losses, gradients and weights of one process."""

from __future__ import annotations

from typing import Any

import pytest

import farandole
from farandole.models.moe import take_loads
from farandole.plan import Plan, PlanError
from tests.parallel.plans import alone, build, compare, inputs_of, train


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "farandole") for name in ("mixtral", "deepseek", "capacity")),
        ("mixtral", "gloo"),
        *(pytest.param(name, "gloo", marks=pytest.mark.slow) for name in ("deepseek", "capacity")),
    ],
)
def test_ranks_that_share_experts_train_as_one_process(ranks: Any, name: str, backend: str) -> None:
    for plan, size in [
        (Plan(expert=2), 2),
        (Plan(expert=3), 3),  # 2, 1 and 1 experts
        (Plan(expert=4), 4),
        (Plan(expert=2, zero=2), 4),
        (Plan(expert=2, zero=3), 4),
        (Plan(expert=2, recompute="block"), 2),
    ]:
        expected = alone(ranks, name, replicas=plan.sizes(size)["data"] * plan.expert)
        compare(ranks(size, backend).run(train, name, plan), expected, name, plan, size)


def _loads(rank: int, size: int, plan: Plan, replicas: int) -> dict[str, tuple[list[float], float]]:
    """Return the tokens of each expert and the share of dropped tokens in a step, for each router."""
    engine = farandole.parallelize(model := build("capacity"), plan)
    mine = range(replicas)[engine.mesh.replica_of(rank) :: engine.mesh.replicas]
    engine.forward_backward(
        [inputs_of("capacity", 0, number) for number in mine],
        lambda output, _: output,
        lambda batch: {"inputs": batch[0], "targets": batch[1]},
    )
    loads = take_loads(model, engine.comm.all_reduce)
    engine.close()
    return {name: (load.tokens.tolist(), load.dropped) for name, load in loads.items()}


@pytest.mark.parametrize(
    "plan",
    [
        Plan(expert=2),
        Plan(expert=2, recompute="block"),
        Plan(tensor=2, sequence=True),
        Plan(tensor=2, expert=2, recompute="selective"),
    ],
)
def test_loads_count_each_token_once(ranks: Any, plan: Plan) -> None:
    (expected,) = ranks(1).run(_loads, Plan(data=1), 2)
    assert all(sum(tokens) == 2 * 2 * 9 * 2 and dropped > 0 for tokens, dropped in expected.values())
    for found in ranks(plan.tensor * plan.expert).run(_loads, plan, 2):
        assert found == expected


def _refused(rank: int, size: int, name: str, plan: Plan) -> str:
    with pytest.raises(PlanError) as error:
        farandole.parallelize(build(name), plan)
    return str(error.value)


def test_models_without_enough_experts_are_refused(ranks: Any) -> None:
    assert "has no mixture of experts" in ranks(2).run(_refused, "gpt", Plan(expert=2))[0]
    assert (
        "has only 4 experts; nearest plan: expert=4" in ranks(5).run(_refused, "mixtral", Plan(expert=5))[0]
    )


def _uneven(rank: int, size: int) -> str:
    engine = farandole.parallelize(build("mixtral"), Plan(expert=2))
    batches = [inputs_of("mixtral", 0, number) for number in range(1 + rank)]
    with pytest.raises(ValueError, match="same number of micro-batches") as error:
        engine.forward_backward(
            batches, lambda output, _: output, lambda batch: {"inputs": batch[0], "targets": batch[1]}
        )
    engine.close()
    return str(error.value)


def test_different_numbers_of_micro_batches_are_refused(ranks: Any) -> None:
    for message in ranks(2).run(_uneven):
        assert "got 1 on rank 0, 2 on rank 1; pass" in message
