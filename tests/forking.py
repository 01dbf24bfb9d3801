"""Fork processes from a server that has already loaded torch, because importing torch takes seconds."""

from __future__ import annotations

import multiprocessing as mp

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "farandole.parallel.checkpoint.storage",
        "torch.nn.parallel",
        "torch._dynamo",
        "farandole.comm.backend.groups",
        "farandole.parallel.parallelize",
        "farandole.launch.agent",
        "farandole.train.run",
        "matplotlib.pyplot",
        "tests.forked_python",
        "tests.comm.jobs",
        "tests.pool",
        "tests.frozen",
    ]
)
