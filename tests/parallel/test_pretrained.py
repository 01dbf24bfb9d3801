"""Hugging Face folders under every plan: read by all ranks, trained like one process, and written for `transformers`
and PEFT."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import farandole
from farandole.models.hf import FolderError, from_pretrained
from farandole.models.hf import files as files_module
from farandole.models.llama import LlamaConfig, build_llama
from farandole.parallel.checkpoint.errors import CheckpointError
from farandole.parallel.lora import add_lora
from farandole.parallel.lora.peft_adapter import load_adapter, save_adapter
from farandole.parallel.tensor import sharded_logits
from farandole.plan import LoRA, Plan
from tests.models.hf.families import FAMILIES, folder_of, reference, rope, transformers
from tests.parallel.odd import world
from tests.parallel.one_process import logits_of, losses_of

STEPS, RATE = 4, 0.5
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


def batches(vocabulary: int, rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(0, vocabulary, (STEPS, 2, 13), generator=generator)


def _train(
    rank: int, size: int, folder: Path, plan: Plan, out: Path | None = None, lazy: bool = True
) -> list[float]:
    torch.manual_seed(3)
    model = from_pretrained(folder, lazy=lazy)
    engine = farandole.parallelize(model, plan)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = engine.optimizer(torch.optim.SGD(trained, RATE))
    losses = []
    for tokens in batches(model.config.vocabulary, engine.mesh.replica_of(rank)):
        step = engine.forward_backward(
            [tokens], lambda output, _: output, inputs=lambda t: (t[:, :-1], None, t[:, 1:])
        )
        engine.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(step.loss)
    if out is not None:
        engine.save_pretrained(out, file_bytes=30_000)
        if plan.lora is not None:
            engine.save_adapter(out.with_name("adapter"))
    world().barrier()
    engine.close()
    return losses


def _expected(folder: Path, ranks: int) -> tuple[list[float], Any]:
    """Return the losses of one process with transformers, and its model."""
    return _losses_of(transformers.AutoModelForCausalLM.from_pretrained(folder, **EAGER), ranks)


def _losses_of(model: Any, ranks: int) -> tuple[list[float], Any]:
    every = [batches(_vocabulary(model), rank) for rank in range(ranks)]
    return losses_of(model, (torch.cat(step) for step in zip(*every, strict=True)), RATE), model


def _vocabulary(model: Any) -> int:
    size = model.config.vocabulary if hasattr(model.config, "vocabulary") else model.config.vocab_size
    return int(size)


def small(tmp_path: Path, family: str = "llama", **changes: Any) -> Path:
    if family == "gpt2":
        changes = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0} | changes
    return folder_of(reference(family, 5, **changes), tmp_path / "base")


PLANS = [
    Plan(zero=0),
    Plan(zero=1),
    Plan(zero=2),
    Plan(zero=3),
    Plan(zero=3, recompute="block"),
    Plan(zero=3, offload="host"),
]


@pytest.mark.parametrize(("family", "size"), [("llama", 1), ("llama", 3), ("gpt2", 2), ("qwen3", 2)])
def test_training_equals_transformers_in_one_process(
    ranks: Any, tmp_path: Path, family: str, size: int
) -> None:
    folder = small(tmp_path, family)
    expected, theirs = _expected(folder, size)
    for number, plan in enumerate(PLANS):
        out = tmp_path / f"out{number}"
        for losses in ranks(size).run(_train, folder, plan, out):
            assert losses == pytest.approx(expected, rel=2e-4), plan
        again, loading = type(theirs).from_pretrained(out, output_loading_info=True)
        assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        for (name, got), wanted in zip(again.state_dict().items(), theirs.state_dict().values(), strict=True):
            torch.testing.assert_close(
                got, wanted, atol=1e-4, rtol=1e-3, msg=lambda m, n=name, p=plan: f"{n} {p}: {m}"
            )


ADAPTERS = LoRA(rank=2)
FAMILY_PLANS = [*PLANS[:5], Plan(zero=0, lora=ADAPTERS), Plan(zero=3, lora=ADAPTERS)]
NO_DROPOUT: dict[str, dict[str, float]] = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "t5": {"dropout_rate": 0.0},
}
Losses = list[tuple[float, float]]
"""The loss and the gradient norm of each step."""


def _family_batch(family: str, model: Any, rank: int, step: int) -> tuple[Any, None, Tensor]:
    """Return the arguments of a model: inputs, no description of the sequences, and targets."""
    generator, config = torch.Generator().manual_seed(10 * step + rank), model.config
    if family == "vit":
        shape = (2, config.channels, config.height, config.image_width)
        labels = torch.randint(config.classes, (2,), generator=generator)
        return torch.randn(shape, generator=generator), None, labels
    tokens = torch.randint(1, config.vocabulary, (2, 9), generator=generator)
    if family == "bert-classifier":
        return tokens, None, torch.randint(2, (2,), generator=generator)
    targets = tokens.flip(0)
    targets[0, : 2 + rank] = -100
    return (tokens, tokens.flip(1)) if family == "t5" else tokens, None, targets


def _train_family(rank: int, size: int, family: str, folder: Path) -> list[Losses]:
    """Train a folder's model under each plan."""
    found = []
    for plan in FAMILY_PLANS:
        model = from_pretrained(folder, lazy=True)
        torch.manual_seed(3)  # for the adapters
        engine = farandole.parallelize(model, plan)
        optimizer = engine.optimizer(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5))
        steps = []
        for step in range(3):
            batch = _family_batch(family, model, rank, step)
            loss = engine.forward_backward([batch], lambda output, _: output, inputs=lambda b: b).loss
            steps.append((loss, engine.clip(1.0)))
            optimizer.step()
            optimizer.zero_grad()
        found.append(steps)
        engine.close()
    return found


