"""Verifiers episodes to traces to samples. The only room that imports verifiers."""
