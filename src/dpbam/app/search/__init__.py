"""Hyper-parameters by Optuna: what is asked, the trials, and what a search costs in privacy."""
