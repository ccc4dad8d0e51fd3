"""Megatron-core: model, weight mapping, checkpoints, optimizer, step. The only room that imports megatron."""

import warnings

with warnings.catch_warnings():
    # At import, megatron-core warns that Apex and Transformer Engine are absent; without a GPU they should be.
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