def _train_family_alone(family: str, folder: Path, lora: LoRA | None) -> Losses:
    """Train a folder's model with plain PyTorch on the samples of both ranks."""
    model = from_pretrained(folder)
    torch.manual_seed(3)
    if lora is not None:
        add_lora(model, lora)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.5)
    steps = []
    for step in range(3):
        outputs = [model(*_family_batch(family, model, rank, step)) for rank in range(2)]
        loss = sum(total for total, _ in outputs) / sum(count for _, count in outputs)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        steps.append((loss.item(), norm.item()))
        optimizer.step()
        optimizer.zero_grad()
    return steps


@pytest.mark.parametrize(
    "family",
    ["vit", "t5", "bert", "bert-classifier", "gptj", "mistral", "qwen2", "mixtral", "deepseek_v3"],
)
def test_every_family_trains_as_in_one_process(ranks: Any, tmp_path: Path, family: str) -> None:
    dropout = NO_DROPOUT.get(family.partition("-")[0], {})
    folder = folder_of(reference(family, 5, **dropout), tmp_path / "base")
    expected = {lora: _train_family_alone(family, folder, lora) for lora in (None, ADAPTERS)}
    for found in ranks(2).run(_train_family, family, folder):
        for plan, steps in zip(FAMILY_PLANS, found, strict=True):
            for got, wanted in zip(steps, expected[plan.lora], strict=True):
                assert got == pytest.approx(wanted, rel=2e-4), plan


# ---- tensor, context and expert parallelism ----

DECODERS = ["llama", "qwen3", "mixtral", "deepseek_v3"]
AXES: list[tuple[int, Plan]] = [
    (4, Plan(tensor=2, zero=2)),
    (4, Plan(tensor=2, zero=3, sequence=True)),
    (4, Plan(context=2, zero=2)),
    (2, Plan(expert=2, zero=2)),
]
"""Numbers of ranks and plans with two groups of samples."""


def folder_for_axes(tmp_path: Path, family: str) -> Path:
    """Write a folder of a model with heads that 2 ranks divide unevenly, and with rotary positions for long
    contexts."""
    sizes: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 3}
    if family != "deepseek_v3":
        sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
    return small(tmp_path, family, rope_parameters=rope("yarn", 8), vocab_size=97, **sizes)


