"""Differentially private training that measures and removes the bias of clipping."""
