"""What makes the documentation's site beside mkdocs: maths, source pages, the command line."""
