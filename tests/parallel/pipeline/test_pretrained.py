"""Hugging Face folders train in stages as `transformers` in one process, and are written for `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

import farandole
from farandole.models.hf import from_pretrained
from farandole.parallel.lora import add_lora
from farandole.plan import LoRA, Plan
from tests.models.hf.families import folder_of, reference, rope, transformers
from tests.parallel.one_process import losses_of

STEPS, RATE, PARTS = 3, 0.5, 3


def _tokens(vocabulary: int, replica: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randint(0, vocabulary, (2 * PARTS, 13), generator=generator)


def _train(
    rank: int, size: int, folder: Path, plan: Plan, out: Path, lazy: bool
) -> tuple[list[float], list[float]]:
    """Return the losses, and the losses of the first step again after the written weights were loaded."""
    model = from_pretrained(folder, lazy=lazy)
    torch.manual_seed(3)  # for the adapters
    engine = farandole.parallelize(model, plan)
    optimizer = engine.optimizer(lambda parameters: torch.optim.SGD(parameters, RATE))
    replica, vocabulary = engine.mesh.replica_of(rank), model.config.vocabulary

    def step(number: int) -> float:
        done = engine.forward_backward(
            list(_tokens(vocabulary, replica, number).chunk(PARTS)),
            lambda output, _: output,
            inputs=lambda t: (t[:, :-1], None, t[:, 1:]),
        )
        engine.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return done.loss

    engine.export(out.with_name("first"), file_bytes=20_000)
    losses = [step(number) for number in range(STEPS)]
    engine.save_pretrained(out, file_bytes=20_000)
    if plan.lora is not None:
        engine.save_adapter(out.with_name("adapter"))
    engine.load_weights(out.with_name("first"))
    again = [step(0)]
    engine.close()
    return losses, again


def _alone(model: Any, vocabulary: int, replicas: int) -> list[float]:
    """Train a model in one process on the samples of all replicas."""
    steps = (
        torch.cat([_tokens(vocabulary, replica, step) for replica in range(replicas)])
        for step in range(STEPS)
    )
    return losses_of(model, steps, RATE)


@pytest.mark.parametrize("tied", [True, False])
def test_llama_trains_as_transformers(ranks: Any, tmp_path: Path, tied: bool) -> None:
    sizes: dict[str, Any] = {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "vocab_size": 97,
    }
    sizes["rope_parameters"] = rope("yarn", 8)
    folder = folder_of(reference("llama", 5, tie_word_embeddings=tied, **sizes), tmp_path / "base")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = _alone(theirs, 97, 2)
    plan = Plan(data=2, pipeline=2, tensor=2, zero=1)
    for losses, again in ranks(8).run(_train, folder, plan, tmp_path / "out", tied):
        assert losses == pytest.approx(expected, rel=2e-4)
        assert again == pytest.approx(expected[:1], rel=2e-4)
    written, loading = type(theirs).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for (name, got), wanted in zip(written.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "axes", [{"schedule": "zb-h1"}, {"schedule": "gems", "zero": 1}, {"tensor": 2, "zero": 1}]
)
def test_adapters_of_all_stages_are_merged_and_written_for_peft(
    ranks: Any, tmp_path: Path, axes: dict[str, Any]
) -> None:
    folder = folder_of(reference("llama", 5), tmp_path / "base")
    ours = from_pretrained(folder)
    torch.manual_seed(3)
    lora = LoRA(rank=3, alpha=5)
    add_lora(ours, lora)
    expected = _alone(ours, ours.config.vocabulary, 1)
    plan = Plan(pipeline=2, lora=lora, **axes)
    for losses, again in ranks(2 * plan.tensor).run(_train, folder, plan, tmp_path / "out", True):
        assert losses == pytest.approx(expected, rel=2e-4)
        assert again == pytest.approx(expected[:1], rel=2e-4)
    tokens = _tokens(ours.config.vocabulary, 5, 0)
    with torch.no_grad():
        logits = ours.eval()(tokens)
        written = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        torch.testing.assert_close(written(tokens).logits, logits, atol=1e-3, rtol=1e-3)
        base = transformers.AutoModelForCausalLM.from_pretrained(folder)
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        torch.testing.assert_close(adapted(tokens).logits, logits, atol=1e-3, rtol=1e-3)
