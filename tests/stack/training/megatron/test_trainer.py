"""The trainer against transformers and torch's AdamW, on weights: one process, tensor parallel, data parallel, resumed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from miles_verifiers.errors import ConfigError, HostError, TrainerError
from miles_verifiers.record.samples import Fork, Sample
from miles_verifiers.training.megatron import checkpoint
from miles_verifiers.training.megatron.convert import hf_to_megatron
from miles_verifiers.training.megatron.packing import micro_batches
from miles_verifiers.training.megatron.trainer import MegatronTrainer

# float32 rounding, once through Adam: where a gradient is near zero, its sign decides about lr = 1e-3.
CLOSE = 5e-5
KIND = "qwen3-tied"


@pytest.fixture(scope="session")
def converted(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("converted")

    def make(kind: str) -> Path:
        hf_to_megatron(tiny(kind), root / kind)
        return root / kind

    return make


@pytest.fixture
def trainer_of(tmp_path, tiny, converted, settings):
    """trainer_of(...) -> a trainer alone in this process; closed at the end."""
    made = []

    def make(kind=KIND, root=None, config=settings, **options) -> MegatronTrainer:
        for trainer in made:
            trainer.close()
        made.append(
            MegatronTrainer(
                model=tiny(kind),
                checkpoint=root or converted(kind),
                config=config,
                dtype="float32",
                init_method=f"file://{tmp_path / f'init{len(made)}'}",
                **options,
            )
        )
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def exported(trainer, folder) -> dict[str, torch.Tensor]:
    trainer.export_hf(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", ["qwen3-tied", "llama-untied", "qwen2-untied"])
def test_two_steps_are_those_of_transformers(
    trainer_of, tiny, training_rows, reference, settings, largest_difference, tmp_path, kind
):
    rows = training_rows(tiny(kind))
    trainer = trainer_of(kind)
    expected = reference(tiny(kind), rows, settings, steps=2)
    before = load_file(tiny(kind) / "model.safetensors")
    for number, (loss, norm, weights) in enumerate(expected, start=1):
        result = trainer.train(rows, number)
        assert result.loss == pytest.approx(loss, rel=1e-4)
        assert result.grad_norm == pytest.approx(norm, rel=1e-4)
        assert (result.rows, result.rows_usable, result.rows_trained, result.optimizer_steps) == (8, 7, 4, 1)
        ours = exported(trainer, tmp_path / f"step{number}")
        assert largest_difference(ours, weights) < CLOSE
        assert result.weight_delta == pytest.approx(largest_difference(ours, before), rel=1e-3)
        before = ours
    first, second = expected[0][2], expected[1][2]
    assert largest_difference(before, first) > 5 * CLOSE, "one step and two look the same: the comparison cannot fail"
    assert 0 < result.clip_fraction < 1
    assert second is not first


def test_forks_are_trained_as_sequences_of_their_own(
    trainer_of,
    tiny,
    forked_rows,
    training_rows,
    reference,
    load_hf,
    hf_log_probs,
    settings,
    largest_difference,
    tmp_path,
):
    """What is summed by hand over all sequences, each alone through transformers. One is longer than a micro-batch."""
    rows = forked_rows(tiny(KIND))
    assert max(len(fork["tokens"]) for row in rows for fork in row["forks"]) > settings.max_tokens_per_gpu
    ((loss, norm, weights),) = reference(tiny(KIND), rows, settings, steps=1)
    trainer = trainer_of()
    result = trainer.train(rows, 1)
    assert (result.loss, result.grad_norm) == (pytest.approx(loss, rel=1e-4), pytest.approx(norm, rel=1e-4))
    assert (result.rows, result.rows_usable, result.rows_trained, result.optimizer_steps) == (8, 7, 4, 1)
    usable = [row for row in rows if row["status"] == "completed"]
    assert result.tokens == sum(sum(own["loss_mask"]) for row in usable for own in (row, *row["forks"]))
    ours = exported(trainer, tmp_path / "ours")
    assert largest_difference(ours, weights) < CLOSE
    model = load_hf(tiny(KIND))
    for row in usable:  # one of them with a fork and without a gradient
        for own, log_probs in zip((row, *row["forks"]), result.train_log_probs[row["index"]], strict=True):
            with torch.no_grad():
                exact = hf_log_probs(model, own["tokens"], own["response_length"])
            assert torch.allclose(torch.tensor(log_probs), exact, atol=1e-5)

    # Controls: divided by the tokens of the samples' own sequences alone, and without forks, it is another gradient.
    own_alone = sum(sum(row["loss_mask"]) for row in rows if row["advantage"])
    ((wrong_loss, wrong_norm, _),) = reference(tiny(KIND), rows, settings, steps=1, total=own_alone)
    assert abs(wrong_loss / loss - 1) > 0.1
    assert abs(wrong_norm / norm - 1) > 0.1
    ((_, _, without),) = reference(tiny(KIND), training_rows(tiny(KIND)), settings, steps=1)
    assert largest_difference(ours, without) > 5 * CLOSE


def test_a_rollout_weighs_the_same_however_its_tokens_are_spread(
    trainer_of, tiny, training_rows, largest_difference, tmp_path
):
    """Its first three tokens trained by the sample or by a fork of the same prefix: the same gradient."""
    rows = training_rows(tiny(KIND))
    spread = [dict(row) for row in rows]
    for row in spread:
        if row["advantage"] is not None:
            beginning = len(row["tokens"]) - row["response_length"] + 3
            fork = Fork(row["tokens"][:beginning], 3, row["loss_mask"][:3], row["rollout_log_probs"][:3])
            row["loss_mask"] = [0] * 3 + row["loss_mask"][3:]
            row["forks"] = [asdict(fork)]
    whole = trainer_of()
    expected = whole.train(rows, 1)
    exported(whole, tmp_path / "whole")
    parts = trainer_of()
    result = parts.train(spread, 1)
    for name in ("loss", "grad_norm", "mismatch_mean", "mismatch_max", "clip_fraction", "kl"):
        assert getattr(result, name) == pytest.approx(getattr(expected, name), rel=1e-4), name
    assert result.tokens == expected.tokens
    ours = exported(parts, tmp_path / "parts")
    assert largest_difference(ours, load_file(tmp_path / "whole" / "model.safetensors")) < CLOSE
    # Control: with the fork left out, it is not.
    lost = trainer_of().train([row | {"forks": []} for row in spread], 1)
    assert abs(lost.grad_norm / expected.grad_norm - 1) > 1e-2


def test_log_probs_and_mismatch_are_those_of_the_weights_that_sampled(
    trainer_of, tiny, training_rows, load_hf, hf_log_probs, settings, change
):
    rows = training_rows(tiny(KIND), noise=0.0)
    # Two optimizer steps: what the second trains on must be scored before the first has moved the weights.
    result = trainer_of(config=change(settings, global_batch_size=2)).train(rows, 1)
    assert result.optimizer_steps == 2
    assert set(result.train_log_probs) == {row["index"] for row in rows if row["status"] == "completed"}
    model = load_hf(tiny(KIND))
    for row in rows:
        if row["status"] == "completed":
            with torch.no_grad():
                exact = hf_log_probs(model, row["tokens"], row["response_length"])
            (log_probs,) = result.train_log_probs[row["index"]]
            assert torch.allclose(torch.tensor(log_probs), exact, atol=1e-5)
    assert result.mismatch_mean < 1e-5
    assert result.mismatch_max < 1e-4
    assert 0 <= result.mismatch_k3 < 1e-8


def test_stale_weights_fail_the_mismatch_gate(trainer_of, tiny, training_rows):
    rows = training_rows(tiny(KIND), noise=0.0)
    trainer = trainer_of()
    assert trainer.train(rows, 1).mismatch_mean < 1e-4
    stale = trainer.train(rows, 2)
    assert stale.mismatch_mean > 1e-4
    assert stale.mismatch_k3 > 1e-8


def test_mismatch_is_over_flat_groups_too(trainer_of, tiny, training_rows):
    rows = training_rows(tiny(KIND), noise=0.0)
    trainer = trainer_of()
    flat = next(row for row in rows if row["advantage"] == 0.0)
    flat["rollout_log_probs"] = [
        min(v - 0.5, 0.0) if m else 0.0 for v, m in zip(flat["rollout_log_probs"], flat["loss_mask"], strict=True)
    ]
    assert trainer.train(rows, 1).mismatch_max == pytest.approx(0.5, abs=1e-3)


def test_without_a_gradient_nothing_moves(trainer_of, tiny, training_rows, tmp_path):
    rows = [row | {"advantage": 0.0 if row["advantage"] is not None else None} for row in training_rows(tiny(KIND))]
    trainer = trainer_of()
    result = trainer.train(rows, 1)
    assert (result.optimizer_steps, result.rows_trained, result.weight_delta) == (0, 0, 0.0)
    assert (result.loss, result.grad_norm, result.kl) == (None, None, None)
    assert result.mismatch_mean > 0.01, "the rows are still scored"
    original = load_file(tiny(KIND) / "model.safetensors")
    after = exported(trainer, tmp_path / "after")
    assert all(torch.equal(after[name], original[name]) for name in original)
    rows[0]["advantage"] = 1.0
    assert trainer.train(rows, 2).weight_delta > 0


def test_no_usable_row_at_all(trainer_of, tiny, training_rows):
    rows = [row | {"status": "failed"} for row in training_rows(tiny(KIND))]
    result = trainer_of().train(rows, 1)
    assert (result.rows_usable, result.mismatch_mean, result.train_log_probs) == (0, None, {})


def test_micro_batches_do_not_change_the_result(
    trainer_of, tiny, training_rows, settings, change, largest_difference, tmp_path
):
    rows = training_rows(tiny(KIND))
    small = trainer_of(config=change(settings, max_tokens_per_gpu=1))
    small_loss = small.train(rows, 1).loss
    alone = exported(small, tmp_path / "alone")
    large = trainer_of(config=change(settings, max_tokens_per_gpu=4096))
    assert large.train(rows, 1).loss == pytest.approx(small_loss, rel=1e-5)
    assert largest_difference(exported(large, tmp_path / "packed"), alone) < CLOSE


def test_temperature_is_that_of_the_sampler(trainer_of, tiny, training_rows, load_hf, hf_log_probs):
    rows = [row for row in training_rows(tiny(KIND)) if row["status"] == "completed"][:4]
    model = load_hf(tiny(KIND))
    for row in rows:
        with torch.no_grad():
            row["rollout_log_probs"] = hf_log_probs(model, row["tokens"], row["response_length"], 0.8).tolist()
    assert trainer_of(temperature=0.8).train(rows, 1).mismatch_mean < 1e-5
    assert trainer_of(temperature=1.0).train(rows, 1).mismatch_mean > 1e-2


def test_resumed_is_as_if_never_stopped(
    trainer_of, tiny, training_rows, reference, settings, largest_difference, tmp_path
):
    rows = training_rows(tiny(KIND))
    expected = reference(tiny(KIND), rows, settings, steps=2)[1][2]
    trainer = trainer_of()
    assert (trainer.loaded_iteration, trainer.loaded_extra) == (0, {})
    trainer.train(rows, 1)
    trainer.save(tmp_path / "checkpoints", 1, {"cursor": [3, 1]})
    resumed = trainer_of(root=tmp_path / "checkpoints")
    assert (resumed.loaded_iteration, resumed.loaded_extra) == (1, {"cursor": [3, 1]})
    resumed.train(rows, 2)
    assert largest_difference(exported(resumed, tmp_path / "resumed"), expected) < CLOSE

    # Weights alone, without Adam's moments, end elsewhere.
    note = tmp_path / "checkpoints" / "iter_0000001" / "miles_verifiers.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"has_optimizer": False}))
    forgetful = trainer_of(root=tmp_path / "checkpoints")
    forgetful.train(rows, 2)
    assert largest_difference(exported(forgetful, tmp_path / "forgetful"), expected) > 2 * CLOSE


def test_resumed_after_a_step_without_a_winner_too(trainer_of, tiny, training_rows, largest_difference, tmp_path):
    rows = training_rows(tiny(KIND))
    flat = [row | {"advantage": None if row["advantage"] is None else 0.0} for row in rows]
    trainer = trainer_of()
    trainer.train(flat, 1)
    trainer.save(tmp_path / "checkpoints", 1, {"step": 1})
    trainer.train(rows, 2)
    expected = exported(trainer, tmp_path / "never stopped")
    resumed = trainer_of(root=tmp_path / "checkpoints")
    assert resumed.loaded_extra == {"step": 1}
    assert resumed.train(rows, 2).weight_delta > 0
    assert largest_difference(exported(resumed, tmp_path / "resumed"), expected) < CLOSE


def test_a_failed_save_leaves_the_former_checkpoint_in_force(trainer_of, tmp_path, monkeypatch):
    trainer = trainer_of()
    root = tmp_path / "checkpoints"
    trainer.save(root, 1, {})

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.dist_checkpointing, "save", fail)
    with pytest.raises(HostError, match="No space left"):
        trainer.save(root, 2, {})
    assert checkpoint.newest(root).name == "iter_0000001"
    assert [path.name for path in root.iterdir() if path.is_dir()] == ["iter_0000001"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_log_probs": [-1.0]}, "rollout_log_probs has 1 entries"),
        ({"loss_mask": [1]}, "loss_mask has 1 entries"),
        ({"tokens": [1, 2, 1000]}, "must not be empty|outside the vocabulary"),
        ({"advantage": math.nan}, "advantage is nan"),
        ({"response_length": 0}, "must not be empty"),
    ],
)
def test_rows_that_contradict_themselves_are_named(trainer_of, tiny, training_rows, changes, message):
    rows = training_rows(tiny(KIND))
    rows[1] |= changes
    with pytest.raises(TrainerError, match=message) as caught:
        trainer_of().train(rows, 1)
    assert caught.value.where == "sample 101 of group 0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_log_probs": [-1.0]}, "fork 2: rollout_log_probs has 1 entries"),
        ({"tokens": [1, 2, 1000]}, "fork 2: .*must not be empty"),
        ({"response_length": 0}, "fork 2: .*must not be empty"),
    ],
)
def test_forks_that_contradict_themselves_are_named(trainer_of, tiny, forked_rows, changes, message):
    rows = forked_rows(tiny(KIND))
    rows[2]["forks"][1] |= changes
    with pytest.raises(TrainerError, match=message) as caught:
        trainer_of().train(rows, 1)
    assert caught.value.where == "sample 102 of group 1"


def test_damaged_weights_are_noticed_before_they_are_trained_on(trainer_of, tiny, training_rows):
    trainer = trainer_of()
    with torch.no_grad():
        trainer._policy.parameters["decoder.final_layernorm.weight"].fill_(torch.nan)
    with pytest.raises(TrainerError, match="not finite"):
        trainer.train(training_rows(tiny(KIND)), 1)


@pytest.mark.parametrize(
    ("fields", "dtype", "error"),
    [
        ({}, "bfloat16", ConfigError),
        ({"attention_backend": "flash"}, "float32", ConfigError),
        ({"num_gpus": 1, "attention_backend": "nonsense"}, "bfloat16", ConfigError),
        ({"num_gpus": 1, "attention_backend": "flash"}, "bfloat16", HostError),
        ({}, "float8", ConfigError),
    ],
)
def test_what_the_machine_cannot_do_is_said_first(tiny, converted, settings, change, tmp_path, fields, dtype, error):
    if error is HostError and torch.cuda.is_available():
        error = type(None)
    with pytest.raises(error):
        MegatronTrainer(
            model=tiny(KIND),
            checkpoint=converted(KIND),
            config=change(settings, **fields),
            dtype=dtype,
            init_method=f"file://{tmp_path / 'init'}",
        )


# Two processes. Starting them costs most, so all cases run in one pair; each test reads its case's results. Whichever test
# comes first waits for them.
in_two_processes = pytest.mark.timeout(180)


@pytest.fixture(scope="session")
def two_ranks(tiny, converted, training_rows, forked_rows, settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    rows = training_rows(tiny(KIND))
    base = {"model": str(tiny(KIND)), "checkpoint": str(converted(KIND)), "rows": rows, "steps": 2}
    one = settings.model_dump() | {"num_gpus": 0}
    split = one | {"tensor_model_parallel_size": 2}
    broken = [row | {"advantage": 0.0} if i else row for i, row in enumerate(rows)]
    cases = [
        base | {"name": "tp2", "settings": split, "save": str(folder / "tp2-saved"), "steps": 1},
        base | {"name": "tp2-resumed", "settings": split, "checkpoint": str(folder / "tp2-saved"), "steps": 1},
        base | {"name": "dp2-resumed", "settings": one, "checkpoint": str(folder / "tp2-saved"), "steps": 1},
        base | {"name": "dp2", "settings": one},
        base | {"name": "dp2-forks", "settings": one, "rows": forked_rows(tiny(KIND)), "steps": 1},
        base | {"name": "dp2-one-row", "settings": one, "rows": broken, "steps": 1},
        base | {"name": "no-norm-sums", "settings": split, "without_norm_sums": True, "steps": 1},
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("two_ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)[-5000:]
    return folder


def results_of(folder, case):
    ranks = [json.loads((folder / f"{case}-rank{rank}.json").read_text()) for rank in range(2)]
    for key in ("loss", "grad_norm", "mismatch_mean", "weight_delta", "train_log_probs", "tokens"):
        values = [[result[key] for result in rank["results"]] for rank in ranks]
        assert values[0] == values[1], f"ranks disagree about {key}"
    return ranks[0]["results"]


@pytest.fixture(scope="session")
def expected(reference, tiny, training_rows, settings):
    return reference(tiny(KIND), training_rows(tiny(KIND)), settings, steps=2)


@in_two_processes
@pytest.mark.parametrize(
    ("case", "steps"),
    [("tp2", [0]), ("tp2-resumed", [1]), ("dp2", [0, 1]), ("dp2-resumed", [1])],
)
def test_two_ranks_are_one(two_ranks, expected, largest_difference, case, steps):
    results = results_of(two_ranks, case)
    for number, (result, step) in enumerate(zip(results, steps, strict=True), start=1):
        loss, norm, weights = expected[step]
        assert result["loss"] == pytest.approx(loss, rel=1e-4)
        assert result["grad_norm"] == pytest.approx(norm, rel=1e-4)
        ours = load_file(two_ranks / f"{case}-step{number}" / "model.safetensors")
        assert largest_difference(ours, weights) < CLOSE


@in_two_processes
def test_sequences_of_a_sample_may_lie_on_different_ranks(
    two_ranks, reference, tiny, forked_rows, settings, largest_difference
):
    rows = forked_rows(tiny(KIND))
    ((loss, norm, weights),) = reference(tiny(KIND), rows, settings, steps=1)
    (result,) = results_of(two_ranks, "dp2-forks")
    assert (result["loss"], result["grad_norm"]) == (pytest.approx(loss, rel=1e-4), pytest.approx(norm, rel=1e-4))
    ours = load_file(two_ranks / "dp2-forks-step1" / "model.safetensors")
    assert largest_difference(ours, weights) < CLOSE
    learning = [
        Sample(0, row["index"], 0, row["tokens"], forks=[Fork(f["tokens"]) for f in row["forks"]]) for row in rows[:4]
    ]
    shares = [micro_batches(learning, max_tokens=48, rank=rank, ranks=2) for rank in range(2)]
    on = [{part.key[0] for batch in share for part in batch.parts} for share in shares]
    assert on[0] & on[1], "no sample lies on both ranks: the test says nothing"


@in_two_processes
def test_gradients_of_shared_norms_must_be_summed_over_tensor_parallel_ranks(two_ranks, expected, largest_difference):
    """The loss of the first step is right and the weights are not: why this file compares weights."""
    loss, _, weights = expected[0]
    assert results_of(two_ranks, "no-norm-sums")[0]["loss"] == pytest.approx(loss, rel=1e-4)
    ours = load_file(two_ranks / "no-norm-sums-step1" / "model.safetensors")
    assert largest_difference(ours, weights) > 10 * CLOSE


@in_two_processes
def test_a_rank_without_rows_takes_part(two_ranks):
    (result,) = results_of(two_ranks, "dp2-one-row")
    assert (result["rows_trained"], result["optimizer_steps"]) == (1, 1)
    assert result["weight_delta"] > 0


@in_two_processes
def test_a_checkpoint_of_two_ranks_loads_in_one(
    two_ranks, trainer_of, tiny, training_rows, expected, largest_difference, tmp_path
):
    trainer = trainer_of(root=two_ranks / "tp2-saved")
    assert trainer.loaded_extra == {"step": 1}
    trainer.train(training_rows(tiny(KIND)), 2)
    assert largest_difference(exported(trainer, tmp_path / "out"), expected[1][2]) < CLOSE
