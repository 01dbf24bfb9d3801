"""A tokenizer like that of Llama 2."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers


@cache
def sentencepiece() -> Tokenizer:
    """Return a tokenizer that adds a space before a text, and encodes characters outside its vocabulary as bytes."""
    special = ["<unk>", "<s>", "</s>"]
    words = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "▁a", "▁b", "▁c"]
    vocabulary = {word: number for number, word in enumerate(words)}
    merges = [("▁", letter) for letter in "abc"]
    found = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    found.add_special_tokens(special)
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return found
