"""What a model in training keeps, and where: recomputed, swapped, or in memory and on a disk."""
