"""LoRA of stacked experts: adapters are sharded with their experts, and PEFT reads and writes them as
`target_parameters`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import farandole
from farandole.models.hf import from_pretrained
from farandole.models.moe import Experts, StackedLinear
from farandole.parallel.lora import LoRAStackedLinear, add_lora, merge, remove, unmerge
from farandole.parallel.lora.peft_adapter import AdapterError, load_adapter, save_adapter
from farandole.plan import LoRA, Plan
from farandole.serve.lora import read_adapters
from farandole.serve.request import RequestError
from tests.models.hf.families import folder_of, reference, transformers
from tests.parallel.plans import build, compare, inputs_of, train

EXPERTS = LoRA(rank=2, alpha=6, targets=("*.attention.out", "*.experts.*"))


def _adapted(name: str, lora: LoRA) -> Any:
    """Return a model whose adapters change its output."""
    model = build(name)
    add_lora(model, lora)
    return _changed(model)


def _changed(model: Any) -> Any:
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.3, generator=generator)
    return model


def test_each_expert_adds_its_update() -> None:
    torch.manual_seed(0)
    experts = Experts(3, 5, 7)
    model = torch.nn.Sequential(experts)
    add_lora(model, LoRA(rank=2, alpha=6, targets=("0.*",)))
    _changed(model)
    rows, chosen = torch.randn(6, 5), torch.tensor([[0], [2], [0], [2], [2], [0]])  # no row for one expert
    found = experts(rows, chosen, torch.ones(6, 1))
    found.square().sum().backward()
    layers = [experts.gate_up, experts.down]
    factors = [
        (each.lora_A.detach().requires_grad_(), each.lora_B.detach().requires_grad_()) for each in layers
    ]
    up, down = (each.weight.detach() + 3 * b @ a for each, (a, b) in zip(layers, factors, strict=True))
    products = []
    for row, (number,) in zip(rows, chosen.tolist(), strict=True):
        gate, linear = (up[number] @ row).chunk(2)
        products.append(down[number] @ (F.silu(gate) * linear))
    expected = torch.stack(products)
    torch.testing.assert_close(found, expected)
    expected.square().sum().backward()
    for layer, (a, b) in zip(layers, factors, strict=True):
        torch.testing.assert_close(layer.lora_A.grad, a.grad)
        torch.testing.assert_close(layer.lora_B.grad, b.grad)
        assert layer.weight.grad is None


def test_updates_are_merged_and_removed() -> None:
    model, (tokens, _) = _adapted("mixtral", EXPERTS).eval(), inputs_of("mixtral", 0, 0)
    expected, plain = model(tokens), build("mixtral").eval()
    assert not torch.allclose(expected, plain(tokens), atol=1e-2)
    merge(model)
    torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-5)
    unmerge(model)
    torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-5)
    remove(model)
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-4, atol=1e-5)
    assert not any(isinstance(module, LoRAStackedLinear) for module in model.modules())
    assert model.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize(
    "plan",
    [
        Plan(expert=2, lora=EXPERTS),
        Plan(expert=3, lora=EXPERTS),  # 2, 1 and 1 experts
        Plan(expert=2, zero=3, recompute="block", lora=EXPERTS),
        Plan(tensor=2, expert=2, zero=2, lora=EXPERTS),
        Plan(tensor=2, sequence=True, lora=EXPERTS),
        Plan(context=2, zero=1, lora=EXPERTS),
    ],
)
@pytest.mark.parametrize("name", ["mixtral", "deepseek"])
def test_adapters_are_sharded_with_their_experts(ranks: Any, name: str, plan: Plan) -> None:
    size = plan.ranks_per_sample * plan.expert
    alone = ranks(1).run(train, name, Plan(lora=EXPERTS), plan.expert)[0]
    trained = {key for key, value in alone.weights.items() if "lora_B" in key and value.any()}
    assert any("experts.down" in key for key in trained)  # they begin at zero
    compare(ranks(size).run(train, name, plan), alone, name, plan, size)


@pytest.mark.parametrize(
    ("lora", "why"),
    [
        (
            LoRA(targets=("*.experts.*",), dropout=0.1),
            r"1\.feed_forward\.experts\.gate_up is a StackedLinear.*dropout=0\.1",
        ),
        (LoRA(targets=("*.experts.*",), base="int8"), "cannot be quantized, but base='int8'"),
        (LoRA(targets=("*.experts",)), r"is a Experts.*layers inside: 1\.feed_forward\.experts\.gate_up, "),
    ],
)
def test_unsupported_adapters_of_experts_are_refused(lora: LoRA, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        add_lora(build("mixtral"), lora)


def test_all_linear_leaves_experts_plain_as_in_peft() -> None:
    model = build("mixtral")
    add_lora(model, LoRA())
    assert all(type(m) is StackedLinear for m in model.modules() if isinstance(m, StackedLinear))


@pytest.mark.parametrize("targets", [("*.experts.*", "*.qkv"), ("*.experts.gate_up",)])
def test_peft_loads_adapters_of_our_models(tmp_path: Path, targets: Any) -> None:
    model, (tokens, _) = (
        _adapted("mixtral", LoRA(rank=2, alpha=6, targets=targets)).eval(),
        inputs_of("mixtral", 0, 0),
    )
    save_adapter(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(build("mixtral"), tmp_path).eval()
    torch.testing.assert_close(theirs(tokens), model(tokens), rtol=1e-4, atol=1e-5)
    again = build("mixtral").eval()
    load_adapter(again, tmp_path)
    torch.testing.assert_close(again(tokens), model(tokens), rtol=0, atol=0)
    with pytest.raises(
        RequestError, match="changes the experts 1.feed_forward.experts.*, which is not supported"
    ):
        read_adapters(build("mixtral"), {"experts": tmp_path})


def test_an_adapter_of_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Experts(3, 5, 7))
    add_lora(model, LoRA(rank=2, targets=("0.*",)))
    save_adapter(model, tmp_path)
    with pytest.raises(
        (AdapterError, ValueError), match=r"lora_A.weight is 6 x 7: expected .* a multiple of 4"
    ):
        load_adapter(torch.nn.Sequential(Experts(4, 5, 7)), tmp_path)


@pytest.mark.parametrize(
    ("modules", "parameters"),
    [
        (
            ["q_proj"],
            ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        ),  # the adapters of q, k and v are fused
        ([], ["experts.down_proj"]),
        (["q_proj"], None),  # experts are trained in full
    ],
)
def test_adapters_saved_by_peft_are_loaded(
    tmp_path: Path, modules: list[str], parameters: list[str] | None
) -> None:
    folder = folder_of(reference("mixtral", 5), tmp_path / "base")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    config = peft.LoraConfig(
        r=2,
        lora_alpha=3,
        target_modules=modules,
        target_parameters=parameters,
        modules_to_save=["experts"] if parameters is None else None,
        init_lora_weights=False,
    )
    adapted = peft.get_peft_model(base, config).eval()
    for name, parameter in adapted.named_parameters():
        if ".modules_to_save." in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(tmp_path / "adapter")
    ours = from_pretrained(folder).eval()
    load_adapter(ours, tmp_path / "adapter")
    tokens = torch.randint(0, ours.config.vocabulary, (2, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(tokens), adapted(tokens).logits, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("targets", [("*.qkv",), ("*.qkv", "*.experts.gate_up")])
def test_experts_trained_in_part_are_refused_before_writing(tmp_path: Path, targets: Any) -> None:
    ours = from_pretrained(folder_of(reference("mixtral", 5), tmp_path / "base"))
    add_lora(ours, LoRA(rank=2, targets=targets, also_train=("*.experts.down",)))
    why = r"experts\.down\.weight is trained in full, but .*experts\.gate_up\.weight is not.*also_train='\*\.experts'"
    with pytest.raises(ValueError, match=why):
        save_adapter(ours, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def _save_merged(rank: int, size: int, folder: Path, out: Path, lora: LoRA) -> Tensor:
    model = from_pretrained(folder, lazy=True)
    torch.manual_seed(0)
    engine = farandole.parallelize(model, Plan(expert=2, tensor=2, lora=lora))
    optimizer = engine.optimizer(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5))
    tokens = torch.randint(
        0, 97, (2, 9), generator=torch.Generator().manual_seed(engine.mesh.replica_of(rank))
    )
    engine.forward_backward(
        [tokens], lambda output, _: output, lambda each: (each[:, :-1], None, each[:, 1:])
    )
    optimizer.step()
    engine.save_pretrained(out / "merged")
    engine.save_adapter(out / "adapter")
    engine.model.eval()
    logits = engine(torch.arange(20)[None])
    engine.close()
    return logits.detach()


@pytest.mark.parametrize("lora", [EXPERTS, LoRA(rank=2, targets=("*.out",), also_train=("*.experts",))])
def test_engines_save_merged_experts_and_their_adapters(ranks: Any, tmp_path: Path, lora: LoRA) -> None:
    folder = folder_of(reference("mixtral", 5), tmp_path / "base")
    expected = ranks(4).run(_save_merged, folder, tmp_path, lora)[0]
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokens = torch.arange(20)[None]
    base = load(folder).eval()
    assert not torch.allclose(base(tokens).logits, expected, atol=1e-3)
    torch.testing.assert_close(
        load(tmp_path / "merged").eval()(tokens).logits, expected, atol=1e-4, rtol=1e-3
    )
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(adapted(tokens).logits, expected, atol=1e-4, rtol=1e-3)
