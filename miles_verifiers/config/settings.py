"""Every field of a run's configuration: name, unit, default. Names are those of Miles where Miles has one.

How profiles, files and the command line make a RunConfig is in loading.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A table of the TOML file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(Section):
    source: str
    """`pypi:NAME==VERSION`, `hf:ORG/NAME@REVISION`, `path:DIR` or `tiny:qwen3`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameters and arithmetic of engine and trainer."""


class EnvironmentSection(Section):
    source: str
    """Where its package comes from: a folder (`environments/x`, `./x`, `/abs/x`), `git+URL@REVISION[#subdirectory=DIR]`,
    `NAME==VERSION` of the package registry, or `OWNER/NAME@VERSION` of Prime's hub."""
    editable: bool = False
    """Whether a folder is used where it is, so that its changes count without another `prepare`."""
    exclude: list[str] = Field(default_factory=list)
    """Distributions that the package asks for and must not bring; the stack's serve, whatever version was asked for."""
    allow_shadow: list[str] = Field(default_factory=list)
    """Distributions of the stack that the environment may hold in a version of its own, in its interpreter alone."""
    pass_variables: list[str] = Field(default_factory=list)
    """Names of environment variables that its rollouts need, credentials of a judge for example; no others reach them."""
    name: str = ""
    """By which a run of several environments tells them apart; empty: the taskset's id."""
    weight: float = Field(1.0, gt=0)
    """Its share of each step's groups, relative to the weights of the run's other environments."""
    verifiers: str = "0.2.0"
    """Version of Verifiers, which names the lock of the environment's interpreter."""
    taskset: dict[str, Any] = Field(default_factory=dict)
    """Handed to Verifiers as the `taskset` of its EnvConfig; `id` is the environment's id."""
    endless_tasks: int = Field(1024, ge=1)
    """Tasks that are taken of a taskset without an end, its first ones. They are made at start: some tasksets need 50 ms each."""
    harness: str = "inline"
    """`inline` runs chat tasks inside the rollout process; any other name is a Verifiers harness id."""
    renderer: str = "auto"
    """Name of the renderer that makes token ids of messages; `auto` decides by the model and says which."""
    history: Literal["template", "keep"] = "template"
    """What a later turn makes of earlier ones: `template` renders them as the model's template does, which may drop thinking or
    change the split of a reply, and then the rollout forks: every branch is a sequence to train on, which costs a forward pass
    of its own. `keep` keeps every sampled id, so that a conversation is one; renderers call it thinking_retention = "all"."""
    max_turns: int = Field(8, ge=1)
    eval_taskset: dict[str, Any] = Field(default_factory=dict)
    """Laid over `taskset` for evaluations, for example another split; empty: they run on the training tasks."""
    eval_tasks: int | None = Field(None, ge=1)
    """Evaluate on so many tasks, the taskset's first; None is all of them."""
    n_samples_per_eval_prompt: int | None = Field(None, ge=1)
    """None is that of [rollout]."""
    env: dict[str, Any] = Field(default_factory=dict)
    """Verifiers 0.3 and newer: handed over as the rest of its EnvConfig; `id` pairs an environment with the taskset, tables
    named after seats configure these."""
    attempts_field: str | None = None
    """Verifiers 0.3 and newer: the field of the environment's config that says how many attempts one episode makes. It is
    set to the size of the group, and the episode is the group. None takes `attempts` or `n` of an environment with one seat;
    where there is none, a group is that many episodes."""
    train_seat: str | None = None
    """Verifiers 0.3 and newer: the seat whose rollouts are trained on; None is every seat that the environment trains."""

    @property
    def label(self) -> str:
        return self.name or str(self.taskset.get("id") or Path(self.source).name)


