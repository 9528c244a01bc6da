"""What the command line is made of; the library below does not import it."""
