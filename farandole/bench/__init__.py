"""Commands that measure: what training and collectives reach on this machine, with these ranks."""