def _train_on_axes(
    rank: int, size: int, folder: Path, plan: Plan, out: Path, lazy: bool
) -> tuple[list[float], Tensor]:
    """Return the losses, and the logits of the trained model; write the model, and the adapters."""
    model = from_pretrained(folder, lazy=lazy)
    torch.manual_seed(3)  # for the adapters
    engine = farandole.parallelize(model, plan)
    optimizer = engine.optimizer(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE))
    losses = []
    for tokens in batches(model.config.vocabulary, engine.mesh.replica_of(rank)):
        step = engine.forward_backward(
            [tokens], lambda output, _: output, inputs=lambda t: (t[:, :-1], None, t[:, 1:])
        )
        engine.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(step.loss)
    model.eval()
    with torch.no_grad(), engine.whole():
        logits = engine(batches(model.config.vocabulary, 7)[0])
    engine.save_pretrained(out, file_bytes=30_000)
    if plan.lora is not None:
        engine.save_adapter(out / "adapter")
    engine.close()
    return losses, logits


def _expected_with_adapters(folder: Path, lora: LoRA) -> tuple[list[float], Any]:
    """Return the losses of one process in plain PyTorch, and its model.

    PEFT does not train like this, because it has separate matrices A for q, k and v, and for gate and up.
    """
    model = from_pretrained(folder)
    torch.manual_seed(3)
    add_lora(model, lora)
    return _losses_of(model, 2)


@pytest.mark.parametrize("lora", [None, LoRA(rank=3, alpha=5)], ids=["full", "lora"])
@pytest.mark.parametrize("family", DECODERS)
def test_axes_train_as_transformers_in_one_process(
    ranks: Any, tmp_path: Path, family: str, lora: LoRA | None
) -> None:
    import peft

    folder = folder_for_axes(tmp_path, family)
    expected, theirs = _expected(folder, 2) if lora is None else _expected_with_adapters(folder, lora)
    tokens = batches(97, 7)[0]
    trained = logits_of(theirs.eval(), tokens)
    for number, (size, plan) in enumerate(AXES):
        if plan.expert > 1 and family in ("llama", "qwen3"):
            continue
        out = tmp_path / f"out{number}"
        for losses, logits in ranks(size).run(
            _train_on_axes, folder, replace(plan, lora=lora), out, number % 2 == 0
        ):
            assert losses == pytest.approx(expected, rel=2e-4), plan
            torch.testing.assert_close(logits, trained, atol=1e-3, rtol=1e-3)
        again, loading = transformers.AutoModelForCausalLM.from_pretrained(
            out, output_loading_info=True, **EAGER
        )
        assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        torch.testing.assert_close(again.eval()(tokens).logits, logits, atol=1e-5, rtol=1e-4)
        if lora is not None:
            base = transformers.AutoModelForCausalLM.from_pretrained(folder, **EAGER)
            adapted = peft.PeftModel.from_pretrained(base, out / "adapter").eval()
            torch.testing.assert_close(adapted(tokens).logits, logits, atol=1e-5, rtol=1e-4)


def _logits(rank: int, size: int, folder: Path, plan: Plan) -> tuple[Tensor, Tensor, slice]:
    """Return the logits of all tokens, the logits of this rank's vocabulary shard, and the shard."""
    engine = farandole.parallelize(from_pretrained(folder), plan)
    engine.model.eval()
    tokens = batches(97)[0]
    with torch.no_grad(), engine.whole():
        logits = engine(tokens)
        with sharded_logits(engine.model) as shard:
            own = engine(tokens)
        assert torch.equal(engine(tokens), logits)
    engine.close()
    return logits, own, shard


