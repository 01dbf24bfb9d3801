"""Benchmarks for training, collectives and serving; `farandole tune`; and the planner's measurements."""
