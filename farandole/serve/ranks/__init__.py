"""Compute the steps of a generation engine on several ranks (tensor parallelism), and run several engines in one job (replicas).

driver.py    rank 0 schedules, and the other ranks compute with it
shards.py    reads each rank's shards of a model
replicas.py  reads the replicas of a model
offline.py   the ranks of `farandole.LLM`
"""
