"""The settings of training. Every field has its default, its range and its sentence here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dragoman.config.engine_options import device_problem
from dragoman.config.setting import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How the model is trained."""

    steps: int = setting(100_000, "Updates of the weights.", at_least=1)
    batch_tokens: int = setting(
        25_000, "Padded slots of the longer side in one micro-batch.", at_least=16
    )
    gradient_accumulation: int = setting(
        1, "Micro-batches that make one update, over all ranks.", at_least=1, at_most=100_000
    )
    seed: int = setting(1, "Where all randomness starts.", at_least=0, at_most=2**62)
    optimizer: str = setting("adam", "How gradients become changes.", kind="optimizer")
    learning_rate: float = setting(
        7e-4,
        "The schedule's highest learning rate; for noam, the factor before the paper's formula.",
        at_least=0.0,
        at_most=100.0,
    )
    schedule: str = setting("inverse_sqrt", "How the learning rate moves.", kind="schedule")
    warmup_steps: int = setting(4000, "Updates over which the learning rate rises.", at_least=0)
    cooldown_fraction: float = setting(
        0.2,
        "Share of the updates over which warm-up-stable-decay falls to zero.",
        at_least=0.0,
        at_most=1.0,
    )
    beta1: float = setting(0.9, "Adam's memory of the gradient.", at_least=0.0, at_most=0.9999)
    beta2: float = setting(
        0.98, "Adam's memory of the squared gradient.", at_least=0.0, at_most=0.999999
    )
    epsilon: float = setting(
        1e-9, "What keeps Adam from dividing by zero.", at_least=1e-15, at_most=1.0
    )
    weight_decay: float = setting(
        0.0, "Pull of the matrices towards zero.", at_least=0.0, at_most=10.0
    )
    max_grad_norm: float = setting(
        0.0, "Longest gradient, as a norm; 0 for no limit.", at_least=0.0
    )
    label_smoothing: float = setting(
        0.1, "Probability spread over the wrong pieces.", at_least=0.0, at_most=0.9
    )
    ema_decay: float = setting(
        0.0,
        "Decay of the running average of the weights; 0 for none.",
        at_least=0.0,
        at_most=0.99999,
    )
    average_checkpoints: int = setting(
        1, "Newest checkpoints averaged into the finished model.", at_least=1, at_most=100
    )
    final_checkpoint: str = setting(
        "best", "Which weights the finished model takes.", choices=("best", "last")
    )
    precision: str = setting(
        "auto", "Number format of the products.", choices=("auto", "float32", "bfloat16")
    )
    param_dtype: str = setting(
        "auto",
        "What products in bfloat16 take the weights from: the trained ones, which are float32, or copies rounded before every pass, "
        "between whose layers runs bfloat16; auto rounds a Transformer's on a GPU.",
        choices=("auto", "float32", "bfloat16"),
    )
    compile: str = setting("auto", "Whether the model is compiled.", choices=("auto", "on", "off"))
    cuda_graphs: str = setting(
        "auto",
        "Whether a GPU's launches are recorded for each shape and replayed as one.",
        choices=("auto", "off"),
    )
    fsdp: str = setting(
        "auto",
        "Whether several processes share out weights, gradients and moments, each holding some rows; auto where all would fill half a GPU.",
        choices=("auto", "on", "off"),
    )
    device: str = setting("auto", "Where to run: auto, cpu, cuda or cuda:1, mps.")
    threads: int = setting(0, "CPU threads; 0 for all cores.", at_least=0, at_most=1024)
    checkpoint_every: int = setting(1000, "Updates between checkpoints.", at_least=1)
    keep_checkpoints: int = setting(
        3, "Newest checkpoints kept, besides the best.", at_least=1, at_most=1000
    )
    validate_every: int = setting(1000, "Updates between validations.", at_least=1)
    validate_sentences: int = setting(
        200, "Validation sentences that are also translated and scored; 0 for none.", at_least=0
    )
    best_metric: str = setting(
        "loss", "What the best checkpoint is the best in.", choices=("loss", "bleu")
    )
    target_exact: float = setting(
        0.0,
        "Stop once this fraction of the translated validation sentences equals the reference; 0 disables it.",
        at_least=0.0,
        at_most=1.0,
    )
    patience: int = setting(
        0, "Validations without improvement after which training stops; 0 for never.", at_least=0
    )
    init_from: str = setting(
        "",
        "Model directory to fine-tune: its architecture, tokenizer and weights; a finished model records its base name and digest.",
    )
    time_budget: float = setting(
        0.0, "Seconds that the whole run may take; 0 for no limit.", at_least=0.0
    )
    deterministic: bool = setting(
        False, "Whether a GPU must give the same bits each time, and slower."
    )
    tensorboard: bool = setting(False, "Whether curves are also written for TensorBoard.")

    def problems(self) -> Iterator[str]:
        """Say what is wrong between fields."""
        if problem := device_problem(self.device):
            yield problem
        if self.average_checkpoints > self.keep_checkpoints:
            found = f"train.average_checkpoints={self.average_checkpoints} and train.keep_checkpoints={self.keep_checkpoints}"
            yield f"train.average_checkpoints needs that many kept checkpoints; found {found}; raise train.keep_checkpoints"
        if self.best_metric == "bleu" and not self.validate_sentences:
            yield "train.best_metric=bleu needs sentences to translate; found train.validate_sentences=0; raise it, or set train.best_metric=loss"
        if self.target_exact and not self.validate_sentences:
            found = f"train.validate_sentences=0 with train.target_exact={self.target_exact:g}"
            yield f"train.target_exact needs sentences to translate; found {found}; raise the first, or set the second to 0"
