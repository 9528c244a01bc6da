"""Comparisons of many runs with paired seeds."""
