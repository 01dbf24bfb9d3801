"""Models of other packages under `parallelize`: the losses of one process in plain PyTorch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import farandole
from farandole import Plan
from tests.torchvision_models import torchvision_models

STEPS, ROWS = 4, 2
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TORCHVISION = ("resnet", "mobilenet_v2", "mobilenet_v3_small")
"""Models with BatchNorm: all ranks have the same samples, because each rank computes its own statistics."""
NAMES = ("gpt2", "llama", "bert", "vit", "t5", "peft", "compiled", *TORCHVISION)


def _transformers() -> Any:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    import transformers

    return transformers


def _build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "compiled":
        layers = nn.Sequential(nn.Embedding(97, 12), nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 10))
        compiled: Any = torch.compile(layers, backend="aot_eager")
        return compiled  # type: ignore[no-any-return]
    if name == "resnet":
        resnet = torchvision_models().resnet
        residual: nn.Module = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=10)
        return residual
    if name in TORCHVISION:
        convolutions: nn.Module = getattr(torchvision_models(), name)(num_classes=10, dropout=0.0)
        return convolutions
    hf = _transformers()
    if name == "peft":
        import peft

        adapters = peft.LoraConfig(
            r=4, target_modules=["c_attn"], init_lora_weights="gaussian", fan_in_fan_out=True
        )
        adapted: nn.Module = peft.get_peft_model(_build("gpt2"), adapters)
        return adapted
    configs = {
        "gpt2": lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        ),
        "llama": lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(vocab_size=97, num_key_value_heads=2, tie_word_embeddings=True, **SMALL)
        ),
        "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(vocab_size=97, **SMALL, **WITHOUT_DROPOUT)),
        "vit": lambda: hf.ViTForImageClassification(
            hf.ViTConfig(image_size=16, patch_size=4, num_labels=10, **SMALL, **WITHOUT_DROPOUT)
        ),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0, decoder_start_token_id=0)
        ),
    }  # fmt: skip
    model: nn.Module = configs[name]()
    return model


def _loss(name: str, model: Any, batch: Tensor) -> Tensor:
    if name == "compiled":
        out: Tensor = model(batch).float().square().mean()
        return out
    if name in TORCHVISION:
        return F.cross_entropy(model(batch).float(), torch.arange(len(batch)) % ROWS)
    if name == "vit":
        logits: Tensor = model(batch).logits
        return logits.float().square().mean()
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def _batch(name: str, step: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    if name in TORCHVISION:
        # the smallest images for which the last convolutions have several positions, as BatchNorm requires
        return torch.randn(ROWS, 3, 36, 36, generator=generator).repeat(size, 1, 1, 1)
    if name == "vit":
        return torch.randn(ROWS * size, 3, 16, 16, generator=generator)
    return torch.randint(0, 97, (ROWS * size, 10), generator=generator)


def _train(
    rank: int, size: int, name: str, zero: int | None, precision: Any, samples: int, steps: int = STEPS
) -> list[float]:
    """Return the losses of some steps over all samples, without a plan if `zero` is None."""
    model = _build(name)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.002 if name in TORCHVISION else 0.1)
    engine = None
    if zero is not None:
        engine = farandole.parallelize(model, Plan(zero=zero, precision=precision))
        engine.optimizer(optimizer)
    losses = []
    for step in range(steps):
        batch = _batch(name, step, samples)
        loss = _loss(name, engine or model, batch.split(ROWS)[rank] if engine else batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(float(total) / size)
    if engine:
        assert all(value.isfinite().all() for value in engine.state_dict().values())
        dist.barrier()
        engine.close()
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_another_package_trains_as_one_process(ranks: Any, name: str) -> None:
    (expected,) = ranks(1).run(_train, name, None, "fp32", 1 if name in TORCHVISION else 2)
    for backend, zero, precision in (
        ("farandole", 0, "fp32"),
        ("farandole", 1, "bf16"),
        ("farandole", 2, "fp32"),
        ("gloo", 3, "fp32"),
        ("gloo", 3, "bf16"),
    ):
        tolerance = 1e-5 if precision == "fp32" else 4e-2
        # training amplifies the rounding of bf16, by an amount that depends on the processor
        steps = STEPS if precision == "fp32" else STEPS // 2
        for losses in ranks(2, backend).run(_train, name, zero, precision, 2, steps):
            assert losses == pytest.approx(expected[:steps], rel=tolerance), (
                f"{backend}, zero={zero}, {precision}"
            )
