"""The checks, one module per area."""
