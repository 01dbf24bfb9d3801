"""Read text, tokenize it and sample token windows, identically on every rank."""
