"""The benchmark commands: training, collectives, tuning and the measurements of the planner."""
