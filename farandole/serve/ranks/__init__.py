"""Serve a model with several ranks.

Tensor parallelism computes the steps of one generation engine on several ranks.  Replicas are several engines in one
job.

driver.py    sends each step of an engine from the driver to the other ranks
shards.py    reads each rank's shards of a model
replicas.py  assigns ranks to replicas, and reads each rank's shards of a replica
offline.py   provides the ranks of `farandole.LLM`
errors.py    defines the error that is raised if a rank fails
"""
