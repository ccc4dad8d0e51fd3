"""Verifiers 0.2.x: episodes and group rewards; the engine is reached in process."""
