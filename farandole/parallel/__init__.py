"""Parallelism: what splits a model or its data among ranks."""
