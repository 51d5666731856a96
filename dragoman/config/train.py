"""Settings of training: each with its default, range and description."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dragoman.config.device_engine_and_precision_names import device_problem
from dragoman.config.setting_declaration import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Optimization, precision, parallelism, checkpoints and validation."""

    steps: int = setting(100_000, "Number of training steps (optimizer steps).", at_least=1)
    epochs: float = setting(
        0.0,
        "Number of epochs, which sets train.steps and its intervals; 0 for train.steps.",
        at_least=0.0,
        at_most=100_000.0,
    )
    batch_tokens: int = setting(
        25_000, "Padded tokens of the longer side in one micro-batch.", at_least=16
    )
    gradient_accumulation: int = setting(
        1,
        "Gradient accumulation: micro-batches per training step, over all ranks.",
        at_least=1,
        at_most=100_000,
    )
    seed: int = setting(1, "Seed of all random number generators.", at_least=0, at_most=2**62)
    optimizer: str = setting(
        "adam", "Optimizer: how gradients update the weights.", kind="optimizer"
    )
    learning_rate: float = setting(
        7e-4,
        "Peak learning rate; for noam, the factor of the paper's formula.",
        at_least=0.0,
        at_most=100.0,
    )
    schedule: str = setting("inverse_sqrt", "Learning-rate schedule.", kind="schedule")
    warmup_steps: int = setting(4000, "Warm-up steps of the learning-rate schedule.", at_least=0)
    cooldown_fraction: float = setting(
        0.2,
        "Fraction of the steps over which the wsd schedule decays to zero.",
        at_least=0.0,
        at_most=1.0,
    )
    momentum: float = setting(
        0.9, "Nesterov momentum of sgd and muon; 0 for none.", at_least=0.0, at_most=0.9999
    )
    beta1: float = setting(0.9, "Adam's beta1.", at_least=0.0, at_most=0.9999)
    beta2: float = setting(0.98, "Adam's beta2.", at_least=0.0, at_most=0.999999)
    epsilon: float = setting(1e-9, "Adam's epsilon.", at_least=1e-15, at_most=1.0)
    weight_decay: float = setting(
        0.0,
        "Weight decay of matrices; biases and norms are not decayed.",
        at_least=0.0,
        at_most=10.0,
    )
    max_grad_norm: float = setting(
        0.0, "Clip gradients to this L2 norm; 0 disables clipping.", at_least=0.0
    )
    label_smoothing: float = setting(
        0.1, "Label smoothing: probability spread over the other tokens.", at_least=0.0, at_most=0.9
    )
    r_drop: float = setting(
        0.0,
        "Weight of R-Drop: divergence of two dropout passes over each pair; 0 disables it.",
        at_least=0.0,
    )
    simcut: float = setting(
        0.0,
        "Weight of SimCut: divergence from a pass whose input tokens are cut; 0 disables it.",
        at_least=0.0,
    )
    simcut_probability: float = setting(
        0.05, "Probability that SimCut cuts a token.", at_least=0.0, at_most=0.9
    )
    word_dropout: float = setting(
        0.0, "Probability that a token of the input becomes <unk>.", at_least=0.0, at_most=0.9
    )
    ema_decay: float = setting(
        0.0,
        "Decay of the exponential moving average (EMA) of the weights; 0 disables it.",
        at_least=0.0,
        at_most=0.99999,
    )
    average_checkpoints: int = setting(
        1, "Number of newest checkpoints averaged into the final model.", at_least=1, at_most=100
    )
    final_checkpoint: str = setting(
        "best",
        "Checkpoint that the final model is taken from: best or last.",
        choices=("best", "last"),
    )
    precision: str = setting(
        "auto",
        "Compute dtype (mixed precision); auto is bfloat16 where the GPU or CPU supports it.",
        choices=("auto", "float32", "bfloat16"),
    )
    param_dtype: str = setting(
        "auto",
        "dtype of the compute copy of the weights; master weights stay float32.",
        choices=("auto", "float32", "bfloat16"),
    )
    compile: str = setting(
        "auto",
        "Compile the blocks with torch.compile; auto compiles long runs on a GPU.",
        choices=("auto", "on", "off"),
    )
    cuda_graphs: str = setting(
        "auto",
        "Capture each batch shape as a CUDA graph and replay it; auto enables it on GPUs.",
        choices=("auto", "off"),
    )
    fsdp: str = setting(
        "auto",
        "Shard weights, gradients and optimizer state over ranks (FSDP); auto for large models.",
        choices=("auto", "on", "off"),
    )
    device: str = setting("auto", "Device: auto, cpu, cuda, cuda:1 or mps.")
    threads: int = setting(0, "CPU threads; 0 for all cores.", at_least=0, at_most=1024)
    checkpoint_every: int = setting(1000, "Steps between checkpoints.", at_least=1)
    keep_checkpoints: int = setting(
        3, "Number of newest checkpoints to keep, besides the best.", at_least=1, at_most=1000
    )
    validate_every: int = setting(1000, "Steps between validations.", at_least=1)
    validate_sentences: int = setting(
        200, "Validation sentences to translate and score with BLEU; 0 for none.", at_least=0
    )
    best_metric: str = setting(
        "loss", "Metric that selects the best checkpoint: loss, bleu, or one of the task's."
    )
    target_exact: float = setting(
        0.0,
        "Stop once this fraction of validation translations equals the reference; 0 disables.",
        at_least=0.0,
        at_most=1.0,
    )
    patience: int = setting(
        0, "Early stopping: validations without improvement; 0 disables it.", at_least=0
    )
    init_from: str = setting(
        "",
        "Model directory to fine-tune: its architecture, tokenizer and weights.",
    )
    extend_vocabulary: int = setting(
        0,
        "Maximum number of tokens, learned from the corpus, that fine-tuning adds per vocabulary.",
        at_least=0,
        at_most=1_000_000,
    )
    time_budget: float = setting(
        0.0, "Time budget of the whole run in seconds; 0 for no limit.", at_least=0.0
    )
    deterministic: bool = setting(
        False, "Deterministic algorithms on GPUs: bitwise reproducible, slower."
    )
    tensorboard: bool = setting(False, "Also write TensorBoard logs.")

    def problems(self) -> Iterator[str]:
        """Yield inconsistencies between fields."""
        if problem := device_problem(self.device):
            yield problem
        if self.extend_vocabulary and not self.init_from:
            yield (
                "train.extend_vocabulary adds tokens to a model that is fine-tuned; found "
                f"{self.extend_vocabulary} without a model; add --init-from MODEL, or set "
                "text.vocab_size"
            )
        if self.average_checkpoints > self.keep_checkpoints:
            found = (
                f"train.average_checkpoints={self.average_checkpoints} and "
                f"train.keep_checkpoints={self.keep_checkpoints}"
            )
            yield (
                f"train.average_checkpoints needs that many kept checkpoints; found {found}; "
                "raise train.keep_checkpoints"
            )
        if self.r_drop and self.simcut:
            yield (
                "train.r_drop and train.simcut cannot be combined; found "
                f"{self.r_drop:g} and {self.simcut:g}; set one of them to 0"
            )
        if self.optimizer in ("adafactor", "muon") and self.fsdp == "on":
            yield (
                f"train.optimizer={self.optimizer} needs whole matrices; found train.fsdp=on, "
                "which shards them; set train.fsdp=off, or train.optimizer=adamw"
            )
        if self.best_metric == "bleu" and not self.validate_sentences:
            yield (
                "train.best_metric=bleu needs sentences to translate; found "
                "train.validate_sentences=0; raise it, or set train.best_metric=loss"
            )
        if self.target_exact and not self.validate_sentences:
            found = f"train.validate_sentences=0 with train.target_exact={self.target_exact:g}"
            yield (
                f"train.target_exact needs sentences to translate; found {found}; raise the "
                "first, or set the second to 0"
            )
