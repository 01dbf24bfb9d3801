"""Run the test programs for `horovod.tensorflow` and `horovod.keras` on several ranks."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from tests.horovod.tensorflow.jobs import job, needs_tensorflow
from tests.launch.jobs import ROOT, environment, finish, ours, run, start, write
from tests.ports import free_port

LAB = str(ROOT / "labs" / "horovod_digits_keras.py")

SCRIPT = """
import horovod.keras.callbacks
import horovod.tensorflow as hvd
import horovod.tensorflow.keras as tensorflow_keras
from horovod import keras as hvd_keras
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.functions import broadcast_variables
from horovod.tensorflow.mpi_ops import allgather
from horovod.tensorflow.util import _cache, _executing_eagerly, _make_subgraph
import farandole.horovod.tensorflow
import tensorflow as tf

assert hvd is farandole.horovod.tensorflow
assert hvd.Compression is Compression and hvd.broadcast_variables is broadcast_variables
assert hvd_keras.DistributedOptimizer is tensorflow_keras.DistributedOptimizer is hvd.DistributedOptimizer
assert hvd_keras.callbacks.MetricAverageCallback is horovod.keras.callbacks.MetricAverageCallback
calls = []
cached = _cache(lambda x: calls.append(x) or x)
assert (cached(1), cached(1), cached(2), calls) == (1, 1, 2, [1, 2])
assert _executing_eagerly() and not _make_subgraph(_executing_eagerly)()
try:
    from horovod.tensorflow import elastic
except ImportError as error:
    assert "horovod.torch.elastic" in str(error), error
else:
    raise AssertionError
hvd.init()
assert hvd.size() == 1 and float(hvd.allreduce(tf.constant(2.0))) == 2.0
print("good")
"""


@needs_tensorflow
def test_operations():
    out = job("operations_job", 2)
    assert out.count("all good on rank") == 2


@needs_tensorflow
def test_training(tmp_path):
    out = job("training_job", 2, str(tmp_path))
    assert out.count("all good on rank") == 2


DIES = """
import os, signal, sys, time
import tensorflow as tf
import farandole.horovod.tensorflow as hvd

hvd.init()

@tf.function
def step(x):
    return hvd.allreduce(x)

step(tf.ones(3))
if hvd.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
try:
    step(tf.ones(3))
except tf.errors.UnknownError as error:
    assert "HorovodInternalError" in str(error), error
    print("reported", "rank 1" in str(error), time.monotonic() - began < 10, flush=True)
os._exit(0)
"""


@needs_tensorflow
def test_the_death_of_a_rank_is_reported_within_a_function(tmp_path):
    script = write(tmp_path, DIES)
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    ranks = [start([sys.executable, script], RANK=str(rank), **common) for rank in range(2)]
    (status, out, err), (killed, _, _) = [finish(rank) for rank in ranks]
    assert killed == -signal.SIGKILL
    assert (status, out) == (0, "reported True True\n"), err


@needs_tensorflow
def test_the_shim_and_one_process(tmp_path):
    status, out, err = run(["env", sys.executable, "-m", "farandole.horovod.shim", write(tmp_path, SCRIPT)])
    assert (status, out) == (0, "good\n"), err


@needs_tensorflow
def test_the_lab_learns_digits():
    pytest.importorskip(
        "sklearn", reason="labs/horovod_digits_keras.py needs scikit-learn: pip install '.[labs]'"
    )
    status, out, err = run(
        ours("-n", "2", "-m", "farandole.horovod.shim", LAB, "--epochs", "2"), fork_ranks=True
    )
    assert status == 0, err
    accuracy = float(re.findall(r"test accuracy (\S+)", out)[-1])
    assert accuracy > 0.85, out


def test_without_tensorflow_the_extra_is_named():
    program = """
import sys
sys.modules["tensorflow"] = None
for name in ("tensorflow", "tensorflow.keras", "keras", "keras.callbacks"):
    try:
        __import__(f"farandole.horovod.{name}")
    except ImportError as error:
        assert "pip install 'farandole[tensorflow]'" in str(error), error
    else:
        raise AssertionError(name)
"""
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
