"""The benchmark of collectives and point-to-point messages, with all installed backends in one run."""
