"""Megatron-core: model, weight mapping, checkpoints, optimizer, step. The only room that imports megatron."""
