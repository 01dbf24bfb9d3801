"""The benchmark commands for training, collectives and tuning, and the planner's measurements."""
