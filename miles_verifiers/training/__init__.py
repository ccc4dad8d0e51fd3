"""The training loop and its Ray actors."""
