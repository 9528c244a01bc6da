"""Comparisons and studies: many runs, and what they say together."""
