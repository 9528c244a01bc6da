"""Extends mkdocs for the documentation's site: source pages, the command line."""
