"""Logits, losses and gradients of models from Hugging Face folders, compared with `transformers`."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from farandole.models.deepseek import DeepSeekConfig, build_deepseek
from farandole.models.generate import generate
from farandole.models.hf import describe, files, from_pretrained, save_pretrained
from farandole.models.llama import LlamaConfig, build_llama
from farandole.models.mixtral import MixtralConfig, build_mixtral
from farandole.models.moe import GroupedRouter, routers_of, take_loads
from farandole.models.rotary import Rotary
from farandole.models.sequence import KeyValueCache, SequenceInfo
from farandole.models.t5 import shift_right
from tests.models.hf.compare import close, compare_gradients, compare_loss, tokens_for
from tests.models.hf.families import (
    DECODERS,
    FAMILIES,
    ROPES,
    ROTARY,
    folder_of,
    reference,
    rope,
    transformers,
    with_rope,
)

SEEDS = (0, 1, 2, 3)


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


def test_the_balancing_loss_of_mixtral(tmp_path: Path) -> None:
    """With `output_router_logits`, training adds the routers' loss, here of one layer and one sequence."""
    theirs = reference("mixtral", 0, output_router_logits=True, router_aux_loss_coef=0.3, num_hidden_layers=1)
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).train()
    tokens, targets = (tokens_for(theirs, 1, 15, seed=seed) for seed in range(2))
    found = theirs(tokens, use_cache=False)
    loss = F.cross_entropy(found.logits.flatten(0, 1), targets.flatten()) + 0.3 * found.aux_loss
    total, count = ours(tokens, None, targets)
    close(total / count, loss)
    save_pretrained(ours, tmp_path / "b")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "b")
    assert config.output_router_logits and config.router_aux_loss_coef == pytest.approx(0.3)


def test_epsilon_of_deepseek(tmp_path: Path) -> None:
    """`rms_norm_eps` does not apply to the norms of the latent vectors."""
    theirs = reference("deepseek_v3", 0, rms_norm_eps=0.1, q_lora_rank=12)
    ours = from_pretrained(folder_of(theirs, tmp_path)).eval()
    tokens = tokens_for(theirs, 2, 15, seed=0)
    close(ours(tokens), theirs(tokens, use_cache=False).logits)


@pytest.mark.parametrize(("attention", "mlp"), [(True, False), (False, True), (True, True)])
def test_biases_of_llama(attention: bool, mlp: bool, tmp_path: Path) -> None:
    theirs = reference("llama", 0, attention_bias=attention, mlp_bias=mlp, num_hidden_layers=1)
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    config = ours.config
    assert (config.attention_bias, config.out_bias, config.feed_forward_bias) == (attention, attention, mlp)
    tokens, targets = (tokens_for(theirs, 2, 15, seed=seed) for seed in range(2))
    logits = theirs(tokens, use_cache=False).logits
    close(ours(tokens), logits)
    compare_loss(ours, theirs, (tokens, None, targets), logits, tmp_path / "b")


@pytest.mark.parametrize("layer_types", [False, True])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_of_qwen(family: str, layer_types: bool, tmp_path: Path) -> None:
    """The first layers have full attention, or `layer_types` specifies the layers with a window."""
    changes: dict[str, Any] = {"max_window_layers": 1}
    if layer_types:
        changes["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention"]
    changes |= {"use_sliding_window": True, "sliding_window": 5, "num_hidden_layers": 3}
    theirs = reference(family, 0, **changes)
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    assert ours.config.windows == ((5, None, 5) if layer_types else (None, 5, 5))
    tokens, targets = (tokens_for(theirs, 2, 20, seed=seed) for seed in range(2))
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
def test_bert_classifier(seed: int, tmp_path: Path) -> None:
    theirs = reference("bert-classifier", seed, num_labels=5)
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    tokens = tokens_for(theirs, 3, 13)
    tokens[2, 5:] = 0
    labels = torch.tensor([1, 4, 0])
    logits = theirs(tokens, attention_mask=(tokens != 0).long()).logits
    close(ours(tokens), logits)
    compare_loss(ours, theirs, (tokens, None, labels), logits, tmp_path / "b")


@pytest.mark.parametrize("seed", SEEDS)
def test_vit(seed: int, tmp_path: Path) -> None:
    theirs = reference("vit", seed)
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    size = theirs.config.image_size
    images = torch.randn(3, theirs.config.num_channels, size, size)
    labels = torch.randint(0, theirs.config.num_labels, (3,))
    logits = theirs(images).logits
    close(ours(images), logits)
    compare_loss(ours, theirs, (images, None, labels), logits, tmp_path / "b")


