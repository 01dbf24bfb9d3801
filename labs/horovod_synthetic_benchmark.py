"""Measure the training speed on synthetic images, like the benchmark in Horovod's tutorials.

    farandole launch -n 2 -m farandole.horovod.shim labs/horovod_synthetic_benchmark.py
    torchrun --nproc-per-node 2 -m farandole.horovod.shim labs/horovod_synthetic_benchmark.py --model resnet18
    mpirun -n 2 python -m farandole.horovod.shim labs/horovod_synthetic_benchmark.py --fp16-allreduce

This script trains farandole's networks, but any module works.  `farandole bench training` runs this benchmark with
other engines, too.
"""

from __future__ import annotations

import argparse
import statistics
import time

import horovod.torch as hvd
import torch
import torch.nn.functional as F

from farandole.models.resnet import build_resnet, resnet_config


def arguments():
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50", help="resnet18, resnet34, resnet50, ...")
    parser.add_argument("--batch-size", type=int, default=32, help="batch size per rank")
    parser.add_argument("--image-size", type=int, default=224, help="image size in pixels")
    parser.add_argument("--num-warmup-batches", type=int, default=10)
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--fp16-allreduce", action="store_true", help="compress gradients to fp16")
    parser.add_argument("--use-adasum", action="store_true")
    return parser.parse_args()


def log(text):
    """Print `text` on rank 0."""
    if hvd.rank() == 0:
        print(text, flush=True)


def main():
    """Train repeatedly on one random batch, and print the training speed."""
    args = arguments()
    hvd.init()
    torch.manual_seed(hvd.rank())
    config = resnet_config(args.model)
    model = build_resnet(config)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01 * (1 if args.use_adasum else hvd.size())),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size)
    labels = torch.randint(config.classes, (args.batch_size,))

    def train(batches):
        for _ in range(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()

    log(f"Model: {args.model}")
    log(f"Batch size: {args.batch_size}")
    log(f"Number of ranks: {hvd.size()}")
    log("Running warmup...")
    train(args.num_warmup_batches)
    log("Running benchmark...")
    rates = []
    for number in range(args.num_iters):
        began = time.perf_counter()
        train(args.num_batches_per_iter)
        rates.append(args.batch_size * args.num_batches_per_iter / (time.perf_counter() - began))
        log(f"Iter #{number}: {rates[-1]:.1f} img/sec per rank")
    mean, spread = statistics.fmean(rates), 1.96 * statistics.pstdev(rates)
    log(f"Img/sec per rank: {mean:.1f} +-{spread:.1f}")
    log(f"Total img/sec on {hvd.size()} rank(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")


if __name__ == "__main__":
    main()
