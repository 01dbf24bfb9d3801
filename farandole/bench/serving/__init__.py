"""Benchmark servers with an OpenAI-compatible API, and predict the speed of a server."""
