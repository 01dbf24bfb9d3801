"""Speculative decoding: tokens are proposed cheaply, and the model verifies several of them in one step.

speculator.py  decides how many tokens to propose for each sequence
ngrams.py      proposes tokens from a sequence's own tokens
draft.py       proposes tokens with a draft model
"""
