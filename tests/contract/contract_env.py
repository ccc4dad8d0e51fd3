"""The contract tests' environment under one id, for the API of whichever Verifiers is installed."""

from importlib.metadata import version

from miles_verifiers.rollout.interpreter import SUPPORTED

if SUPPORTED[version("verifiers")] == "episodes":
    from contract_env_v02 import ContractTaskset

    __all__ = ["ContractTaskset"]
else:
    from contract_env_v03 import ContractEnv, ContractTaskset

    __all__ = ["ContractEnv", "ContractTaskset"]