@pytest.mark.parametrize("family", DECODERS)
def test_logits_equal_transformers(ranks: Any, tmp_path: Path, family: str) -> None:
    folder = folder_for_axes(tmp_path, family)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, **EAGER).eval()
    with torch.no_grad():
        expected = theirs(batches(97)[0]).logits
    for size, plan in [
        (1, Plan()),
        (2, Plan(tensor=2)),
        (3, Plan(tensor=3, sequence=True)),
        (4, Plan(tensor=2, context=2)),
    ]:
        found = ranks(size).run(_logits, folder, plan)
        for logits, own, shard in found:
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(own, logits[..., shard], atol=0, rtol=0)
        if plan.tensor > 1:
            covered = [range(97)[shard] for _, _, shard in found[: plan.tensor]]
            assert [word for each in covered for word in each] == list(range(97))


@pytest.mark.parametrize("family", ["mixtral", "llama"])
@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_lazy_equals_eager(ranks: Any, tmp_path: Path, family: str, backend: str) -> None:
    folder = small(tmp_path, family)
    for plan in (Plan(zero=0), Plan(zero=1, precision="bf16"), Plan(zero=3, precision="bf16"), Plan(zero=2)):
        eager = ranks(2, backend).run(_train, folder, plan, None, False)
        assert ranks(2, backend).run(_train, folder, plan) == eager, plan


@pytest.mark.parametrize(("zero", "tensor"), [(0, 1), (2, 1), (3, 1), (2, 2)])
def test_lora_is_merged_for_transformers_and_saved_for_peft(
    ranks: Any, tmp_path: Path, zero: int, tensor: int
) -> None:
    import peft

    folder = small(tmp_path)
    lora = LoRA(rank=3, alpha=5, targets=("*.qkv", "*.gate_up", "*.down"))
    plan, out = Plan(zero=zero, tensor=tensor, lora=lora), tmp_path / "merged"
    losses = ranks(2).run(_train, folder, plan, out)[0]
    assert losses == pytest.approx(ranks(2).run(_train, folder, plan, None, False)[0], rel=1e-5)
    merged = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    base = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = batches(base.config.vocab_size)[0]
    expected = merged(tokens).logits
    assert not torch.allclose(base(tokens).logits, expected, atol=1e-2)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(adapted(tokens).logits, expected, atol=1e-4, rtol=1e-3)
    ours = from_pretrained(folder)
    load_adapter(ours, tmp_path / "adapter")
    torch.testing.assert_close(ours.eval()(tokens), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        *((family, LoRA(rank=2)) for family in FAMILIES),
        ("bert-classifier", LoRA(rank=2, also_train=("*.classifier",))),
        ("qwen2", LoRA(rank=2, bias="all")),
        ("qwen2", LoRA(rank=2, also_train=("*.qkv",))),
        ("bert", LoRA(rank=2, bias="lora_only")),
        ("deepseek_v3", LoRA(rank=2, dropout=0.1, targets=("*.shared.*",))),
        ("deepseek_v3", LoRA(rank=2, targets=("*.shared.*", "*.experts.*"))),
        ("mixtral", LoRA(rank=2, targets=("*.qkv", "*.experts.*"))),
        ("mixtral", LoRA(rank=2, targets=("*.experts.down",))),
        ("mixtral", LoRA(rank=2, targets=("*.qkv",), also_train=("*.experts",))),
        ("deepseek_v3", LoRA(rank=2, also_train=("*.experts",))),
    ],
)
def test_adapter_of_every_family_loads_in_peft(tmp_path: Path, family: str, lora: LoRA) -> None:
    import peft

    folder = folder_of(reference(family, 1), tmp_path / "base")
    ours = from_pretrained(folder).eval()
    torch.manual_seed(0)
    add_lora(ours, lora)
    for name, parameter in ours.named_parameters():
        if name.endswith("lora_B") or ".lora_" not in name and parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    save_adapter(ours, tmp_path / "adapter")
    base = getattr(transformers, FAMILIES[family][1]).from_pretrained(folder, **EAGER).eval()
    inputs, _, _ = _family_batch(family, ours, 0, 0)
    if family == "vit":
        named = {"pixel_values": inputs}
    elif family == "t5":
        named = {"input_ids": inputs[0], "decoder_input_ids": inputs[1]}
    else:
        named = {"input_ids": inputs}
    before, expected = base(**named).logits, ours(inputs)
    assert not torch.allclose(before, expected, atol=1e-2)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(adapted(**named).logits, expected, atol=1e-4, rtol=1e-3)
    again = from_pretrained(folder).eval()
    load_adapter(again, tmp_path / "adapter")
    torch.testing.assert_close(again(inputs), expected)


