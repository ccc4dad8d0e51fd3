"""`python -P -m miles_verifiers.provision.models.gguf FILE FOLDER`: a GGUF checkpoint as a Hugging Face folder, in float32.

Runs in the stack's interpreter. transformers (5.19) reads GGUF but refuses to save what it read, because it keeps a
quantization_config (GgufHfQuantizer.is_serializable), and it does not look at the file's pre-tokenizer; both are mended
here. Quantized weights (the file may be Q4) are expanded, not restored: the folder holds what the file means.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from miles_verifiers.errors import ModelError
from miles_verifiers.system import process, progress

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_STEPS = 5


def convert(gguf: Path, folder: Path) -> None:
    """Fill `folder` with config, generation_config, tokenizer, chat template and model.safetensors.

    Raises ModelError for an architecture or a pre-tokenizer that is not supported, and where the result is not right.
    """
    _report("reading", 0)
    metadata = read_metadata(gguf)
    check_metadata(metadata, gguf)
    _report("converting the tokenizer", 1)
    tokenizer = _load_tokenizer(gguf, metadata)
    tokenizer.save_pretrained(folder)
    _report("expanding the weights", 2)
    model = _load_model(gguf)
    _save_configs(model, tokenizer, folder)
    _report("writing the weights", 3)
    _save_weights(model, folder)
    _report("checking the result", 4)
    check_folder(folder, model)
    _report("done", _STEPS)


def read_metadata(gguf: Path) -> dict[str, Any]:
    """Architecture and tokenizer keys of the file; names as in the GGUF specification."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    wanted = ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.chat_template")
    return {name: fields[name].contents() for name in wanted if name in fields}


def check_metadata(metadata: dict[str, Any], gguf: Path) -> None:
    """Raises ModelError where the file holds what would silently become a wrong model."""
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ModelError(
            f"{gguf.name} holds a model of architecture {architecture!r}",
            where=str(gguf),
            next_step=f"take one of: {', '.join(_ARCHITECTURES)}",
        )
    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if kind not in (("gpt2", "smollm"), ("gpt2", "qwen2")):
        raise ModelError(
            f"{gguf.name} has a tokenizer of kind {kind}, whose conversion is not known to be exact",
            where=str(gguf),
            next_step="take the model as safetensors instead: hf:ORG/NAME or path:DIR",
        )
    if not metadata.get("tokenizer.chat_template"):
        raise ModelError(
            f"{gguf.name} has no chat template", where=str(gguf), next_step="take an instruction-tuned model"
        )


def _load_tokenizer(gguf: Path, metadata: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    if metadata["tokenizer.ggml.pre"] == "smollm":
        from tokenizers import pre_tokenizers

        # The converter gives every gpt2 vocabulary of a llama the same ByteLevel (transformers/integrations/ggml.py, 5.19).
        # SmolLM first splits off each digit: without that, white space before a number becomes other ids.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


def _load_model(gguf: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)


def _save_configs(model: Any, tokenizer: Any, folder: Path) -> None:
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [_ARCHITECTURES[config.model_type]]
    config.save_pretrained(folder)
    generation = model.generation_config
    generation.eos_token_id = tokenizer.eos_token_id
    generation.pad_token_id = tokenizer.pad_token_id
    generation.save_pretrained(folder)


def _save_weights(model: Any, folder: Path) -> None:
    from safetensors.torch import save_file

    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def check_folder(folder: Path, model: Any) -> None:
    """Load the folder as its users will; raise ModelError where it is not the model that was written."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    problems = tokenizer_problems(
        tokenizer, json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    )
    loaded, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    problems += [f"{kind}: {sorted(names)}" for kind, names in report.items() if names]
    before, after = model.state_dict(), loaded.state_dict()
    problems += [name for name in before if name not in after or not torch.equal(before[name], after[name])]
    if problems:
        raise ModelError(f"the converted model is not right: {'; '.join(problems)}", where=str(folder))


def tokenizer_problems(tokenizer: Any, generation: dict[str, Any]) -> list[str]:
    """What is wrong with special tokens, end of text or chat template; empty where all is right."""
    problems = []
    ends_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    if tokenizer.eos_token_id != ends_turn or generation.get("eos_token_id") != ends_turn:
        problems.append(
            f"eos is {tokenizer.eos_token_id} and {generation.get('eos_token_id')}, <|im_end|> is {ends_turn}"
        )
    for token in sorted({*tokenizer.all_special_tokens, "<|im_start|>", "<|im_end|>"}):
        ids = tokenizer.encode(token, add_special_tokens=False)
        if len(ids) != 1:
            problems.append(f"{token} is encoded as {ids}")
    messages = [{"role": "user", "content": "Is 12 x  3 = 36?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if messages[0]["content"] not in text:
        problems.append("the chat template leaves out the message")
    if tokenizer.decode(tokenizer.encode(text)) != text:
        problems.append("a rendered conversation does not survive encoding and decoding")
    return problems


def _report(text: str, done: int) -> None:
    progress.report(f"converting the model: {text}", done, _STEPS)


def main() -> None:
    gguf, folder = (Path(argument) for argument in sys.argv[1:])
    convert(gguf, folder)


if __name__ == "__main__":
    sys.exit(process.main_of_child(main))