@pytest.mark.parametrize("labels", [[-100, 1, -1], [-100, -100, -100]])
@pytest.mark.parametrize("family", ["bert-classifier", "vit"])
def test_classifiers_ignore_negative_targets(family: str, labels: list[int], tmp_path: Path) -> None:
    theirs = reference(family, 0, num_labels=3)
    ours = from_pretrained(folder_of(theirs, tmp_path / "a")).eval()
    size = theirs.config.image_size if family == "vit" else 0
    inputs = torch.randn(3, theirs.config.num_channels, size, size) if size else tokens_for(theirs, 3, 13)
    targets = torch.tensor(labels)
    logits = theirs(inputs).logits
    compare_loss(ours, theirs, (inputs, None, targets.where(targets >= 0, -100)), logits, tmp_path / "b")
    total, count = ours(inputs, None, targets)
    with torch.no_grad():
        again, same = ours(inputs, None, targets)
    assert count == same == sum(label >= 0 for label in labels)
    torch.testing.assert_close(again, total.detach())
    with pytest.raises(IndexError, match=r"expected targets below 3 \(the number of logits\), got 3"):
        ours(inputs, None, targets.abs().clamp(max=3))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_t5_source_of_only_padding_gives_finite_gradients(dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = reference("t5", 0)
    ours = from_pretrained(folder_of(theirs, tmp_path), dtype=dtype)
    source, labels = tokens_for(theirs, 2, 9), tokens_for(theirs, 2, 5)
    source[1] = 0
    total, _ = ours((source, shift_right(labels, 0)), None, labels)
    total.backward()
    assert total.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in ours.parameters())


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
    theirs = reference(family, seed, **(with_rope(family, "default", 2) if family in ROTARY else {}))
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


@pytest.mark.parametrize("scale", [0.8, 1.5])
def test_attention_scale_of_deepseek_requires_yarn(scale: float, tmp_path: Path) -> None:
    theirs = reference("deepseek_v3", 0, **with_rope("deepseek_v3", "yarn"))
    config = from_pretrained(folder_of(theirs, tmp_path / "a")).config
    save_pretrained(build_deepseek(replace(config, attention_scale=scale)), tmp_path / "b")
    assert from_pretrained(tmp_path / "b").config.attention_scale == pytest.approx(scale)
    for rotary in (Rotary(8), replace(config.rotary, factor=1.0)):
        with pytest.raises(ValueError, match=f"expected attention_scale=1 .* got attention_scale={scale}"):
            replace(config, attention_scale=scale, rotary=rotary)
    with pytest.raises(ValueError, match="expected attention_scale above 0, got -1"):
        replace(config, attention_scale=-1.0)


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


def test_router_bias_stays_in_fp32(tmp_path: Path) -> None:
    theirs = reference("deepseek_v3", 1)
    source = folder_of(theirs, tmp_path / "a")
    same = type(theirs).from_pretrained(source, dtype=torch.bfloat16)
    biases = [b for name, b in same.named_buffers() if name.endswith("e_score_correction_bias")]
    save_pretrained(from_pretrained(source), tmp_path / "b", dtype=torch.bfloat16)
    cast = from_pretrained(source).to(torch.bfloat16)
    for ours in (from_pretrained(source, dtype=torch.bfloat16), from_pretrained(tmp_path / "b"), cast):
        routers = routers_of(ours).values()
        assert len(routers) == len(biases) > 0
        for router, bias in zip(routers, biases, strict=True):
            assert router.load.dtype == bias.dtype == torch.float32
            assert torch.equal(router.bias, bias)
    assert cast[0].tokens.weight.dtype == torch.bfloat16


def test_router_bias_balances_the_experts_of_a_bf16_model() -> None:
    router = GroupedRouter(8, experts=8, top=2).bfloat16()
    router.bias += 6.5
    for _ in range(300):
        router(torch.ones(1, 8, dtype=torch.bfloat16))
    assert router.load.sum() == 600
    take_loads(router)
    assert float((router.bias - 6.5).abs().max()) == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("with_prefix", [False, True])
@pytest.mark.parametrize("family", DECODERS)
def test_a_stored_head_that_differs_from_the_embedding_is_not_tied(
    family: str, with_prefix: bool, tmp_path: Path
) -> None:
    theirs = reference(family, 1, tie_word_embeddings=False)
    folder = folder_of(theirs, tmp_path / "a")
    _declare_tied(folder)
    if not with_prefix:
        file = folder / "model.safetensors"
        tensors = {
            name.removeprefix(f"{theirs.base_model_prefix}."): t for name, t in load_file(file).items()
        }
        save_file(tensors, file, {"format": "pt"})
    tokens = tokens_for(theirs, 1, 8)
    expected = theirs(tokens).logits
    same = partial(type(theirs).from_pretrained, experts_implementation="eager")
    close(same(folder)(tokens).logits, expected)
    ours = from_pretrained(folder).eval()
    close(ours(tokens), expected)
    save_pretrained(ours, tmp_path / "b")
    assert json.loads((tmp_path / "b" / "config.json").read_text())["tie_word_embeddings"] is False
    close(same(tmp_path / "b")(tokens).logits, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_stored_head_that_equals_the_embedding_is_tied(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_COMPARED_ELEMENTS", 1000)
    folder = folder_of(reference("llama", 1, tie_word_embeddings=False), tmp_path / "a")
    _declare_tied(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].to(dtype, copy=True)
    save_file(tensors | {"lm_head.weight": head}, file, {"format": "pt"})
    assert from_pretrained(folder).config.tied
    head[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": head}, file, {"format": "pt"})
    assert not from_pretrained(folder).config.tied


def _declare_tied(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
