"""Benchmarks, each against a stated peer or limit: `nox -s bench -- NAME`."""
