"""Logits, losses and gradients of models from Hugging Face folders, compared with `transformers`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from farandole.models.deepseek import DeepSeekConfig, build_deepseek
from farandole.models.generate import generate
from farandole.models.hf import describe, from_pretrained, save_pretrained
from farandole.models.hf.pretrained import tensors_of, tensors_to_write
from farandole.models.llama import LlamaConfig, build_llama
from farandole.models.mixtral import MixtralConfig, build_mixtral
from farandole.models.moe import GroupedRouter, take_loads
from farandole.models.rotary import Rotary
from farandole.models.sequence import KeyValueCache, SequenceInfo
from farandole.models.t5 import shift_right
from tests.models.hf.families import DECODERS, FAMILIES, ROPES, folder_of, reference, rope, transformers

SEEDS = (0, 1, 2, 3)
ROTARY = tuple(family for family in DECODERS if family not in ("gpt2", "gptj"))
"""The families whose configurations have `rope_parameters`."""


def with_rope(family: str, kind: str, layers: int = 1) -> dict[str, Any]:
    """Return changes of a configuration that select rotary positions and a number of layers."""
    sizes: dict[str, Any] = {"head_dim": 8}
    if family == "deepseek_v3":
        sizes = {"first_k_dense_replace": layers - 1}
    return {"rope_parameters": rope(kind, 8), "num_hidden_layers": layers, **sizes}


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-4)


def tokens_for(model: Any, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, model.config.vocab_size, shape, generator=generator)


def gradients_by_stored_name(theirs: Any, folder: Path) -> dict[str, Tensor]:
    """Return the gradients of a model of transformers under the names that its folder has."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    theirs.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def compare_gradients(ours: Any, theirs: Any, folder: Path) -> None:
    expected = gradients_by_stored_name(theirs, folder)
    own = tensors_of(ours)
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    compared = 0
    for written in tensors_to_write(describe(ours), shapes):
        gradient = own[written.ours].grad
        if gradient is None:
            continue
        box = gradient[tuple(slice(a, b) for a, b in written.box)]
        close(written.of_box(box), expected[written.name])
        compared += 1
    assert compared >= len(list(ours.parameters()))


