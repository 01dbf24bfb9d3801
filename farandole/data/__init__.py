"""Read text, tokenize it and sample windows of tokens, identically on every rank."""
