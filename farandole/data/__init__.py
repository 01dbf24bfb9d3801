"""Data: text from files to samples of tokens, the same on every rank."""