def packed(model: Any, seed: int) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Return tokens, targets and document numbers, all (1, positions), and the lengths of the documents."""
    lengths = [5, 1, 9, 4]
    tokens, targets = (tokens_for(model, 1, sum(lengths), seed=seed + i) for i in range(2))
    targets[:, 2:4] = -100
    documents = torch.tensor([[number for number, length in enumerate(lengths) for _ in range(length)]])
    return tokens, targets, documents, lengths


def compare_loss(ours: Any, theirs: Any, arguments: tuple[Any, ...], logits: Tensor, folder: Path) -> None:
    """Compare the loss and the gradients of `ours(*arguments)` with those of their logits for the targets."""
    targets = arguments[2]
    total, count = ours(*arguments)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert count == int((targets >= 0).sum())
    torch.testing.assert_close(total, expected)
    expected.backward()
    total.backward()
    compare_gradients(ours, theirs, folder)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", DECODERS)
def test_decoder(family: str, seed: int, tmp_path: Path) -> None:
    theirs = reference(family, seed)
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    tokens = tokens_for(theirs, 3, 17 + seed, seed=seed)
    targets = tokens_for(theirs, 3, 17 + seed, seed=seed + 1)
    targets[1, 4:9] = -100
    logits = theirs(tokens, use_cache=False).logits
    close(ours(tokens), logits)
    compare_loss(ours, theirs, (tokens, None, targets), logits, tmp_path / "b")


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("family", ROTARY)
def test_rotary_positions(family: str, kind: str, tmp_path: Path) -> None:
    """Compare sequences within the original context and past it."""
    theirs = reference(family, 0, **with_rope(family, kind))
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    for length in (20, 90):
        tokens, targets = (tokens_for(theirs, 2, length, seed=seed) for seed in (length, length + 1))
        logits = theirs(tokens, use_cache=False).logits
        close(ours(tokens), logits)
    compare_loss(ours, theirs, (tokens, None, targets), logits, tmp_path / "b")


@pytest.mark.parametrize("changes", [{}, {"factor": 2.0}, {"attention_factor": 1.3}, {"factor": 0.5}])
def test_defaults_of_longrope(changes: dict[str, float], tmp_path: Path) -> None:
    parameters = rope("longrope", 8)
    del parameters["factor"]
    theirs = reference("llama", 0, head_dim=8, rope_parameters=parameters | changes)
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    for length in (32, 33):  # the last length in the original context, and the first one past it
        tokens = tokens_for(theirs, 2, length)
        close(ours(tokens), theirs(tokens, use_cache=False).logits)


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_positions_are_written(kind: str, tmp_path: Path) -> None:
    theirs = reference("llama", 0, **with_rope("llama", kind))
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    del ours.pretrained  # write the configuration from scratch
    save_pretrained(ours, tmp_path / "b")
    assert from_pretrained(tmp_path / "b").config == ours.config
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "b").eval()
    tokens = tokens_for(theirs, 2, 90)
    close(ours(tokens), again(tokens, use_cache=False).logits)


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_packed_documents_equal_separate_sequences(family: str, seed: int, tmp_path: Path) -> None:
    theirs = reference(
        family, seed, **({} if family in ("gpt2", "gptj") else {"rope_parameters": _default_rope()})
    )
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    lengths = [5, 1, 9, 4]
    tokens = tokens_for(theirs, 1, sum(lengths), seed=seed)
    documents = torch.tensor([[number for number, length in enumerate(lengths) for _ in range(length)]])
    got = ours(tokens, SequenceInfo(documents=documents))
    expected = [theirs(part, use_cache=False).logits for part in tokens.split(lengths, 1)]
    close(got, torch.cat(expected, 1))
    # two rows with different documents, and padding at the end
    both = torch.cat((tokens, tokens.flip(1)))
    numbers = torch.cat((documents, documents.flip(1)))
    rows = ours(both, SequenceInfo(documents=numbers))
    close(rows[:1], torch.cat(expected, 1))
    reversed_parts = both[1:].split(lengths[::-1], 1)
    close(rows[1:], torch.cat([theirs(part, use_cache=False).logits for part in reversed_parts], 1))


def _default_rope() -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0}


@pytest.mark.parametrize("family", DECODERS)
def test_padding_on_the_right_changes_no_logits(family: str, tmp_path: Path) -> None:
    theirs = reference(family, 1)
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    tokens = tokens_for(theirs, 2, 12)
    mask = torch.ones_like(tokens)
    mask[0, 7:] = 0
    expected = theirs(tokens, attention_mask=mask, use_cache=False).logits
    got = ours(tokens, SequenceInfo(documents=1 - mask))
    close(got[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("seed", SEEDS)
def test_bert(seed: int, tmp_path: Path) -> None:
    theirs = reference("bert", seed)
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    tokens, targets = tokens_for(theirs, 3, 13, seed=seed), tokens_for(theirs, 3, 13, seed=seed + 1)
    tokens[0, 8:] = 0
    segments = torch.randint(0, 2, tokens.shape)
    real = tokens != 0
    targets[~real] = -100
    targets[:, 2:6] = -100
    logits = theirs(tokens, attention_mask=real.long(), token_type_ids=segments).logits
    close(ours((tokens, segments))[real], logits[real])
    compare_loss(ours, theirs, ((tokens, segments), None, targets), logits, tmp_path / "b")


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_packed_documents_of_bert_equal_separate_sequences(seed: int, tmp_path: Path) -> None:
    theirs = reference("bert", seed)
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    tokens, targets, documents, lengths = packed(theirs, seed)
    logits = torch.cat([theirs(part).logits for part in tokens.split(lengths, 1)], 1)
    info = SequenceInfo(documents=documents)
    close(ours(tokens, info), logits)
    compare_loss(ours, theirs, (tokens, info, targets), logits, tmp_path / "b")


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_bert_classifier(seed: int, tmp_path: Path) -> None:
    theirs = reference("bert-classifier", seed, num_labels=5)
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    tokens = tokens_for(theirs, 3, 13)
    tokens[2, 5:] = 0
    labels = torch.tensor([1, 4, 0])
    logits = theirs(tokens, attention_mask=(tokens != 0).long()).logits
    close(ours(tokens), logits)
    total, count = ours(tokens, None, labels)
    expected = F.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(total, expected)
    assert count == 3
    expected.backward()
    total.backward()
    compare_gradients(ours, theirs, tmp_path / "b")


@pytest.mark.parametrize("seed", SEEDS)
def test_vit(seed: int, tmp_path: Path) -> None:
    theirs = reference("vit", seed)
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    size = theirs.config.image_size
    images = torch.randn(3, theirs.config.num_channels, size, size)
    labels = torch.randint(0, theirs.config.num_labels, (3,))
    logits = theirs(images).logits
    close(ours(images), logits)
    expected = F.cross_entropy(logits, labels, reduction="sum")
    total, _ = ours(images, None, labels)
    expected.backward()
    total.backward()
    compare_gradients(ours, theirs, tmp_path / "b")


@pytest.mark.parametrize("seed", SEEDS)
def test_t5(seed: int, tmp_path: Path) -> None:
    theirs = reference("t5", seed)
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    source, labels = tokens_for(theirs, 3, 19, seed=seed), tokens_for(theirs, 3, 11, seed=seed + 1)
    source[1, 6:] = 0
    labels[0, 7:] = -100
    output = theirs(input_ids=source, attention_mask=(source != 0).long(), labels=labels)
    inputs = (source, shift_right(labels, 0))
    close(ours(inputs), output.logits)
    total, count = ours(inputs, None, labels)
    torch.testing.assert_close(total / count, output.loss)
    output.loss.backward()
    (total / count).backward()
    compare_gradients(ours, theirs, tmp_path / "b")


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_folder_loads_in_transformers_with_equal_tensors(family: str, tmp_path: Path) -> None:
    theirs = reference(family, 2)
    ours = from_pretrained(folder_of(theirs, tmp_path / "a"))
    save_pretrained(ours, tmp_path / "b", file_bytes=20_000)
    again, loading = type(theirs).from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected = theirs.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


@pytest.mark.parametrize("family", FAMILIES)
def test_configuration_written_from_scratch_equals_the_original(family: str, tmp_path: Path) -> None:
    theirs = reference(family, 3)
    ours = from_pretrained(folder_of(theirs, tmp_path / "a"))
    config = ours.config
    del ours.pretrained
    if describe(ours).architecture.name != theirs.config.model_type:
        return  # a configuration of several families, such as a Llama without bias and a Mistral without window
    save_pretrained(ours, tmp_path / "b")
    assert from_pretrained(tmp_path / "b").config == config
    again = type(theirs).from_pretrained(tmp_path / "b", experts_implementation="eager").eval()
    if family in DECODERS:
        tokens = tokens_for(theirs, 2, 9)
        close(again(tokens, use_cache=False).logits, theirs(tokens, use_cache=False).logits)


@pytest.mark.parametrize("rotary", [Rotary(4), Rotary(8, interleaved=True)])
def test_rotary_positions_that_transformers_ignores_are_not_written(rotary: Rotary, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocabulary": 20, "layers": 1, "heads": 2, "width": 16, "inner": 8}
    for model in (
        build_llama(LlamaConfig(**sizes, rotary=rotary)),
        build_mixtral(MixtralConfig(**sizes, rotary=rotary)),
    ):
        with pytest.raises(ValueError, match="has no Hugging Face format"):
            save_pretrained(model, tmp_path / "a")


@pytest.mark.parametrize("seed", SEEDS[:2])
@pytest.mark.parametrize("family", DECODERS)
def test_cached_decoding_equals_the_full_forward_pass(family: str, seed: int, tmp_path: Path) -> None:
    rope = {} if family in ("gpt2", "gptj") else {"rope_parameters": _default_rope()}
    theirs = reference(family, seed, **rope)
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    tokens = tokens_for(theirs, 2, 40, seed=seed)
    expected = ours(tokens)
    info = SequenceInfo(cache=KeyValueCache())
    parts = [ours(part, info) for part in tokens.split([9, 1, 5, 1, 1, 3, *[1] * 20], 1)]
    close(torch.cat(parts, 1), expected)
    written = list(generate(ours, tokens[0, :7].tolist(), 20, context=64, temperature=0))
    given = tokens[0, :7].tolist()
    for token in written:
        assert token == int(ours(torch.tensor([given]))[0, -1].argmax())
        given.append(token)


def test_further_tokens_of_deepseek() -> None:
    """Compare the loss of multi-token prediction with the formula of the report, layer by layer."""
    torch.manual_seed(0)
    config = DeepSeekConfig(
        vocabulary=40,
        layers=2,
        heads=2,
        width=16,
        inner=20,
        rotary=Rotary(4),
        query_rank=6,
        kv_rank=8,
        plain_width=4,
        value_width=4,
        experts=4,
        expert_inner=6,
        top=2,
        dense=1,
        predicted=2,
        predicted_weight=0.3,
    )
    model = build_deepseek(config)
    tokens = torch.randint(0, 40, (2, 9))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    total, count = model(inputs, None, targets)
    head = model[-1]
    hidden = head.norm(model[:-1](inputs))
    main = F.cross_entropy(F.linear(hidden, head.weight).flatten(0, 1), targets.flatten())
    losses = []
    for k, module in enumerate(head.predictions, 1):
        # position i sees token i + k and predicts token i + k + 1
        length = inputs.shape[1] - k
        embedded = model[0].tokens(tokens[:, k : k + length])
        both = torch.cat((module.norm_embedding(embedded), module.norm_hidden(hidden[:, :length])), -1)
        hidden = module.layer(module.project(both), SequenceInfo())
        logits = F.linear(module.norm(hidden), head.weight)
        losses.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, k + 1 : k + 1 + length].flatten()))
    expected = main + 0.3 * torch.stack(losses).mean()
    torch.testing.assert_close(total / count, expected)
    # the modules have the names of published folders
    names = {part.name for parts in describe(model).table.parts.values() for part in parts}
    assert {"model.layers.2.eh_proj.weight", "model.layers.3.shared_head.norm.weight"} <= names


def test_predictions_are_read_and_written(tmp_path: Path) -> None:
    theirs = reference("deepseek_v3", 1)
    config = from_pretrained(folder_of(theirs, tmp_path / "a")).config
    assert config.predicted == 0  # transformers does not save these layers
    torch.manual_seed(1)
    model = build_deepseek(replace(config, predicted=1))
    save_pretrained(model, tmp_path / "b")
    again = from_pretrained(tmp_path / "b")
    assert again.config.predicted == 1
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    tokens = tokens_for(theirs, 1, 8)
    same = type(theirs).from_pretrained(tmp_path / "b", experts_implementation="eager").eval()
    close(again.eval()(tokens), same(tokens, use_cache=False).logits)


@pytest.mark.parametrize("steps", [300])
def test_router_bias_balances_the_experts(steps: int) -> None:
    torch.manual_seed(0)
    router = GroupedRouter(8, experts=8, top=2, groups=4, top_groups=2)
    with torch.no_grad():
        router.weight[0] += 1.0
    x = torch.randn(512, 8) + 0.5
    router(x)
    before = take_loads(router)[""].imbalance
    for _ in range(steps):
        router(x)
        after = take_loads(router)[""].imbalance
    assert before > 2.5
    assert after < 1.4
