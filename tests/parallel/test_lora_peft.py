"""Adapters go both ways between this package and PEFT, with the same outputs.  Skipped where PEFT is missing."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from farandole.parallel.lora import add_lora
from farandole.parallel.lora.peft_adapter import load_adapter, save_adapter
from farandole.plan import LoRA
from tests.parallel.test_lora_files import ALL, LORA, X, model, trained

peft: Any = pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")


def same(ours: Tensor, theirs: Tensor) -> None:
    """Assert that outputs are equal, except for the rounding of one more product (s times the update)."""
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=2e-6)


def test_peft_loads_saved_adapters(tmp_path: Path) -> None:
    for lora in (LORA, ALL, LoRA(3, 1.5, "all-linear", bias="all")):
        net, x = trained(lora).double().eval(), X.double()  # in fp32 the rounding depends on the processor
        save_adapter(net, tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # PEFT warns of names that do not fit
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            theirs = peft.PeftModel.from_pretrained(model().double(), tmp_path).eval()
        same(theirs(x), net(x))
        assert not torch.equal(theirs(x), model().double()(x))
        same(theirs.merge_and_unload()(x), net(x))


@pytest.mark.parametrize("bias", ["none", "lora_only", "all"])
@pytest.mark.parametrize(
    ("target", "use_rslora"),
    [(["qkv", "1.out"], False), (r".*\.qkv|1\.out", True), ("all-linear", False)],
)
@pytest.mark.parametrize("ready", [False, True])
def test_adapters_saved_by_peft_are_loaded(
    tmp_path: Path, bias: Any, target: Any, use_rslora: bool, ready: bool
) -> None:
    save = ["norm"] if bias != "all" else None
    settings = {"r": 2, "lora_alpha": 5, "bias": bias, "use_rslora": use_rslora, "lora_dropout": 0.1}
    config = peft.LoraConfig(target_modules=target, modules_to_save=save, **settings)
    theirs = peft.get_peft_model(model(), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    theirs.eval()
    theirs.save_pretrained(tmp_path)
    ours = model().eval()
    if ready:
        targets = ("qkv", "1.out") if target != "all-linear" else target
        add_lora(ours, LoRA(2, 5, targets, use_rslora=use_rslora, bias=bias, also_train=save or ()))
    summary = load_adapter(ours, tmp_path)
    same(ours(X), theirs(X))
    assert not torch.equal(ours(X), model().eval()(X))
    assert summary.trained == sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    save_adapter(ours, tmp_path / "again")
    same(peft.PeftModel.from_pretrained(model(), tmp_path / "again").eval()(X), theirs(X))