def _adapter_of_peft(folder: Path, out: Path, family: str, **settings: Any) -> Any:
    """Write a PEFT adapter with random weights, and return the adapted model."""
    import peft

    base = getattr(transformers, FAMILIES[family][1]).from_pretrained(folder).eval()
    config = peft.LoraConfig(r=2, lora_alpha=3, init_lora_weights=False, **settings)
    adapted = peft.get_peft_model(base, config)
    for name, parameter in adapted.named_parameters():
        if ".lora_" not in name and parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(out)
    return adapted.eval()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("targets", ["some", "all"])
def test_adapter_of_peft_loads(tmp_path: Path, family: str, targets: str) -> None:
    folder = small(tmp_path, family)
    some = ["q_proj", "v_proj"] if family == "llama" else ["c_attn"]
    adapted = _adapter_of_peft(
        folder,
        tmp_path / "adapter",
        family,
        target_modules=some if targets == "some" else "all-linear",
        fan_in_fan_out=family == "gpt2",
    )
    ours = from_pretrained(folder)
    load_adapter(ours, tmp_path / "adapter")
    tokens = batches(ours.config.vocabulary)[0]
    torch.testing.assert_close(ours.eval()(tokens), adapted(tokens).logits, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2", {"target_modules": "all-linear", "bias": "all"}),
        (
            "qwen2",
            {"target_modules": ["o_proj"], "modules_to_save": ["q_proj", "k_proj", "v_proj"]},
        ),
        ("bert", {"target_modules": ["query", "key", "value"], "bias": "lora_only"}),
    ],
)
def test_parameters_of_fused_layers_trained_by_peft_are_loaded(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    folder = folder_of(reference(family, 1), tmp_path / "base")
    adapted = _adapter_of_peft(folder, tmp_path / "adapter", family, **settings)
    ours = from_pretrained(folder).eval()
    load_adapter(ours, tmp_path / "adapter")
    tokens = batches(ours.config.vocabulary)[0]
    torch.testing.assert_close(ours(tokens), adapted(tokens).logits, atol=1e-4, rtol=1e-3)


def _count_bytes(rank: int, size: int, folder: Path, plan: Plan) -> int:
    count = 0
    original = files_module._into

    def counting(file: int, path: Path, offset: int, target: Tensor) -> None:
        nonlocal count
        count += target.numel()
        original(file, path, offset, target)

    files_module._into = counting
    try:
        engine = farandole.parallelize(from_pretrained(folder, lazy=True), plan)
    finally:
        files_module._into = original
    world().barrier()
    engine.close()
    return count


def test_a_rank_reads_only_what_it_stores(ranks: Any, tmp_path: Path) -> None:
    folder = folder_of(reference("llama", 5, hidden_size=96, tie_word_embeddings=False), tmp_path / "base")
    total = sum(entry.nbytes for entry in files_module.open_folder(folder).values())
    assert ranks(4).run(_count_bytes, folder, Plan(zero=0)) == [total] * 4
    counts = ranks(4).run(_count_bytes, folder, Plan(zero=3))
    assert sum(counts) == total
    assert max(counts) < total / 3


def test_models_built_from_scratch_are_saved(ranks: Any, tmp_path: Path) -> None:
    config = LlamaConfig(vocabulary=90, layers=2, heads=4, kv_heads=2, width=32, inner=40)
    ranks(2).run(_save_built, config, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours = from_pretrained(tmp_path / "out").eval()
    assert ours.config == config
    tokens = batches(90)[0]
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-4)


def _save_built(rank: int, size: int, config: LlamaConfig, out: Path) -> None:
    torch.manual_seed(rank)
    engine = farandole.parallelize(build_llama(config), Plan(zero=2))
    engine.save_pretrained(out, dtype=torch.float32)
    engine.close()


@pytest.mark.parametrize(
    "plan", [Plan(zero=3), Plan(pipeline=2), Plan(tensor=2)], ids=["zero", "pipeline", "tensor"]
)
def test_a_head_that_differs_from_the_embedding_is_not_tied(ranks: Any, tmp_path: Path, plan: Plan) -> None:
    folder, out = small(tmp_path, tie_word_embeddings=False, num_hidden_layers=2), tmp_path / "out"
    expected = _expected(folder, 2 // plan.pipeline // plan.tensor)[0]
    _change(folder, tie_word_embeddings=True)
    for losses in ranks(2).run(_train, folder, plan, out):
        assert losses == pytest.approx(expected, rel=2e-4)
    assert not from_pretrained(out).config.tied


def _save_bf16(rank: int, size: int, folder: Path, plan: Plan, out: Path) -> None:
    engine = farandole.parallelize(from_pretrained(folder, lazy=True), plan)
    engine.save_pretrained(out / "saved", dtype=torch.bfloat16)
    engine.export(out / "exported", dtype=torch.bfloat16)
    engine.close()


@pytest.mark.parametrize("plan", [Plan(zero=2, precision="bf16"), Plan(pipeline=2)], ids=["zero", "pipeline"])
def test_router_biases_are_saved_in_fp32(ranks: Any, tmp_path: Path, plan: Plan) -> None:
    folder = small(tmp_path, "deepseek_v3", num_hidden_layers=2, first_k_dense_replace=0)
    ranks(2).run(_save_bf16, folder, plan, tmp_path)
    name = "model.layers.{}.mlp.gate.e_score_correction_bias"
    expected, saved = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "saved"))
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    for layer in range(2):
        bias = expected[name.format(layer)]
        for got in (saved[name.format(layer)], exported[f"{layer + 1}.feed_forward.router.bias"]):
            assert got.dtype == torch.float32
            assert torch.equal(got, bias)
    assert saved["model.embed_tokens.weight"].dtype == torch.bfloat16


