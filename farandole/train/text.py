"""The text of a run: what its configuration names, tokenized.  Imports no torch."""

from __future__ import annotations

from pathlib import Path

from farandole.data.cache import Progress
from farandole.data.text import Text, prepare_text
from farandole.train.config import TrainConfig


def open_text(config: TrainConfig, progress: Progress = lambda what, share: None) -> Text:
    """The text that a configuration names, tokenized.  Raises `DataError`."""
    return prepare_text(
        config.data.path,
        vocabulary=config.model.vocabulary,
        context=config.model.context,
        text_field=config.data.field,
        validation_share=config.data.validation_share,
        cache=Path(config.data.cache).expanduser() if config.data.cache else None,
        progress=progress,
    )
