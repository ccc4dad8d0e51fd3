"""Verifiers 0.3 and newer: environments that score in `finalize`; the engine is reached through a gateway."""