# ---- damaged and unsupported folders ----


def _change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def _longrope(short: list[Any], long: list[Any]) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": 32,
        "short_factor": short,
        "long_factor": long,
    }


def _remove_shard(folder: Path) -> None:
    (folder / "model-00002-of-00003.safetensors").unlink()


def _truncate(folder: Path) -> None:
    file = folder / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _garbage(folder: Path) -> None:
    (folder / "model-00001-of-00003.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0" + b"not a header at all")


def _pickle(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")


def _integers(folder: Path) -> None:
    path = sorted(folder.glob("model-*"))[0]
    tensors = load_file(path)
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name].long()}, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_remove_shard, "incomplete: 1 of 3 weight files are missing: model-00002-of-00003.safetensors"),
        (
            _truncate,
            r"model-00002-of-00003.safetensors is truncated: .* ends at byte \d+, but the file ends at byte",
        ),
        (_garbage, "model-00001-of-00003.safetensors is damaged: its header is not JSON"),
        (_pickle, "pytorch_model.bin is a pickle, which is not loaded"),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is damaged"),
        (
            lambda f: _change(f, model_type="llamo"),
            "model_type='llamo', which is not supported; nearest: llama",
        ),
        (
            lambda f: _change(f, architectures=["LlamaForTokenClassification"]),
            "architectures=.*is not supported",
        ),
        (lambda f: _change(f, intermediate_size=999), "has shape .* but config.json requires"),
        (
            lambda f: _change(f, num_hidden_layers=9),
            "incomplete: found no tensor model.layers.*and 59 more|found no tensor model",
        ),
        (lambda f: _change(f, hidden_act="swish7"), "hidden_act='swish7', which is not supported"),
        (lambda f: _change(f, logit_softcap=30.0), "unsupported fields: logit_softcap=30.0"),
        (
            lambda f: _change(f, rope_parameters={"rope_type": "proportional"}),
            "rope_type='proportional', which is not supported .supported: default, linear, dynamic",
        ),
        (
            lambda f: _change(f, rope_parameters=_longrope([1.0, 2.0], [1.0])),
            r"config.json has an invalid field: expected \d short and \d long factors for width=\d, got 2 and 1",
        ),
        (
            lambda f: _change(f, rope_parameters=_longrope(["a"], [1.0])),
            "config.json has an invalid field: could not convert",
        ),
        (
            lambda f: _change(f, partial_rotary_factor=0.5),
            "partial_rotary_factor=0.5, which transformers ignores",
        ),
        (lambda f: _change(f, quantization_config={"bits": 4}), "quantized weights are not supported"),
        (lambda f: _change(f, vocab_size="big"), "vocab_size='big': expected int"),
        (lambda f: _change(f, num_attention_heads=0), "num_attention_heads=0: expected at least 1"),
        (lambda f: _change(f, model_type=["llama"]), "model_type=.'llama'., which is not supported"),
        (lambda f: _change(f, rms_norm_eps=-1.0), "rms_norm_eps=-1.0: expected a finite number above 0"),
        (lambda f: _change(f, rms_norm_eps=float("nan")), "rms_norm_eps=nan: expected a finite number"),
        (lambda f: _change(f, rope_parameters={"rope_theta": 0}), "rope_theta=0.0: expected a finite number"),
        (
            lambda f: _change(f, attention_dropout=1.5),
            "attention_dropout=1.5: expected at least 0 and below 1",
        ),
        (_integers, "has dtype I64, but the model requires floating-point values"),
    ],
)
def test_damaged_and_unsupported_folders_are_refused(tmp_path: Path, damage: Any, message: str) -> None:
    model = reference("llama", 5, tie_word_embeddings=False, num_hidden_layers=2)
    total = sum(p.nbytes for p in model.parameters())
    folder = folder_of(model, tmp_path / "base", max_shard_size=total // 2 - 1000)
    assert len(list(folder.glob("*.safetensors"))) == 3
    from_pretrained(folder)
    damage(folder)
    with pytest.raises(FolderError, match=message):
        from_pretrained(folder)
    with pytest.raises(FolderError, match=message):
        from_pretrained(folder, lazy=True)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="nowhere does not exist: expected a Hugging Face model folder"):
        from_pretrained(tmp_path / "nowhere")


