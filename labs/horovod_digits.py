"""Train a network on handwritten digits with Horovod; farandole runs this Horovod script unchanged.

    farandole launch -n 2 -m farandole.horovod.shim labs/horovod_digits.py
    torchrun --nproc-per-node 2 -m farandole.horovod.shim labs/horovod_digits.py
    mpirun -n 2 python -m farandole.horovod.shim labs/horovod_digits.py --fp16-allreduce

The data set is included in scikit-learn (pip install scikit-learn) and contains 1797 images of 8 x 8 pixels.
"""

from __future__ import annotations

import argparse
import time

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    """A network with two convolutions, batch normalization over all ranks, and two dense layers."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            hvd.SyncBatchNorm(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classify = nn.Sequential(nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images):
        """Map images (N, 1, 8, 8) to logits (N, 10)."""
        return self.classify(self.features(images).flatten(1))


def digits():
    """Return the training and test sets: images (N, 1, 8, 8) with values from 0 to 1, and labels."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target)
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), TensorDataset(images[test], labels[test])


def average(value, name):
    """Return the mean of `value` over all ranks."""
    return hvd.allreduce(torch.tensor(float(value)), name=name).item()


def train(args, model, optimizer, loader, epoch):
    """Train for one epoch with a warm-up of the learning rate; return the last loss, averaged over ranks."""
    model.train()
    for index, (images, labels) in enumerate(loader):
        progress = epoch + (index + 1) / len(loader)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 + (hvd.size() - 1) * min(1.0, progress / args.warmup_epochs))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return average(loss.item(), "loss")


@torch.no_grad()
def evaluate(model, loader):
    """Return the accuracy on the test set; each rank evaluates a part of this set."""
    model.eval()
    correct = torch.zeros(2)
    for images, labels in loader:
        correct += torch.tensor([(model(images).argmax(1) == labels).sum(), len(labels)])
    correct = hvd.allreduce(correct, name="accuracy", op=hvd.Sum)
    return (correct[0] / correct[1]).item()


def main():
    """Train the network, and print the loss and accuracy after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="batch size per rank")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate per rank")
    parser.add_argument("--warmup-epochs", type=float, default=1.0)
    parser.add_argument("--fp16-allreduce", action="store_true")
    parser.add_argument("--use-adasum", action="store_true")
    parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
    args = parser.parse_args()

    hvd.init()
    torch.manual_seed(42)
    training, test = digits()
    sampler = DistributedSampler(training, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(training, batch_size=args.batch_size, sampler=sampler)
    test_part = torch.utils.data.Subset(test, range(hvd.rank(), len(test), hvd.size()))

    model = Net()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        began = time.perf_counter()
        loss = train(args, model, optimizer, loader, epoch)
        rate = len(sampler) * hvd.size() / (time.perf_counter() - began)
        accuracy = evaluate(model, DataLoader(test_part, batch_size=256))
        if hvd.rank() == 0:
            print(
                f"epoch {epoch}: loss {loss:.4f}, test accuracy {accuracy:.4f}, {rate:.0f} images/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
