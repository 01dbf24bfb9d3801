"""Serve a model with several ranks.

Tensor parallelism computes the steps of one generation engine on several ranks.  Replicas are several engines in one
job.
"""
