"""Our Megatron model is the Hugging Face model: logits, weights, packing. Each comparison is shown to be able to fail."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_verifiers.errors import ModelError
from miles_verifiers.training.megatron import devices, mapping, parallel
from miles_verifiers.training.megatron.cpu_modules import CpuRotaryEmbedding
from miles_verifiers.training.megatron.hf_folder import HFFolder
from miles_verifiers.training.megatron.model import Policy
from miles_verifiers.training.megatron.parity import max_logit_difference

ALL = ["qwen3-tied", "qwen3-untied", "llama-tied", "llama-untied", "qwen2-untied"]


@pytest.fixture(autouse=True)
def one_process():
    with parallel.alone():
        yield


def loaded(folder) -> Policy:
    policy = Policy(HFFolder(folder), dtype=torch.float32, device=devices.Cpu())
    policy.load_hf()
    return policy


@pytest.mark.parametrize("kind", ALL)
def test_logits_are_those_of_transformers_and_weights_come_back_bit_for_bit(tiny, kind):
    policy = loaded(tiny(kind))
    assert max_logit_difference(policy) < 1e-5
    original = load_file(tiny(kind) / "model.safetensors")
    exported = dict(policy.hf_tensors())
    assert set(exported) == set(original)
    assert all(torch.equal(exported[name], original[name]) for name in original)


def wrong_rope(policy):
    policy.model.rotary_pos_emb = CpuRotaryEmbedding(
        kv_channels=32, rotary_percent=1.0, rotary_base=1e5, use_cpu_initialization=True
    )


def no_query_norm(policy):
    for layer in policy.model.decoder.layers:
        layer.self_attention.q_layernorm = torch.nn.Identity()


@torch.no_grad()
def gate_and_up_swapped(policy):
    for layer in policy.model.decoder.layers:
        weight = layer.mlp.linear_fc1.weight
        weight.copy_(torch.cat(list(reversed(weight.chunk(2)))))


@torch.no_grad()
def one_weight_off(policy):
    policy.model.decoder.layers[1].self_attention.linear_qkv.weight[0, 0] += 1e-2


@pytest.mark.parametrize("damage", [wrong_rope, no_query_norm, gate_and_up_swapped, one_weight_off])
def test_the_comparison_of_logits_notices(tiny, damage):
    policy = loaded(tiny("qwen3-tied"))
    damage(policy)
    assert max_logit_difference(policy) > 1e-4


def test_packed_sequences_do_not_see_each_other(tiny):
    policy = loaded(tiny("qwen3-tied"))
    first, second = list(range(10, 40)), list(range(500, 517))
    with torch.no_grad():
        packed = policy.logits([first, second])
        apart = torch.cat([policy.logits([first]), policy.logits([second])])
        glued = policy.logits([first + second])
    assert (packed - apart).abs().max() < 1e-5
    assert (packed - glued).abs().max() > 1e-2, "one long sequence gives the same: the comparison cannot fail"


def test_selected_rows_are_rows_of_the_whole(tiny):
    policy = loaded(tiny("llama-untied"))
    tokens, rows = list(range(30)), torch.tensor([3, 7, 28])
    with torch.no_grad():
        selected, whole = policy.logits([tokens], rows), policy.logits([tokens])
    assert (selected - whole[rows]).abs().max() < 1e-6
    assert (selected - whole[rows - 1]).abs().max() > 1e-2


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_their_gradient(tiny, temperature):
    policy = loaded(tiny("qwen2-untied"))
    tokens = list(range(3, 33))
    rows, targets = torch.arange(29), torch.tensor(tokens[1:])

    def gradient(log_probs):
        policy.model.zero_grad()
        (log_probs * torch.arange(29)).sum().backward()
        return policy.parameters["embedding.word_embeddings.weight"].grad.clone()

    ours = policy.log_probs([tokens], rows, targets, temperature=temperature)
    plain = (policy.logits([tokens])[:-1, :1000] / temperature).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    assert (ours - plain).abs().max() < 1e-5
    assert torch.allclose(gradient(ours), gradient(plain), atol=1e-4, rtol=1e-4)
    other = policy.log_probs([tokens], rows, targets, temperature=1.3)
    assert (other - plain).abs().max() > 1e-2


def copied(tiny, tmp_path, **config):
    folder = tmp_path / "model"
    shutil.copytree(tiny("llama-untied"), folder)
    table = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(table | config))
    return folder


def test_an_unknown_kind_is_named_with_those_supported(tiny, tmp_path):
    with pytest.raises(ModelError, match="'mamba' is not supported") as caught:
        loaded(copied(tiny, tmp_path, model_type="mamba"))
    assert "llama, qwen2, qwen3" in caught.value.next_step


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("rope_parameters", {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
        ("num_attention_heads", 3),
    ],
)
def test_variants_that_would_be_computed_wrongly_are_refused(tiny, tmp_path, field, value):
    with pytest.raises(ModelError):
        loaded(copied(tiny, tmp_path, **{field: value}))


def test_tensors_without_a_place_and_places_without_a_tensor_are_listed(tiny, tmp_path):
    folder = copied(tiny, tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(64)
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks: model\.norm\.weight.*no place in the model: .*o_proj\.bias"):
        loaded(folder)


def test_names_of_the_transformer_engine_spec_are_known():
    layer = "decoder.layers.3."
    fused = [
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ]
    rules = mapping.plan([layer + name for name in fused], None, tied=True, where="")
    assert rules[layer + fused[0]].hf == ("model.layers.3.input_layernorm.weight",)
    assert rules[layer + fused[5]].hf == ("model.layers.3.post_attention_layernorm.weight",)
    with pytest.raises(ModelError, match=r"without a Hugging Face name: decoder\.layers\.0\.mlp\.router\.weight"):
        mapping.plan(["decoder.layers.0.mlp.router.weight"], None, tied=True, where="")


def test_damaged_or_missing_weights(tiny, tmp_path):
    folder = copied(tiny, tmp_path)
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match="damaged"):
        loaded(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="neither"):
        loaded(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        loaded(folder)
