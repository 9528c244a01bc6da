"""Hyper-parameters by random search: what is asked, the trials, and the cost in privacy."""
