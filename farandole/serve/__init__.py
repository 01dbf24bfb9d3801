"""Serve language models: requests can join or leave the running batch at every step."""
