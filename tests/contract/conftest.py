"""Contract tests run in an environment's interpreter: real renderers, real Verifiers, real SGLang sources, a fake engine."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from miles_verifiers.rollout import interpreter
from miles_verifiers.rollout.interpreter import SUPPORTED

interpreter.go_offline()
sys.path.insert(0, str(Path(__file__).parent))  # contract_env.py is found as an installed environment would be


# What these run is not in Verifiers 0.2.
collect_ignore = ["test_public_envs_v03.py"] if SUPPORTED[version("verifiers")] == "episodes" else []

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def make_model_folder(folder: Path, *, model_type: str, template: str = CHATML) -> Path:
    """A checkpoint folder without weights: one token per byte, and Qwen3's special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 320}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "chat_template": template,
                "model_max_length": 32768,
            }
        )
    )
    return folder


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "qwen3", model_type="qwen3")


@pytest.fixture(scope="session")
def unknown_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama by its config, whose template is not Llama 3's, as SmolLM2."""
    return make_model_folder(tmp_path_factory.mktemp("models") / "unknown", model_type="llama")


@pytest.fixture(autouse=True)
def _lock_of_this_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """renderers holds one asyncio lock per process (client.py, 0.1.8 to 0.1.12), which takes the first loop that waits for it
    for the only one. A rollout worker has one loop, these tests have one each."""
    import asyncio

    import renderers.client

    (name,) = (name for name, value in vars(renderers.client).items() if isinstance(value, asyncio.Lock))
    monkeypatch.setattr(renderers.client, name, asyncio.Lock())


def pytest_configure(config: pytest.Config) -> None:
    # SWIG types of sentencepiece, which transformers imports, warn when they are made, some as late as the interpreter's
    # end. A warning that is an error leaves them unmade, and the interpreter dies of a segmentation fault (Python 3.11).
    # Verifiers 0.2.1 passes tenacity a parameter that tenacity 9.2 renamed (verifiers/v1/retries.py).
    config.addinivalue_line("filterwarnings", "ignore:The 'initial' parameter is deprecated:DeprecationWarning")
    # textarena 0.7.4 writes backslashes into its games' boards; a DeprecationWarning before Python 3.12, then a SyntaxWarning.
    config.addinivalue_line("filterwarnings", "ignore:invalid escape sequence")
    config.addinivalue_line("filterwarnings", "ignore:builtin type .* has no __module__ attribute:DeprecationWarning")