class RolloutSection(Section):
    rollout_batch_size: int = Field(ge=1)
    """Groups (tasks) per training step."""
    n_samples_per_prompt: int = Field(ge=2)
    """Samples per group; GRPO compares within the group."""
    over_sampling_batch_size: int | None = Field(None, ge=1)
    """Groups that are started at a time; None is rollout_batch_size."""
    surplus_groups: Literal["rerun", "keep"] = "rerun"
    """Groups that were started and not needed: `rerun` does their tasks again, under the weights of a later step; `keep` waits
    for them and trains on them in the next step, one weight version late."""
    dynamic_sampling_filter_path: str | None = None
    """`package.module:function`, called with (args, samples) of each group; what it returns says whether to train on it."""
    failed_rollouts: Literal["mask", "drop"] = "mask"
    """Of a group with a failed rollout: leave that one out and compare the others, or drop the group."""
    bad_rewards: Literal["mask", "drop"] = "mask"
    """The same for a rollout whose reward is missing or not finite."""
    equal_rewards: Literal["mask", "drop"] = "mask"
    """A group whose rewards are all equal: keep it, with advantage 0, or drop it."""
    rollout_retries: int = Field(0, ge=0)
    """How often a failed rollout is run again, before its group is scored."""
    scoring_retries: int = Field(0, ge=0)
    """How often a group reward that failed is asked again, on the same rollouts."""
    max_dropped_groups: int = Field(64, ge=0)
    """Dropped groups in a row after which the run stops and says why; 0 stops at the first."""
    num_epoch: int | None = Field(None, ge=1)
    """Passes over the tasks after which the run ends, also before num_steps; None goes on for ever."""
    rollout_max_response_len: int = Field(ge=1)
    """Tokens that one reply may have."""
    rollout_max_context_len: int = Field(2048, ge=2)
    """Tokens that prompt and replies may have together."""
    rollout_max_prompt_len: int | None = Field(None, ge=1)
    """Tokens that the prompt which opens a rollout may have; None leaves it to rollout_max_context_len."""
    rollout_stop: list[str] = Field(default_factory=list)
    """Texts at which a reply ends, besides those of the environment."""
    rollout_stop_token_ids: list[int] = Field(default_factory=list)
    """Ids at which a reply ends, besides those of the renderer."""
    rollout_temperature: float = Field(1.0, gt=0)
    rollout_top_p: float = Field(1.0, gt=0, le=1)
    rollout_top_k: int = -1
    rollout_seed: int = 0
    """Seeds the order of the tasks and, under deterministic inference, sampling."""
    rollout_shuffle: bool = True
    max_concurrency: int = Field(32, ge=1)
    """Rollouts in flight."""
    eval_interval: int | None = Field(None, ge=1)
    """Steps between evaluations; there is one at the end, too, and one at the start. None: no evaluation."""
    skip_eval_before_train: bool = False
    """Without the evaluation at the start."""
    n_samples_per_eval_prompt: int = Field(1, ge=1)
    """Samples per task in evaluations; two or more where the environment compares samples of a task."""
    eval_temperature: float | None = Field(None, ge=0)
    """None, here and below: as training rollouts are sampled. 0 takes the most probable token."""
    eval_top_p: float | None = Field(None, gt=0, le=1)
    eval_top_k: int | None = None
    eval_max_response_len: int | None = Field(None, ge=1)
    reward_key: str | None = None
    """Train on this named reward alone instead of the environment's weighted sum."""
    reward_control: Literal["none", "shuffle"] = "none"
    """`shuffle` deals each step's rewards out at random: a control under which nothing can be learned."""
    setup_timeout: float = Field(120, gt=0)
    """Seconds for an environment's setup of one rollout."""
    rollout_timeout: float = Field(300, gt=0)
    """Seconds for one rollout."""
    scoring_timeout: float = Field(60, gt=0)
    """Seconds for scoring one rollout."""
    request_timeout: float = Field(240, gt=0)
    """Seconds for one generation request, retries included."""
    group_timeout: float = Field(600, gt=0)
    """Seconds for one group from the start of its first rollout, retries and scoring included."""
    batch_timeout: float = Field(900, gt=0)
    """Seconds for all rollouts of one step."""
    eval_timeout: float = Field(1800, gt=0)
    """Seconds for one evaluation."""

    @model_validator(mode="after")
    def _engine_and_trainer_agree(self) -> RolloutSection:
        if self.rollout_top_p != 1.0 or self.rollout_top_k != -1:
            raise ValueError(
                "rollout_top_p and rollout_top_k must stay 1.0 and -1: the engine's log-probs would be those of the cut "
                "distribution, the trainer's those of the whole one"
            )
        if max(self.rollout_max_response_len, self.eval_max_response_len or 0) >= self.rollout_max_context_len:
            raise ValueError("rollout_max_response_len and eval_max_response_len must be below rollout_max_context_len")
        if self.over_sampling_batch_size is not None and self.over_sampling_batch_size < self.rollout_batch_size:
            raise ValueError("over_sampling_batch_size must be at least rollout_batch_size")
        return self


class EngineSection(Section):
    device: Literal["cpu", "cuda"] = "cpu"
    num_engines: int = Field(1, ge=1)
    gpus_per_engine: int = Field(1, ge=1)
    """Tensor parallel size of each engine; of no effect on CPU."""
    attention_backend: str = "torch_native"
    mem_fraction_static: float = Field(0.3, gt=0, lt=1)
    max_total_tokens: int | None = Field(None, ge=1)
    """Tokens that the KV cache holds; None leaves it to SGLang."""
    max_running_requests: int = Field(32, ge=1)
    enable_deterministic_inference: bool = False
    """Sample each rollout from a seed of its own, which its place in the run decides, with arithmetic whose bits do not depend on
    what else the engine computes. A run that was killed and started again is then exactly what it would have been."""
    port: int | None = Field(None, ge=1, le=65535)
    """Port of the first engine; None takes a free one."""
    start_timeout: float = Field(300, gt=0)
    """Seconds until the engine answers /health."""
    extra_args: list[str] = Field(default_factory=list)
    """Further arguments of `sglang.launch_server`."""


