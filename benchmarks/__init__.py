"""Benchmarks that compare farandole with other packages; most print a table and write JSON and a picture."""
