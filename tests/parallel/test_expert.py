"""Expert parallelism: ranks that share experts give the losses, gradients and weights of one process."""

from __future__ import annotations

from typing import Any

import pytest

import farandole
from farandole.plan import Plan, PlanError
from tests.parallel.plans import build, compare, inputs_of, train


@pytest.mark.parametrize("name", ["mixtral", "deepseek", "capacity"])
@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_ranks_that_share_experts_train_as_one_process(ranks: Any, name: str, backend: str) -> None:
    for plan, size in [
        (Plan(expert=2), 2),
        (Plan(expert=3), 3),  # 2, 1 and 1 experts
        (Plan(expert=4), 4),
        (Plan(expert=2, zero=2), 4),
        (Plan(expert=2, zero=3), 4),
        (Plan(expert=2, recompute="block"), 2),
    ]:
        alone = ranks(1).run(train, name, Plan(), plan.sizes(size)["data"] * plan.expert)[0]
        compare(ranks(size, backend).run(train, name, plan), alone, name, plan, size)


def _refused(rank: int, size: int, name: str, plan: Plan) -> str:
    with pytest.raises(PlanError) as error:
        farandole.parallelize(build(name), plan)
    return str(error.value)


def test_models_without_enough_experts_are_refused(ranks: Any) -> None:
    assert "has no mixture of experts" in ranks(2).run(_refused, "gpt", Plan(expert=2))[0]
    assert "has 4 experts; nearest plan: expert=4" in ranks(5).run(_refused, "mixtral", Plan(expert=5))[0]


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
