"""Extends mkdocs for the documentation's site: maths, source pages, the command line."""
