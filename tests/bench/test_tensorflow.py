"""The synthetic training benchmark with TensorFlow: the same networks as PyTorch's, trained by every implementation."""

from __future__ import annotations

import json
import sys

import pytest

from farandole.bench.options import BenchError
from farandole.bench.setup import TrainingSetup
from farandole.bench.tensorflow import IMPLEMENTATIONS, TensorFlow
from tests.horovod.tensorflow.jobs import LIMIT_S, needs_tensorflow
from tests.launch.jobs import finish, start, write

SAME = """
import numpy as np, torch
from farandole.bench import tensorflow
from farandole.models.resnet import CONFIGS, build_resnet

for name in ("tiny", "tiny-bottleneck", "resnet18", "resnet50"):
    model = tensorflow.build_resnet(CONFIGS[name], 64)
    assert sum(int(np.prod(v.shape)) for v in model.trainable_variables) == CONFIGS[name].parameters, name

# with all weights equal within a layer the order of layers and channels does not matter, the strides and padding do
config = CONFIGS["tiny-bottleneck"]
ours, theirs = build_resnet(config).eval(), tensorflow.build_resnet(config, 64)
with torch.no_grad():
    for parameter in ours.parameters():
        parameter.fill_(0.02 if parameter.dim() > 1 else 1.0)
for variable in theirs.trainable_variables:
    variable.assign(np.full(variable.shape, 0.02 if len(variable.shape) > 1 else 1.0))
images = np.random.default_rng(0).standard_normal((2, 64, 64, 3)).astype(np.float32)
logits = ours(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).detach().numpy()
np.testing.assert_allclose(theirs(images, training=False), logits, rtol=1e-4)
"""


@needs_tensorflow
def test_the_networks_match_pytorch(tmp_path):
    status, _, err = finish(start([sys.executable, write(tmp_path, SAME)]), LIMIT_S)
    assert status == 0, err


@needs_tensorflow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_report_contains_throughput(tmp_path, implementation):
    path = tmp_path / "figures.json"
    command = (
        f"bench training --framework tensorflow --model tiny --image-size 32 --micro-batch 4 --implementation {implementation} "
        f"--num-warmup-batches 1 --num-batches-per-iter 2 --num-iters 2 --efficiency --json {path} --fp16-allreduce"
    )
    if implementation == "horovod":
        command += " --autocast"
    status, out, err = finish(
        start([sys.executable, "-m", "farandole", *command.split()], fork_ranks=True), LIMIT_S
    )
    assert status == 0, err
    result = json.loads(path.read_text())
    assert result["setup"]["framework"] == "tensorflow" and result["total"] > 0
    assert "Total img/sec on 2 rank(s)" in out and set(result["efficiency"]) == {"apart", "alone"}


def test_unavailable_implementations_are_refused(monkeypatch):
    with pytest.raises(BenchError, match="--implementation ddp"):
        TensorFlow().check(TrainingSetup(framework="tensorflow", implementation="ddp"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BenchError, match=r"pip install 'farandole\[tensorflow\]'"):
        TensorFlow().check(TrainingSetup(framework="tensorflow"))
