"""Train on Verifiers environments with SGLang, Megatron-core and Ray, on a frozen GPU image or on any CPU."""

__version__ = "0.1.0"
