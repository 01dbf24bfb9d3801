"""Train a model in a loop with Accelerate."""

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
data = TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8))
for inputs, targets in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
losses = accelerator.gather(loss.detach())
assert gather_object([accelerator.process_index]) == [0, 1]
if accelerator.is_main_process:
    print(torch.distributed.get_backend(), losses.tolist())
accelerator.end_training()
