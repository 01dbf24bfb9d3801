"""Pipeline parallelism: schedules as data, tools that simulate and draw schedules, and a runtime."""
