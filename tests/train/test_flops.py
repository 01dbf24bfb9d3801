"""The floating-point operations of a model, and the utilization in a run's metrics."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from farandole.launch.runtime import init
from farandole.models.deepseek import build_deepseek
from farandole.models.hf import from_pretrained
from farandole.parallel.lora import add_lora
from farandole.plan import LoRA, PlanError
from farandole.train.config import load_config
from farandole.train.flops import Flops, count_flops
from farandole.train.hardware import PrecisionChoice
from farandole.train.metrics import read_metrics
from farandole.train.observer import Observer
from farandole.train.tasks import make_task
from tests.models.hf.families import FAMILIES, folder_of, reference
from tests.models.hf.folders import model_with_tokenizer, write_jsonl
from tests.train.small import make_trainer, overrides

SAMPLES, POSITIONS = 2, 12


def _batch(family: str, model: Any) -> tuple[Any, None, Tensor]:
    """Return inputs and targets, some of which are ignored where a model supports that."""
    config = model.config
    if family == "vit":
        images = torch.randn(SAMPLES, config.channels, config.height, config.image_width)
        return images, None, torch.zeros(SAMPLES, dtype=torch.int64)
    tokens = torch.randint(1, config.vocabulary, (SAMPLES, POSITIONS))
    if family == "bert-classifier":
        return tokens, None, torch.zeros(SAMPLES, dtype=torch.int64)
    targets = tokens.roll(-1, 1)
    targets[:, :5] = -100
    return (tokens, tokens) if family == "t5" else tokens, None, targets


def _counted(family: str, model: nn.Module) -> tuple[int, int]:
    """Return the operations that torch counts in a forward and backward pass, and the number of targets."""
    in_place: Any = {torch.ops.aten.addmm_: lambda sum_, a, b, **_: 2 * a[0] * a[1] * b[1]}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        total, count = model(*_batch(family, model))
        total.backward()
    return counter.get_total_flops(), count


def _of(flops: Flops | None, family: str, model: Any, targets: int) -> float:
    assert flops is not None
    positions = model.config.positions if family == "vit" else POSITIONS
    return flops.of(np.array([positions]), SAMPLES, targets)


def _with_gradient(hidden: Tensor) -> Tensor:
    return hidden if hidden.requires_grad else hidden.requires_grad_()


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_equal_those_that_torch_counts(family: str, tmp_path: Path) -> None:
    folder = folder_of(reference(family, 1), tmp_path / "base")
    model = from_pretrained(folder)
    counted, targets = _counted(family, model)
    assert _of(count_flops(model), family, model, targets) == pytest.approx(counted, rel=1e-9)
    # the weights need not be in memory
    assert count_flops(from_pretrained(folder, lazy=True)) == count_flops(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_weights_need_fewer_operations(family: str, tmp_path: Path) -> None:
    model = from_pretrained(folder_of(reference(family, 1), tmp_path / "base"))
    lora = LoRA(rank=3, also_train=("1.feed_forward",) if family in ("llama", "bert", "vit") else ())
    flops, whole = count_flops(model, lora), count_flops(model)
    add_lora(model, lora)
    # the formula includes the gradients of all hidden states, even before the first adapter
    model[0].register_forward_hook(lambda module, inputs, hidden: tree_map(_with_gradient, hidden))
    counted, targets = _counted(family, model)
    assert _of(flops, family, model, targets) == pytest.approx(counted, rel=1e-9)
    assert counted < _of(whole, family, model, targets)


def test_further_predicted_tokens_count(tmp_path: Path) -> None:
    config = from_pretrained(folder_of(reference("deepseek_v3", 1), tmp_path / "base")).config
    model = build_deepseek(replace(config, predicted=2))
    counted, targets = _counted("deepseek_v3", model)
    # a module predicts fewer tokens, because its targets end earlier
    assert counted <= _of(count_flops(model), "deepseek_v3", model, targets) <= 1.1 * counted


def test_models_without_a_formula_have_no_count() -> None:
    assert count_flops(nn.Linear(2, 2)) is None


def test_lora_that_matches_nothing_is_a_plan_error(tmp_path: Path) -> None:
    model = from_pretrained(folder_of(reference("llama", 1), tmp_path / "base"))
    with pytest.raises(PlanError, match="matches no module"):
        count_flops(model, LoRA(targets=("nothing",)))


def _flops(rank: int, size: int, words: list[str]) -> Flops | None:
    return make_trainer(words).flops


@pytest.mark.parametrize("lora", [[], ["plan.lora_rank=2"]])
def test_plans_do_not_change_the_count(ranks: Any, tmp_path: Path, lora: list[str]) -> None:
    words = [*overrides(tmp_path), *lora]
    (expected,) = ranks(1).run(_flops, words)
    assert expected is not None
    for plan in ("plan.tensor=2", "plan.zero=3", "plan.context=2"):
        assert ranks(2).run(_flops, [*words, plan]) == [expected] * 2, plan


def _utilization(rank: int, size: int, words: list[str], run: Path) -> tuple[float, float]:
    """Return the utilization in the metrics, and the expected one."""
    trainer, runtime = make_trainer(words), init()
    run.mkdir(exist_ok=True)
    choice = PrecisionChoice("fp32", "configured")
    with (
        contextlib.redirect_stdout(io.StringIO()),
        Observer(trainer.config, run, trainer, choice, runtime, 0.0, 1e9) as observer,
    ):
        observer.stepped(trainer.step(), 0.5)
    (record,) = read_metrics(run / "metrics.jsonl")
    config = trainer.config
    positions = config.model.context
    assert trainer.flops is not None
    operations = trainer.flops.of(np.array([positions]), config.batch, config.batch * positions)
    return record["model_flops_utilization"], operations / 0.5 / 1e9


def test_utilization_of_a_run(ranks: Any, tmp_path: Path) -> None:
    for found, expected in ranks(1).run(_utilization, overrides(tmp_path), tmp_path / "run"):
        assert found == pytest.approx(expected)


def test_texts_have_their_own_lengths(tmp_path: Path) -> None:
    model_with_tokenizer(tmp_path / "base", "bert")
    texts = [{"text": "red " * (1 + n % 5), "label": n % 2} for n in range(40)]
    write_jsonl(tmp_path / "texts.jsonl", texts)
    words = [f"model.folder={tmp_path / 'base'}", f"data.path={tmp_path / 'texts.jsonl'}", "model.context=48"]
    task = make_task(load_config(None, ["task=classify", *words]))
    lengths = [len(task.train[index][0]) for index in range(len(task.train))]
    assert task.lengths.tolist() == lengths
    assert len(set(lengths)) == 5


def test_images_have_as_many_positions_as_patches(tmp_path: Path) -> None:
    folder = folder_of(reference("vit", 1, num_channels=3), tmp_path / "base")
    images = np.zeros((8, 12, 12, 3), np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=np.arange(8) % 2)
    words = ["task=classify", f"model.folder={folder}", f"data.path={tmp_path / 'images.npz'}"]
    task = make_task(load_config(None, words))
    assert task.lengths.tolist() == [from_pretrained(folder).config.positions]
