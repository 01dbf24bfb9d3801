"""Read the fields of a configuration one by one, so that no field is silently ignored."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

from farandole._troubleshooting import Documented, see

_MISSING = object()

NEUTRAL = frozenset(
    {
        # metadata about files and programs
        "_name_or_path",
        "_commit_hash",
        "architectures",
        "auto_map",
        "dtype",
        "model_type",
        "name_or_path",
        "torch_dtype",
        "transformers_version",
        # token IDs, and model usage
        "bos_token_id",
        "cls_token_id",
        "decoder_start_token_id",
        "eos_token_id",
        "mask_token_id",
        "output_past",
        "pad_token_id",
        "sep_token_id",
        "task_specific_params",
        "tokenizer_class",
        "use_cache",
        # initialization, training, and other heads
        "classifier_dropout",
        "gradient_checkpointing",
        "id2label",
        "initializer_factor",
        "initializer_range",
        "label2id",
        "num_labels",
        "problem_type",
        # implementation choices in transformers that do not change results
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_experts_implementation",
        "attn_implementation",
        "chunk_size_feed_forward",
        "output_attentions",
        "output_hidden_states",
        "pretraining_tp",
        "return_dict",
        "return_dict_in_generate",
        "torchscript",
        "use_bfloat16",
        "use_return_dict",
        # generation settings in folders that predate generation_config.json
        "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "n_ctx",
        "prefix",
        "remove_invalid_values",
        "repetition_penalty",
        "suppress_tokens",
        "temperature",
        "tf_legacy_loss",
        "top_k",
        "top_p",
        "typical_p",
    }
)
"""Fields that do not affect a model's results."""

INACTIVE: Mapping[str, Any] = {
    "add_cross_attention": False,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
}
"""Fields that do not affect a model's results if they have these values."""


class FolderError(Documented, ValueError):
    """Raised if a folder cannot be read as a model: a file is missing or damaged, or a feature is not supported."""

    _section = "foldererror"


class Fields:
    """The fields of a configuration.  `finish` rejects fields that were not read.

    Args:
        values: the fields, by name.
        where: the file name that error messages show.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where
        self._read: set[str] = set()

    def take(self, name: str, default: Any = _MISSING, *, kind: type | tuple[type, ...] | None = None) -> Any:
        """Return the value of the field `name`, or `default` if the field is missing or null.

        Raises:
            FolderError: if the field is missing and has no default, or if the value does not have type `kind`.
        """
        self._read.add(name)
        value = self.values.get(name)
        if value is None:
            if default is _MISSING:
                raise FolderError(
                    f"{self.where} has no field {name!r}, which the model requires; download the file again"
                )
            return default
        expected = (int, float) if kind is float else kind
        wrong = isinstance(value, bool) and kind is not bool
        if expected is not None and (wrong or not isinstance(value, expected)):
            raise FolderError(
                f"{self.where} has {name}={value!r}: expected {getattr(kind, '__name__', kind)}"
            )
        return value

    def size(self, name: str, default: Any = _MISSING) -> int:
        """Return a field that must be an integer of at least 1.

        Raises:
            FolderError: if the field has another value.
        """
        value: int = self.take(name, default, kind=int)
        if value is not None and value < 1:
            raise FolderError(f"{self.where} has {name}={value}: expected at least 1")
        return value

    def positive(self, name: str, default: Any = _MISSING) -> float:
        """Return a field that must be a finite number above 0.

        Raises:
            FolderError: if the field has another value.
        """
        value = float(self.take(name, default, kind=float))
        if not 0 < value < math.inf:
            raise FolderError(f"{self.where} has {name}={value}: expected a finite number above 0")
        return value

    def probability(self, name: str, default: float) -> float:
        """Return a field that must be at least 0 and below 1.

        Raises:
            FolderError: if the field has another value.
        """
        value = float(self.take(name, default, kind=float))
        if not 0 <= value < 1:
            raise FolderError(f"{self.where} has {name}={value}: expected at least 0 and below 1")
        return value

    def one_of(self, name: str, *supported: Any) -> Any:
        """Return a field that must have one of the `supported` values.  The first value is the default.

        Raises:
            FolderError: if the field has another value.
        """
        value = self.take(name, supported[0])
        if value not in supported:
            near = difflib.get_close_matches(str(value), [str(each) for each in supported], 1)
            hint = f"; nearest: {near[0]}" if near else ""
            listed = ", ".join(repr(each) for each in dict.fromkeys(supported))
            raise FolderError(
                f"{self.where} has {name}={value!r}, which is not supported (supported: {listed}{hint})"
            )
        return value

    def skip(self, *names: str) -> None:
        """Ignore the fields `names`, so that `finish` does not reject them."""
        self._read.update(names)

    def finish(self) -> None:
        """Raise FolderError if a field that affects results was not read."""
        unread = {
            name: value
            for name, value in self.values.items()
            if name not in self._read
            and name not in NEUTRAL
            and value is not None
            and not _is_inactive(name, value)
        }
        if unread:
            listed = ", ".join(f"{name}={value!r}" for name, value in sorted(unread.items()))
            raise FolderError(
                f"{self.where} has unsupported fields: {listed}; use a model without these features{see('has-unsupported-fields')}"
            )


def _is_inactive(name: str, value: Any) -> bool:
    return name in INACTIVE and bool(value == INACTIVE[name])
