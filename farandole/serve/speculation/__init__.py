"""Speculative decoding: tokens are proposed cheaply, and the model verifies several proposed tokens in one step."""
