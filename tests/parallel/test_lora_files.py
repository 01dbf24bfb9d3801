"""The files of an adapter, compared with a description of PEFT's format, and files that are refused.

The description, of PEFT 0.21 (`save_pretrained` of a LoRA adapter):

- `adapter_model.safetensors`, metadata {"format": "pt"}: for a layer at PATH in the base model the tensors
  `base_model.model.PATH.lora_A.weight` (r, in) and `base_model.model.PATH.lora_B.weight` (out, r); a trained bias of
  an adapted layer is `base_model.model.PATH.base_layer.bias`; modules in `modules_to_save` and other biases have
  their names in the model, with the prefix `base_model.model.`.
- `adapter_config.json`: an object with `peft_type` "LORA", `r`, `lora_alpha`, `lora_dropout`, `use_rslora`,
  `bias` ("none", "lora_only", "all"), `modules_to_save` (a list or null), `target_modules`: a list of paths or
  endings of paths, or a string, which is a regular expression for whole paths.

`test_lora_peft` compares adapters with the library itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from farandole.parallel.lora import add_lora, merge
from farandole.parallel.lora.peft_adapter import AdapterError, load_adapter, save_adapter
from farandole.plan import LoRA

PREFIX = "base_model.model."


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 18)
        self.norm = nn.LayerNorm(18)
        self.out = nn.Linear(18, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.qkv(x)))


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block(), nn.Linear(6, 3))


def trained(lora: LoRA) -> nn.Sequential:
    """Return a model whose trainable parameters have changed."""
    net = model()
    add_lora(net, lora)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return net


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
LORA = LoRA(rank=2, alpha=5, targets=("qkv", "1.out"), dropout=0.1)
ALL = LoRA(2, 5, ("qkv", "1.out"), 0.1, use_rslora=True, bias="lora_only", also_train=("norm", "2"))


def test_file_contents(tmp_path: Path) -> None:
    net = trained(ALL)
    save_adapter(net, tmp_path / "new" / "adapter", base_model="some/model")
    folder = tmp_path / "new" / "adapter"
    assert sorted(os.listdir(folder)) == ["adapter_config.json", "adapter_model.safetensors"]
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    tensors = load_file(folder / "adapter_model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        PREFIX + "0.qkv.lora_A.weight": (2, 6),
        PREFIX + "0.qkv.lora_B.weight": (18, 2),
        PREFIX + "0.qkv.base_layer.bias": (18,),
        PREFIX + "0.norm.weight": (18,),
        PREFIX + "0.norm.bias": (18,),
        PREFIX + "1.qkv.lora_A.weight": (2, 6),
        PREFIX + "1.qkv.lora_B.weight": (18, 2),
        PREFIX + "1.qkv.base_layer.bias": (18,),
        PREFIX + "1.norm.weight": (18,),
        PREFIX + "1.norm.bias": (18,),
        PREFIX + "1.out.lora_A.weight": (2, 18),
        PREFIX + "1.out.lora_B.weight": (6, 2),
        PREFIX + "2.weight": (3, 6),
        PREFIX + "2.bias": (3,),
    }
    parameters = dict(net.named_parameters())
    assert torch.equal(tensors[PREFIX + "1.out.lora_B.weight"], parameters["1.out.lora_B"])
    assert torch.equal(tensors[PREFIX + "0.qkv.base_layer.bias"], parameters["0.qkv.bias"])
    config = json.loads((folder / "adapter_config.json").read_text())
    expected = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 5,
        "lora_dropout": 0.1,
        "use_rslora": True,
        "bias": "lora_only",
        "target_modules": ["0.qkv", "1.qkv", "1.out"],
        "modules_to_save": ["0.norm", "1.norm", "2"],
        "base_model_name_or_path": "some/model",
    }
    assert {name: config[name] for name in expected} == expected
    modes = {(path.stat().st_mode & 0o777) for path in folder.iterdir()}
    assert len(modes) == 1, "both are readable by the same people"


@pytest.mark.parametrize("lora", [LORA, ALL, LoRA(3, 1.5, "all-linear", bias="all")], ids=str)
@pytest.mark.parametrize("ready", [False, True])
def test_a_saved_adapter_is_loaded(tmp_path: Path, lora: LoRA, ready: bool) -> None:
    net = trained(lora).eval()
    expected = net(X)
    merge(net)  # makes no difference
    save_adapter(net, tmp_path)
    other = model().eval()
    if ready:
        add_lora(other, lora)
    parameters = dict(other.named_parameters())
    summary = load_adapter(other, tmp_path)
    assert torch.equal(other(X), trained(lora).eval()(X))
    torch.testing.assert_close(other(X), expected)
    assert all(dict(other.named_parameters())[name] is p for name, p in parameters.items()), "in place"
    assert summary.trained == sum(p.numel() for p in trained(lora).parameters() if p.requires_grad)
    assert {n for n, p in other.named_parameters() if p.requires_grad} == {
        n for n, p in trained(lora).named_parameters() if p.requires_grad
    }
    save_adapter(other, tmp_path / "again")
    for name, tensor in load_file(tmp_path / "again" / "adapter_model.safetensors").items():
        assert torch.equal(tensor, load_file(tmp_path / "adapter_model.safetensors")[name])


def test_a_compiled_model_is_saved_under_its_own_names(tmp_path: Path) -> None:
    net = trained(LORA)
    save_adapter(net, tmp_path / "plain")
    save_adapter(torch.compile(net), tmp_path / "compiled")  # type: ignore[arg-type]
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "compiled" / name).read_bytes()
    other = model()
    load_adapter(torch.compile(other), tmp_path / "plain")  # type: ignore[arg-type]
    assert torch.equal(other.eval()(X), net.eval()(X))


def test_views_of_one_tensor_are_saved_one_by_one(tmp_path: Path) -> None:
    net = trained(LORA)
    parts = [p for p in net.parameters() if p.requires_grad]
    flat = torch.cat([p.detach().flatten() for p in parts])
    for parameter, view in zip(parts, flat.split([p.numel() for p in parts]), strict=True):
        parameter.data = view.view(parameter.shape)
    save_adapter(net, tmp_path)
    other = model()
    load_adapter(other, tmp_path)
    assert torch.equal(other.eval()(X), net.eval()(X))


def test_a_path_that_is_a_suffix_is_saved_as_a_regular_expression(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    add_lora(net, LoRA(rank=1, targets=re.compile("0")))
    save_adapter(net, tmp_path)
    target = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert [path for path in ("0", "1", "1.0") if re.fullmatch(target, path)] == ["0"]
    other = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    assert load_adapter(other, tmp_path).layers == ("0",)


Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]
A, B = PREFIX + "0.qkv.lora_A.weight", PREFIX + "0.qkv.lora_B.weight"


def _set(name: str, value: Any) -> Change:
    return lambda config, tensors: (config if name in config or "." not in name else tensors).update(
        {name: value}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _set("r", 3),
            r"0.qkv.lora_A is 2 x 6 in the adapter, but 3 x 6 in the model; .*0.qkv.lora_B is 18 x 2 in the adapter, but 18 x 3|1.out",
        ),
        (_set("r", "2"), "rank='2': expected an integer"),
        (lambda c, t: c.pop("lora_alpha"), "has no field lora_alpha"),
        (_set("lora_alpha", float("nan")), "alpha=nan"),
        (_set("peft_type", "LOHA"), "peft_type='LOHA': expected 'LORA'"),
        (_set("use_dora", True), "unsupported options: use_dora=True"),
        (_set("rank_pattern", {"qkv": 4}), "unsupported options: rank_pattern="),
        (_set("init_lora_weights", "pissa"), "init_lora_weights='pissa'"),
        (_set("something_new", "x"), "something_new='x'"),
        (
            _set("bias", "all"),
            "the adapter has no 0.qkv.bias, 0.norm.bias, 1.qkv.bias, 1.norm.bias and 1 more",
        ),
        (_set(A, torch.zeros(2, 7)), r"0.qkv.lora_A is 2 x 7 in the adapter, but 2 x 6 in the model; load"),
        (_set(B, torch.zeros(2)), r"0.qkv.lora_B is 2 in the adapter, but 18 x 2 in the model; load"),
        (
            lambda c, t: t.pop(A),
            r"the adapter has no lora_A for 0.qkv(; the adapter has no tensors for 0.qkv)?; load",
        ),
        (lambda c, t: t.pop(B), r"the adapter has no lora_B for 0.qkv; load"),
        (
            _set(PREFIX + "7.qkv.lora_A.weight", torch.zeros(2, 6)),
            r"the model has no 7.qkv \(nearest: .\.qkv\); load",
        ),
        (_set(PREFIX + "0.norm.lora_A.weight", torch.zeros(2, 6)), "0.norm is a LayerNorm, not an nn.Linear"),
        (
            _set(PREFIX + "0.norm.gain", torch.zeros(2)),
            r"the adapter has no 0.norm.weight, 0.norm.bias, .*has 0.norm.gain, which",
        ),
        (_set(PREFIX + "head.weight", torch.zeros(2)), "also_train: .*head.* matches no module"),
        (_set(PREFIX + "scale", torch.zeros(2)), "has tensors that do not belong to a submodule: scale"),
        (
            _set("0.qkv.lora_A.weight", torch.zeros(2)),
            "'0.qkv.lora_A.weight' does not begin with 'base_model.model.'",
        ),
        (_set(PREFIX + "0.lora_embedding_A", torch.zeros(2)), "unsupported tensors: 0.lora_embedding_A"),
        (lambda c, t: t.clear(), "it has no tensors"),
    ],
)
@pytest.mark.parametrize("ready", [False, True])
def test_a_mismatch_is_reported_and_changes_nothing(
    tmp_path: Path, change: Change, message: str, ready: bool
) -> None:
    save_adapter(trained(LORA), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    change(config, tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    net = model()
    if ready:
        add_lora(net, LORA)
        others = "no LoRA in this model|the adapter has rank 3|which the model does not train|the adapter has bias="
        message = f"{message}|{others}"
    before = {name: (tensor.clone(), tensor.requires_grad) for name, tensor in net.named_parameters()}
    with pytest.raises(AdapterError, match=message):
        load_adapter(net, tmp_path)
    after = dict(net.named_parameters())
    assert list(after) == list(before)
    for name, (tensor, requires) in before.items():
        assert torch.equal(after[name], tensor) and after[name].requires_grad == requires


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (LoRA(3, 5, ("qkv", "1.out")), "the adapter has rank 2, but the model has rank 3"),
        (LoRA(2, 8, ("qkv", "1.out")), r"has scaling 2.5, but the model has 4 \(check alpha\)"),
        (LoRA(2, 5, ("qkv", "1.out"), use_rslora=True), "has scaling 2.5, but the model has 3.53"),
        (LoRA(2, 5, "qkv"), "1.out has no LoRA in this model"),
        (LoRA(2, 5, ("qkv", "out")), "the adapter has no tensors for 0.out"),
        (
            LoRA(2, 5, ("qkv", "1.out"), bias="lora_only"),
            "the adapter has bias='none', but the model has bias='lora_only'",
        ),
        (
            LoRA(2, 5, ("qkv", "1.out"), also_train="2"),
            "the adapter has no 2.weight, 2.bias, which the model trains",
        ),
    ],
)
def test_an_adapter_with_other_settings_is_refused(tmp_path: Path, lora: LoRA, message: str) -> None:
    save_adapter(trained(LORA), tmp_path)
    net = model()
    add_lora(net, lora)
    with pytest.raises(AdapterError, match=message):
        load_adapter(net, tmp_path)
    net = trained(LORA)
    merge(net)
    with pytest.raises(AdapterError, match="merged: call unmerge"):
        load_adapter(net, tmp_path)


def test_folders_without_an_adapter_are_refused(tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(AdapterError, match=message):
            load_adapter(model(), tmp_path / "adapter")

    refused("does not exist")
    (tmp_path / "adapter").write_text("")
    refused("is not a folder")
    (tmp_path / "adapter").unlink()
    (tmp_path / "adapter").mkdir()
    refused("adapter_config.json is missing; found: nothing")
    save_adapter(trained(LORA), tmp_path / "adapter")
    weights, config = (
        tmp_path / "adapter" / "adapter_model.safetensors",
        tmp_path / "adapter" / "adapter_config.json",
    )
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-5])
    refused("adapter_model.safetensors is damaged")
    weights.write_bytes(b"")
    refused("adapter_model.safetensors is damaged")
    weights.rename(weights.with_name("adapter_model.bin"))
    refused("adapter_model.safetensors is missing; .*adapter_model.bin is a pickle")
    weights.write_bytes(whole)
    config.write_text("{")
    refused("adapter_config.json is damaged")
    config.write_text("[1]")
    refused("expected a JSON object, found list")
    with pytest.raises(ValueError, match="no LoRA adapters to save"):
        save_adapter(model(), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_failed_save_keeps_the_previous_adapter(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AdapterError, match=r"cannot save the adapter to .*file/adapter: .*Not a directory"):
        save_adapter(trained(LORA), tmp_path / "file" / "adapter")
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root can mount a small disk, on Linux")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "farandole-test", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.strip()}")
    try:
        save_adapter(trained(LORA), disk / "adapter")
        before = {path.name: path.read_bytes() for path in (disk / "adapter").iterdir()}
        (disk / "ballast").write_bytes(b"x" * 60_000)
        big = nn.Sequential(nn.Linear(100, 100))
        add_lora(big, LoRA(rank=64))
        with pytest.raises(AdapterError, match=r"no space left on the disk \(about 50.5 KiB needed"):
            save_adapter(big, disk / "adapter")
        assert {path.name: path.read_bytes() for path in (disk / "adapter").iterdir()} == before
    finally:
        subprocess.run(["umount", str(disk)], check=True)


class Cut(BaseException):
    """Raised where the process would end."""


class Shears:
    """Raises `Cut` instead of rename or removal number `allowed`; removals of temporary files do not count."""

    def __init__(self, allowed: int, patch: pytest.MonkeyPatch) -> None:
        self.left = allowed
        self.rename, self.unlink = Path.rename, Path.unlink
        patch.setattr(Path, "rename", lambda path, target: self.run(self.rename, path, target))
        patch.setattr(Path, "unlink", lambda path, missing_ok=False: self.run(self.unlink, path, missing_ok))

    def run(self, change: Callable[..., Any], path: Path, option: Any) -> Any:
        if change is self.rename or path.suffix != ".tmp":
            self.left -= 1
            if self.left < 0:
                raise Cut
        return change(path, option)


def test_an_interrupted_save_never_mixes_weights_and_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that ends between any two renames leaves one complete adapter, or a folder that is refused."""
    first, other = trained(LORA), trained(LoRA(rank=2, alpha=50, targets=("qkv", "1.out")))  # of equal shapes
    save_adapter(first, tmp_path / "first")
    outcomes = []
    for allowed in range(4):
        folder = tmp_path / f"copy{allowed}"
        shutil.copytree(tmp_path / "first", folder)
        with monkeypatch.context() as patch, suppress(Cut):
            Shears(allowed, patch)
            save_adapter(other, folder)
        net = model().eval()
        with suppress(AdapterError):
            load_adapter(net, folder)
        candidates = {"nothing": model(), "first": first, "other": other}
        outcomes.append(
            next(name for name, made in candidates.items() if torch.equal(made.eval()(X), net(X)))
        )
    assert outcomes == ["first", "nothing", "nothing", "other"]
