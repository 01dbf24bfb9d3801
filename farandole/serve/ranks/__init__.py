"""Several ranks compute one generation engine's steps (tensor parallelism), and several engines share a job (replicas).

driver.py    rank 0 schedules, and the other ranks compute with it
shards.py    reads each rank's shards of a model
replicas.py  reads the replicas of a model
offline.py   the ranks of `farandole.LLM`
"""
