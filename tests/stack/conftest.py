"""Tiny random models with every feature of the supported kinds, and rows to train them on."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import transformers

from miles_verifiers.config.settings import TrainingSection
from miles_verifiers.record.samples import Fork, Sample, as_row


def pytest_configure(config: pytest.Config) -> None:
    # Our own warnings stay errors; what the stack's packages say of each other while they are imported is theirs.
    config.addinivalue_line("filterwarnings", r"ignore::Warning:(megatron|ray|sglang|torch|transformers)(\..*)?")


VOCAB = 1000
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
# Rotary bases and a head size other than the defaults, so that ignoring them cannot go unnoticed.
KINDS = {
    "qwen3-tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}, 1e6),
    "qwen3-untied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": False}, 1e6),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}, 1e5),
    "llama-untied": ("Llama", {"tie_word_embeddings": False}, 1e4),
    "qwen2-untied": ("Qwen2", {"tie_word_embeddings": False}, 1e4),
}

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """tiny(kind) -> an HF model folder."""
    root = tmp_path_factory.mktemp("models")

    def make(kind: str, **changes) -> Path:
        folder = root / "-".join([kind, *map(str, changes.values())])
        if not folder.exists():
            name, fields, theta = KINDS[kind]
            rope = {"rope_type": "default", "rope_theta": theta}
            config = getattr(transformers, f"{name}Config")(**_SIZES, **{"rope_parameters": rope, **fields, **changes})
            torch.manual_seed(0)
            model = getattr(transformers, f"{name}ForCausalLM")(config)
            with torch.no_grad():
                for parameter in model.parameters():
                    # Norms are all one and biases all zero at first: a norm left out would not show.
                    parameter.add_(torch.randn_like(parameter) * 0.05)
            model.save_pretrained(folder)
            (folder / "tokenizer_config.json").write_text("{}")
        return folder

    return make


@pytest.fixture(scope="session")
def load_hf():
    """load_hf(folder) -> transformers' model in float32."""
    return lambda folder: transformers.AutoModelForCausalLM.from_pretrained(str(folder)).float()


@pytest.fixture(scope="session")
def hf_log_probs():
    """hf_log_probs(model, sample, temperature) -> [R] by transformers, one sequence at a time."""

    def compute(model, tokens: list[int], response_length: int, temperature: float = 1.0) -> torch.Tensor:
        ids = torch.tensor([tokens])
        every = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
        return every.gather(-1, ids[0, 1:, None])[-response_length:, 0]

    return compute


@pytest.fixture(scope="session")
def training_rows(load_hf, hf_log_probs):
    """training_rows(folder) -> rows of two groups, one flat group, one failed sample; the engine's log-probs are noisy."""

    def make(folder: Path, noise: float = 0.2) -> list[dict]:
        model, generator = load_hf(folder), random.Random(0)
        rows = []
        for index, advantage in enumerate([1.2, -0.7, 0.4, -0.9, 0.0, 0.0, None, 0.0]):
            prompt, response = generator.randint(3, 12), generator.randint(8, 30)
            tokens = [generator.randrange(VOCAB) for _ in range(prompt + response)]
            with torch.no_grad():
                exact = hf_log_probs(model, tokens, response).tolist()
            mask = [1] * response
            mask[4:6] = [0, 0]  # written by the environment
            old = [min(v + generator.gauss(0, noise), 0.0) if m else 0.0 for v, m in zip(exact, mask, strict=True)]
            sample = Sample(
                group_index=index // 2,
                index=100 + index,
                task_index=0,
                tokens=tokens,
                response_length=response,
                loss_mask=mask,
                rollout_log_probs=old,
                reward=0.5,
                advantage=advantage,
                status="failed" if advantage is None else "completed",
            )
            rows.append(as_row(sample))
        return rows

    return make


@pytest.fixture(scope="session")
def forked_rows(training_rows, load_hf, hf_log_probs):
    """forked_rows(folder) -> training_rows of which three have forks: of the sample's first tokens, and of nothing."""

    def make(folder: Path, noise: float = 0.2) -> list[dict]:
        model, generator, rows = load_hf(folder), random.Random(1), training_rows(folder, noise)
        # Places by row: the tokens shared with the sample, new ones before the response, the response.
        for index, shapes in {0: [(9, 3, 12)], 2: [(0, 6, 20), (5, 2, 70)], 4: [(4, 2, 9)]}.items():
            for shared, before, response in shapes:
                new = [generator.randrange(VOCAB) for _ in range(before + response)]
                tokens = rows[index]["tokens"][:shared] + new
                with torch.no_grad():
                    exact = hf_log_probs(model, tokens, response).tolist()
                mask = [1, 1, 0] + [1] * (response - 3)
                old = [min(v + generator.gauss(0, noise), 0.0) if m else 0.0 for v, m in zip(exact, mask, strict=True)]
                fork = Fork(tokens, response, mask, old, shared_length=shared)
                rows[index]["forks"].append(asdict(fork))
        return rows

    return make


@pytest.fixture(scope="session")
def settings() -> TrainingSection:
    # A step large enough that one wrong gradient moves weights far more than rounding does; tiny micro-batches.
    return TrainingSection(lr=1e-3, weight_decay=0.01, adam_beta2=0.95, max_tokens_per_gpu=48, global_batch_size=8)


@pytest.fixture(scope="session")
def reference(load_hf, hf_log_probs):
    """reference(folder, rows, settings, steps) -> [(loss, gradient norm, weights by name)] by transformers and AdamW.

    `total` divides the loss in place of the tokens that are trained.
    """

    def train(
        folder: Path, rows: list[dict], settings: TrainingSection, steps: int, total: int | None = None
    ) -> list[tuple]:
        model = load_hf(folder)
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim <= 1]
        adam = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=settings.lr,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_eps,
        )
        learning = [(own, row["advantage"]) for row in rows if row["advantage"] for own in (row, *row["forks"])]
        total = total or sum(sum(own["loss_mask"]) for own, _ in learning)
        done = []
        for _ in range(steps):
            adam.zero_grad()
            loss = torch.zeros(())
            for own, advantage in learning:
                new = hf_log_probs(model, own["tokens"], own["response_length"])
                mask = torch.tensor(own["loss_mask"], dtype=torch.float32)
                ratio = ((new - torch.tensor(own["rollout_log_probs"])) * mask).exp()
                bounded = ratio.clamp(1 - settings.eps_clip, 1 + settings.eps_clip_high)
                objective = torch.minimum(ratio * advantage, bounded * advantage)
                loss = loss - (objective * mask).sum() / total
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad)
            adam.step()
            weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
            done.append((loss.item(), norm.item(), weights))
        return done

    return train


@pytest.fixture(scope="session")
def largest_difference():
    """largest_difference(a, b) -> max |a - b| over tensors of the same names; tied heads are told once."""

    def compare(ours: dict, theirs: dict) -> float:
        assert set(theirs) - set(ours) <= {"lm_head.weight"}
        return max((value - theirs[name]).abs().max().item() for name, value in ours.items())

    return compare


@pytest.fixture
def change():
    """change(settings, **fields) -> the section with other values."""
    return lambda settings, **fields: TrainingSection(**(settings.model_dump() | fields))
