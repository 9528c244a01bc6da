"""One file per kind of layer: its rule, its maths and its kernel."""
