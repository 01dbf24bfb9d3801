"""Checks of every CUDA path on a machine with one NVIDIA GPU: `make gpu`, or `python -m benchmarks.gpu`."""
