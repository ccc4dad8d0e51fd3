"""`tiny:qwen3`: a random two-layer Qwen3 with its own byte-level tokenizer. Small enough for tests, whole enough for every
part: ChatML special tokens, chat template, generation config, safetensors. The same files on every machine.

`python -P -m miles_verifiers.provision.models.tiny FOLDER` makes it, in the stack's interpreter but without torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from miles_verifiers.system import process

SEED = 20240613
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 2, 4, 2, 16
CONTEXT = 2048
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Qwen3's markup, one id each, but no special tokens: they stay in decoded text."""
PAIRS = (
    "Ġ Ġ|Ġ t|Ġ a|Ġ s|Ġ w|Ġ o|Ġ c|Ġ b|Ġ f|Ġ p|Ġ m|Ġ d|Ġ h|Ġ n|Ġ i|Ġ =|h e|i n|r e|o n|e r|a t|e n|o r|i s|e s|i t|a n|a l|o u|"
    "t i|n d|t h|e d|l l|s t|a r|i c|a s|l e|r i|n t|p r|c o|d e|i f|s e|l o|u t|( )|( '|' )|) :|+ +|= ="
)
"""Merges of the tokenizer. With them a text has several encodings, as with every real tokenizer: sampled ids that are decoded
and encoded again become others."""
VOCAB = 256 + len(PAIRS.split("|")) + len(SPECIAL) + len(PLAIN)
"""320. Every id is a token, whatever is sampled."""
TIMEOUT_S = 120.0

# The split of Qwen2 and Qwen3 (pre_tokenizer of their tokenizer.json).
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


def make(folder: Path, *, stack_python: Path) -> dict[str, Any]:
    """Fill `folder` by a child in the stack's interpreter, which has numpy, safetensors and tokenizers."""
    command: list[str | Path] = [stack_python, "-P", "-m", "miles_verifiers.provision.models.tiny", folder]
    process.run(command, what="making the tiny model", timeout=TIMEOUT_S)
    return {"seed": SEED}


def write(folder: Path) -> None:
    """Write the whole model into `folder`."""
    from safetensors.numpy import save_file

    ids = _write_tokenizer(folder)
    stop, pad = ids["<|im_end|>"], ids["<|endoftext|>"]
    _write_json(folder / "config.json", _config(stop, pad))
    _write_json(folder / "generation_config.json", {"do_sample": True, "eos_token_id": stop, "pad_token_id": pad})
    save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})


def _config(stop: int, pad: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "float32",
        "eos_token_id": stop,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": CONTEXT,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": pad,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": VOCAB,
    }


def _write_tokenizer(folder: Path) -> dict[str, int]:
    """Byte-level BPE: any text can be encoded, any ids decoded. Returns the ids of added tokens."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, right in (pair.split(" ") for pair in PAIRS.split("|"))]
    tokens = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    settings = {
        "add_bos_token": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": CONTEXT,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    _write_json(folder / "tokenizer_config.json", settings)
    return {token: tokenizer.token_to_id(token) for token in (*SPECIAL, *PLAIN)}


def _weights() -> dict[str, Any]:
    """Names and shapes of transformers' Qwen3ForCausalLM.

    An untrained model's weights would be a poor test: all its logits are nearly equal, or each token just repeats itself,
    and a comparison of greedy tokens passes whatever the arithmetic. These scales give some 20 different greedy tokens out
    of 24, an entropy between one and two nats, and no ties: sharp attention (q_norm, k_norm), and a last norm of mixed
    signs, which takes the tied embedding's preference for its own token away.
    """
    import numpy as np

    random = np.random.default_rng(SEED)

    def matrix(*shape: int) -> Any:
        return (random.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)

    def norm(size: int, around: float = 1.0) -> Any:
        return (around * (1.0 + 0.1 * random.standard_normal(size))).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN) * np.float32(4.0),
        "model.norm.weight": random.standard_normal(HIDDEN).astype(np.float32),
    }
    for i in range(LAYERS):
        layer = {
            "input_layernorm": norm(HIDDEN),
            "self_attn.q_proj": matrix(HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": matrix(HIDDEN, HEADS * HEAD_DIM),
            "self_attn.q_norm": norm(HEAD_DIM, 2.0),
            "self_attn.k_norm": norm(HEAD_DIM, 2.0),
            "post_attention_layernorm": norm(HIDDEN),
            "mlp.gate_proj": matrix(INTERMEDIATE, HIDDEN),
            "mlp.up_proj": matrix(INTERMEDIATE, HIDDEN),
            "mlp.down_proj": matrix(HIDDEN, INTERMEDIATE),
        }
        weights |= {f"model.layers.{i}.{name}.weight": value for name, value in layer.items()}
    return weights


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def main() -> None:
    write(Path(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(process.main_of_child(main))
