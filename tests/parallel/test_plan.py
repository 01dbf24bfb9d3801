import random
import re
from typing import Any

from farandole.plan import LoRA, Plan, PlanError

FIELDS: dict[str, list[Any]] = {
    "data": [None, 1, 2, 3, 4],
    "pipeline": [1, 2, 4],
    "schedule": ["1f1b", "interleaved", "zb-v"],
    "stage_bytes": [None, 1000],
    "deferred_batch_norm": [False, True],
    "tensor": [1, 2, 3],
    "sequence": [False, True],
    "context": [1, 2, 4, 6],
    "ring": [None, 1, 2, 3, -2, 5],
    "expert": [1, 2],
    "zero": [0, 1, 2, 3],
    "data_shard": ["all", "host", 1, 2, 3, 4],
    "precision": ["fp32", "bf16", "fp16", "fp8"],
    "recompute": ["none", "block", "auto", "selective"],
    "activation_bytes": [None, 1000],
    "swap": ["none", "host", "disk:x"],
    "offload": ["none", "host", "disk:x"],
    "offloaded": ["optimizer", "gradients", "parameters"],
    "rounding": ["nearest", "stochastic"],
    "compression": ["none", "bf16"],
    "lora": [None, LoRA()],
}
"""Values of the fields of `Plan`; the first value is the default."""


def test_following_the_nearest_plans_ends_in_a_valid_plan() -> None:
    generator = random.Random(0)
    for _ in range(5000):
        fields = {
            name: generator.choice(values) if generator.random() < 0.35 else values[0]
            for name, values in FIELDS.items()
        }
        _follow(fields, ranks=generator.choice([1, 2, 3, 4, 5, 6, 8, 12, 16]))


def _follow(fields: dict[str, Any], ranks: int, steps: int = 12) -> None:
    """Change `fields` as the first nearest plan of each error says, until the plan is valid on `ranks` ranks."""
    errors: list[str] = []
    for _ in range(steps):
        try:
            Plan(**fields).sizes(ranks)
            return
        except PlanError as error:
            errors.append(str(error))
        near = re.search(r"nearest plan: (.*?)(, or |;|$)", errors[-1])
        assert near is not None, errors
        changes = re.findall(r"(\w+)=('[^']*'|[-\w]+)", near[1])
        assert changes, errors
        fields = fields | {name: eval(value) for name, value in changes}
        if more := re.search(r"with (\d+) ranks", near[1]):
            ranks = int(more[1])
    raise AssertionError("\n".join(errors))
