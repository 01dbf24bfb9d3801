"""The checks, with one module per area."""
