"""Train a LightningModule with Lightning's Trainer."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    """A linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        """Return the loss on a batch."""
        loss = nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), 0.01)


torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(4, (64,)))
options = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, **options)
model = Classifier()
trainer.fit(model, DataLoader(data, batch_size=8))
if trainer.is_global_zero:
    print(
        torch.distributed.get_backend(), [trainer.callback_metrics["loss"].item(), *model.layer.bias.tolist()]
    )
