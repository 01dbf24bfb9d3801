"""Checks of all CUDA code paths on a machine with one NVIDIA GPU: `make gpu`, or `python -m benchmarks.gpu`."""
