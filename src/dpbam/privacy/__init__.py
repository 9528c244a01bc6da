"""What the guarantee is made of: plan, accounting, ledger, sampling, clipping, noise."""
