"""Memory of activations: what a backward pass keeps, recomputed or moved out of the way."""
