"""Models that are made in the stack's interpreter: GGUF files and the tiny Qwen3."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles_verifiers.errors import ModelError
from miles_verifiers.provision.models import gguf as model_gguf
from miles_verifiers.provision.models.sources import check_model_folder, ensure_model, parse_source

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, LAYERS = 32, 64, 4, 2, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "h e"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
NORMAL, CONTROL = 1, 3


def tokens() -> list[str]:
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def write_gguf(path: Path, *, pre: str = "smollm", eos: int = 2) -> dict[str, np.ndarray]:
    """A llama as llama.cpp's converter writes SmolLM2: tied embeddings, gpt2 vocabulary. Returns its tensors."""
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens()))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens())
    writer.add_token_types([CONTROL] * len(SPECIAL) + [NORMAL] * (len(tokens()) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(eos)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(0)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd": (len(tokens()), HIDDEN), "output_norm": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (HIDDEN,),
            f"blk.{i}.ffn_norm": (HIDDEN,),
            f"blk.{i}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k": (kv, HIDDEN),
            f"blk.{i}.attn_v": (kv, HIDDEN),
            f"blk.{i}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_gate": (INTERMEDIATE, HIDDEN),
            f"blk.{i}.ffn_up": (INTERMEDIATE, HIDDEN),
            f"blk.{i}.ffn_down": (HIDDEN, INTERMEDIATE),
        }
    tensors = {f"{name}.weight": random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    folder = tmp_path_factory.mktemp("converted")
    file = tmp_path_factory.mktemp("gguf") / "model.gguf"
    tensors = write_gguf(file)
    model_gguf.convert(file, folder)
    return folder, tensors


def test_a_gguf_file_becomes_a_checked_folder(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, tensors = converted
    facts = check_model_folder(folder)
    assert (facts.model_type, facts.vocab_size, facts.max_position_embeddings) == ("llama", len(tokens()), 128)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (2, 2)
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for ours, theirs in {
        "model.embed_tokens": "token_embd",
        "model.layers.1.mlp.down_proj": "blk.1.ffn_down",
        "model.layers.0.self_attn.v_proj": "blk.0.attn_v",
    }.items():
        assert state[f"{ours}.weight"].dtype == torch.float32
        np.testing.assert_array_equal(state[f"{ours}.weight"].numpy(), tensors[f"{theirs}.weight"])
    assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])


def test_the_tokenizer_splits_digits_as_smollm_does(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    ids = {token: i for i, token in enumerate(tokens())}
    # Two blanks before a digit are one token: the digit is split off first, so they are not "blank, blank + digit".
    assert tokenizer.encode("he  5") == [ids["he"], ids["ĠĠ"], ids["5"]]
    assert tokenizer.encode("<|im_end|>") == [2]
    # Negative control: the splitting that the converter gives by itself.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert tokenizer.encode("he  5") == [ids["he"], ids["Ġ"], ids["Ġ"], ids["5"]]


def test_a_folder_that_differs_from_the_model_is_refused(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    folder, _ = converted
    model = AutoModelForCausalLM.from_pretrained(folder)
    model_gguf.check_folder(folder, model)
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-3
    with pytest.raises(ModelError, match=r"not right: model\.norm\.weight"):
        model_gguf.check_folder(folder, model)


def test_a_wrong_end_of_text_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", eos=0)
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelError, match=r"eos is 0 and 0, <\|im_end\|> is 2"):
        model_gguf.convert(tmp_path / "model.gguf", tmp_path / "out")


def test_an_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", pre="llama-bpe")
    with pytest.raises(ModelError, match="not known to be exact"):
        model_gguf.convert(tmp_path / "model.gguf", tmp_path)


def test_an_error_of_the_conversion_crosses_the_process(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", pre="llama-bpe")
    command = [sys.executable, "-P", "-m", "miles_verifiers.provision.models.gguf", tmp_path / "model.gguf", tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == ModelError.exit_code
    assert "not known to be exact" in ended.stdout


def test_the_tiny_model_is_made_whole_and_the_same_every_time(tmp_path: Path) -> None:
    source = parse_source("tiny:qwen3")
    folders = [ensure_model(source, cache=tmp_path / name, stack_python=Path(sys.executable)) for name in ("a", "b")]
    records = [json.loads((folder / "source.json").read_text()) for folder in folders]
    assert records[0] == records[1]
    assert check_model_folder(folders[0]).model_type == "qwen3"
    _, report = AutoModelForCausalLM.from_pretrained(folders[0], output_loading_info=True)
    assert not any(report.values()), report


def test_the_tiny_tokenizer_is_exact(tmp_path: Path) -> None:
    folder = ensure_model(parse_source("tiny:qwen3"), cache=tmp_path, stack_python=Path(sys.executable))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert model_gguf.tokenizer_problems(tokenizer, generation) == []
    assert model_gguf.tokenizer_problems(tokenizer, generation | {"eos_token_id": 0}) != []
    for text in ("Grüße, 世界! 🙂", "<think>\n12 x  3</think>", "\r\n\t "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("<tool_call>")) == 1
