"""Everything a run needs before it starts: interpreters, venvs, the environment's package, the model, preflight."""
