"""Benchmarks against peers: each program prints a table, and writes JSON and a picture."""