def _vanish(rank: int, size: int, folder: Path) -> None:
    model = from_pretrained(folder, lazy=True)
    world().barrier()
    if rank == 0:
        shutil.rmtree(folder)
    world().barrier()
    with pytest.raises(CheckpointError, match="No such file"):
        farandole.parallelize(model, Plan(zero=3))


def test_a_failed_read_is_reported_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks(2).run(_vanish, small(tmp_path))


def _refuse(rank: int, size: int, folder: Path) -> None:
    with pytest.raises(Exception, match="the folder exists"):
        _train(rank, size, folder, Plan(), folder)


def test_an_existing_folder_is_not_overwritten(ranks: Any, tmp_path: Path) -> None:
    folder = small(tmp_path)
    before = (folder / "config.json").read_bytes()
    ranks(2).run(_refuse, folder)
    assert (folder / "config.json").read_bytes() == before


def test_a_classifier_gets_new_weights(tmp_path: Path) -> None:
    theirs = reference("bert", 1)
    folder = folder_of(theirs, tmp_path / "base")
    one, two = (from_pretrained(folder, classes=3, seed=4) for _ in range(2))
    assert one(torch.ones(2, 5, dtype=torch.int64)).shape == (2, 3)
    assert torch.equal(one[-1].classifier.weight, two[-1].classifier.weight)
    assert one[-1].classifier.weight.std() > 0.01
    torch.testing.assert_close(one[0].tokens.weight, theirs.bert.embeddings.word_embeddings.weight)
    with pytest.raises(FolderError, match="supported for bert and vit only"):
        from_pretrained(folder_of(reference("gpt2", 1), tmp_path / "gpt2"), classes=3)
