"""Measurements side by side with peers: each program here prints a table and writes JSON and a picture."""
