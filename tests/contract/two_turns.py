"""The harness of contract_env under an id of its own: Verifiers wants one plugin per module."""

from contract_env import TwoTurns

__all__ = ["TwoTurns"]
