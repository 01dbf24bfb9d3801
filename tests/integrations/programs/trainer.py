"""Train a model with the Hugging Face Trainer."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32))
tokens = [torch.randint(64, (16,)) for _ in range(32)]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=2,
        report_to=[],
        save_strategy="no",
        seed=0,
    )
    samples = [{"input_ids": each, "labels": each} for each in tokens]
    loss = Trainer(model, arguments, train_dataset=samples).train().training_loss
if torch.distributed.get_rank() == 0:
    print(torch.distributed.get_backend(), [loss])
