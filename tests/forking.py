"""Fork processes from a server that has already loaded torch, because importing torch takes seconds."""

from __future__ import annotations

import importlib.util
import multiprocessing as mp

# installed only where its own tests run; importing it takes six seconds
TENSORFLOW = ["tensorflow", "keras"] if importlib.util.find_spec("tensorflow") else []

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "tests.uncollected",
        "torch",
        "torch.distributed",
        "farandole.parallel.checkpoint.storage",
        "torch.nn.parallel",
        "torch._dynamo",
        "farandole.comm.backend.groups",
        "farandole.parallel.parallelize",
        "farandole.launch.agent",
        "farandole.train.run",
        "farandole.serve.http.start",
        "matplotlib.pyplot",
        "hypothesis",
        "pytest",
        "tests.forked_python",
        "tests.comm.jobs",
        "tests.pool",
        "transformers.modeling_utils",  # after tests.pool, which prepares the import of torchvision
        "peft",
        *TENSORFLOW,
        "tests.frozen",
    ]
)
