"""Is the Megatron model the Hugging Face model? Logits of both on the same tokens."""

from __future__ import annotations

import torch
import transformers

from miles_verifiers.training.megatron.model import Policy

PROMPT_TOKENS = 96


def fixed_prompt(vocab_size: int, length: int = PROMPT_TOKENS) -> list[int]:
    """The same ids on every machine, spread over the whole vocabulary: an error in any row of the embedding can show."""
    return [(index * 7919 + 104729) % vocab_size for index in range(length)]


@torch.no_grad()
def max_logit_difference(policy: Policy) -> float:
    """Largest |Megatron - transformers| over all logits of the fixed prompt, in float32; one process, no parallelism.

    NaN where either has a NaN.
    """
    vocab_size = policy.geometry.vocab_size
    prompt = fixed_prompt(vocab_size)
    ours = policy.logits([prompt])[:, :vocab_size].float()
    transformers.utils.logging.disable_progress_bar()
    reference = transformers.AutoModelForCausalLM.from_pretrained(str(policy.hf.path), local_files_only=True)
    theirs = reference.float().eval()(torch.tensor([prompt])).logits[0]
    return float((ours - theirs).abs().max())
