"""Pipeline parallelism: schedules as data, a simulator that draws them, and a runtime that executes them."""