class TrainingSection(Section):
    megatron_path: str | None = None
    """A Megatron-LM checkout whose `megatron.core` is used instead of the stack's own."""
    num_steps: int = Field(2, ge=1)
    """Training steps, each on fresh rollouts."""
    num_gpus: int = Field(0, ge=0)
    """Trainer processes with one GPU each; 0 is one process on the CPU."""
    colocate: bool = False
    """Engine and trainer share the same GPUs."""
    tensor_model_parallel_size: int = Field(1, ge=1)
    pipeline_model_parallel_size: int = Field(1, ge=1)
    context_parallel_size: int = Field(1, ge=1)
    attention_backend: str = "sdpa"
    """`sdpa` on CPU; `flash` with Transformer Engine."""
    global_batch_size: int | None = Field(None, ge=1)
    """Samples per optimizer step; None is all samples of the rollout."""
    max_tokens_per_gpu: int = Field(4096, ge=1)
    """Tokens that one packed micro-batch holds."""
    advantage_estimator: Literal["grpo"] = "grpo"
    normalize_advantages: bool = True
    """Divide by the group's standard deviation."""
    eps_clip: float = Field(0.2, gt=0)
    eps_clip_high: float = Field(0.28, gt=0)
    entropy_coef: float = Field(0.0, ge=0)
    lr: float = Field(1e-6, gt=0)
    """Constant learning rate of Adam."""
    weight_decay: float = Field(0.1, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.98, ge=0, lt=1)
    adam_eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, gt=0)
    save_interval: int = Field(1, ge=1)
    """Steps between checkpoints; the last step always makes one."""
    keep_checkpoints: int = Field(1, ge=1)
    weight_sync: Literal["disk", "stale"] = "disk"
    """`disk` hands safetensors over through a folder; `stale` is a control: the version moves, the weights stay."""
    step_timeout: float = Field(900, gt=0)
    """Seconds for one training step."""
    load_timeout: float = Field(300, gt=0)
    """Seconds for the trainer to start and load its checkpoint."""
    sync_timeout: float = Field(120, gt=0)
    """Seconds for new weights to reach the engine."""

    @model_validator(mode="after")
    def _supported(self) -> TrainingSection:
        if self.context_parallel_size != 1 or self.pipeline_model_parallel_size != 1:
            raise ValueError("only pipeline_model_parallel_size = context_parallel_size = 1 is supported")
        if max(self.num_gpus, 1) % self.tensor_model_parallel_size:
            raise ValueError("tensor_model_parallel_size must divide num_gpus")
        if self.entropy_coef:
            raise ValueError("entropy_coef must be 0: an entropy bonus is not implemented")
        return self


class VerifySection(Section):
    max_mismatch_mean: float = Field(1e-4, gt=0)
    """Bound for mean |engine log-prob - trainer log-prob|, nats."""
    min_passed: int = Field(1, ge=0)
    """Samples of the whole run that must have passed."""
    reward_names: list[str] = Field(default_factory=list)
    """The environment's reward names; empty, or several environments: whatever the first sample of each has."""
    group_share_rewards: dict[str, float] = Field(default_factory=dict)
    """Rewards that the winners of a group share, with the sum that they share."""
    pass_metric: str = "passed"
    """The 0/1 metric that says whether a rollout succeeded."""
    learning: bool = False
    """Demand that the last five steps pass more often than the first five."""
    min_final_pass_rate: float = Field(0.5, ge=0, le=1)
    """Used when `learning`: mean pass rate of the last five steps."""


class RunConfig(Section):
    profile: str
    model: ModelSection
    environment: EnvironmentSection
    environments: list[EnvironmentSection] = Field(default_factory=list)
    """Further environments of the same run (`[[environments]]`), mixed in by weight; each has an interpreter of its own."""
    rollout: RolloutSection
    engine: EngineSection = EngineSection()
    training: TrainingSection = TrainingSection()
    verify: VerifySection = VerifySection()

    @model_validator(mode="after")
    def _labels_differ(self) -> RunConfig:
        labels = [environment.label for environment in self.all_environments]
        if len(set(labels)) < len(labels):
            raise ValueError(
                f"environments need names that differ, these are {', '.join(labels)}: set environments.name"
            )
        return self

    @model_validator(mode="after")
    def _batches_fit(self) -> RunConfig:
        samples = self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt
        batch = self.training.global_batch_size
        if batch is not None and samples % batch:
            raise ValueError(
                f"training.global_batch_size = {batch} must divide rollout_batch_size x n_samples_per_prompt = {samples}"
            )
        return self

    @property
    def all_environments(self) -> list[EnvironmentSection]:
        return [self.environment, *self.environments]

    def of_environment(self, number: int) -> RunConfig:
        """The run as one of its environments sees it: that one, and no other."""
        return self.model_copy(update={"environment": self.all_environments[number], "environments": []})

    @property
    def samples_per_step(self) -> int:
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt
