"""A training run: from a configuration to a model directory."""

from __future__ import annotations

import logging
import shlex
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from dragoman.checkpoint.run_directory import RunDirectory, describe_environment
from dragoman.config import Config, TrainConfig, config_digest, from_dict, require_config, to_dict
from dragoman.config.root_config import TRANSLATE
from dragoman.errors import ConfigError, StoppedError
from dragoman.explain.training_plots import draw_curves
from dragoman.models.factory import build_meta_model, count_parameters
from dragoman.runs.auto_config import (
    MIN_TRAIN_STEPS,
    apply_epochs,
    apply_step_count,
    choose_batch_tokens,
    choose_config,
    has_default_steps,
    limit_steps,
    measure_corpus,
    select_by_loss_of_few,
)
from dragoman.runs.base_training_builder import RunBuilder
from dragoman.runs.final_model_and_card import build_model_card, select_weights
from dragoman.runs.finetune import (
    FINETUNE_EPOCHS,
    INIT_WEIGHTS_FILE,
    PretrainedModel,
    copy_init_weights,
    open_pretrained,
    record_extension,
    require_same_model,
)
from dragoman.runs.measured_resource_estimate import (
    RunEstimate,
    estimate_run,
    measure_random_throughput,
    require_model_fits_memory,
)
from dragoman.runs.non_translation_training_builder import (
    PreparedTask,
    TaskBuilder,
    fit_to_few_examples,
    prepare_task,
)
from dragoman.runs.output_directory_and_resume_checks import (
    DataFile,
    OutputDirectory,
    require_same_files,
)
from dragoman.runs.time_budget import TimeBudget, trained_seconds
from dragoman.runs.translation_data_preparation import PreparedData, open_corpora, prepare_data
from dragoman.runs.translation_training_builder import TranslationBuilder
from dragoman.runtime import signals
from dragoman.runtime.device import (
    CPU,
    describe_hardware,
    select_train_device,
    warn_cpu_fallback,
)
from dragoman.runtime.out_of_memory import is_out_of_memory, release_memory
from dragoman.text.sentencepiece_trainer import VocabularyError
from dragoman.training.distributed.process_group import ProcessGroup, init_process_group
from dragoman.training.progress_display import Progress, QuietProgress
from dragoman.training.trainer import (
    DEADLINE,
    PATIENCE,
    TARGET,
    RecordCallback,
    Trainer,
    TrainResult,
)
from dragoman.training.trainer_state import TrainerState, read_trainer_state

logger = logging.getLogger(__name__)

Prepared = PreparedData | PreparedTask
INIT_PART = "init"  # DataFile.part of the initial weights of a fine-tuning run
VALIDATION_TIME_FRACTION = 0.1  # of a time budget, for validations and checkpoints of a task
_LOW_BLEU = 5  # a model below it has not learnt much
REPORTED_STEP_CHANGE = 0.2  # relative change of the planned steps that is reported


def train(
    config: Config | None,
    out: str | Path,
    *,
    resume: bool = False,
    dry_run: bool = False,
    override: Callable[[Config], Config] | None = None,
    explicit_settings: Collection[str] = (),
    progress: Progress | None = None,
    spent: float = 0.0,
    on_record: RecordCallback | None = None,
    cpu_fallback: bool = True,
) -> Path:
    """Train a model and write its directory; a run in `out` is resumed from its latest checkpoint.

    To resume, `config` may be None and may change only CHANGEABLE_SETTINGS; with `resume` there
    must be a run. With `override`, a configuration is chosen from the corpus, the device and the
    time budget, and `override` applies the given settings to it. A time budget does not change
    `explicit_settings`, such as "train.steps". `spent` is how many seconds of the time budget were
    used before this call. `on_record` is called with every record of the training log; an exception
    that it raises ends the run. Without `cpu_fallback`, a GPU that is out of memory is an error.
    """
    config = require_config(config)
    time_budget = TimeBudget(config.train.time_budget if config else 0.0, spent=spent)
    output_dir = OutputDirectory(out)
    progress = progress or QuietProgress()
    has_run = output_dir.has_run  # tested before the ranks synchronize: rank 0 will start the run
    if has_run:
        resolved = output_dir.resume_config(config, explicit_settings)
        progress.note(f"resuming the run in {output_dir.path}")
    else:
        if config is None or (resume and not output_dir.was_started):
            output_dir.require_resumable()
        assert config is not None, "a directory without a run was rejected above"
        output_dir.require_usable()
        resolved = config
        if resolved.train.init_from:
            require_same_model(resolved, open_pretrained(resolved.train.init_from))
    if resolved.task == TRANSLATE:
        # Raises ConfigError for an invalid list of blocks before the data is prepared.
        model = build_meta_model(
            resolved.model,
            src_vocab_size=resolved.text.vocab_size,
            tgt_vocab_size=resolved.text.vocab_size,
        )
        require_model_fits_memory(count_parameters(model))
    if resolved.train.threads:
        torch.set_num_threads(resolved.train.threads)
    time_budget.seconds = resolved.train.time_budget
    device = select_train_device(resolved.train.device)
    world = ProcessGroup() if dry_run else init_process_group(device)
    progress = progress if world.is_rank_zero else QuietProgress()
    try:
        while True:
            run = TrainingRun(
                resolved,
                output_dir,
                has_run=has_run,
                device=device,
                world=world,
                time_budget=time_budget,
                progress=progress,
                explicit_settings=explicit_settings,
                on_record=on_record,
            )
            # The device comes first, so that nobody trains on a CPU unawares (joeynmt#133).
            progress.note(f"training on {describe_hardware(device, world.size)}")
            try:
                if has_run:
                    run.locate_init_weights()
                elif resolved.train.init_from:
                    run.open_pretrained()
                elif override is not None:
                    run.choose_config(override)
                return run.dry_run() if dry_run else run.execute(request=config)
            except (RuntimeError, MemoryError) as error:
                if (
                    device.type == "cpu"
                    or world.size > 1
                    or not cpu_fallback
                    or not is_out_of_memory(error)
                ):
                    raise
            del run  # frees the model
            release_memory()
            warn_cpu_fallback(device)
            device, has_run = CPU, output_dir.has_run
            if has_run:
                resolved = output_dir.resume_config(config, explicit_settings)
    finally:
        world.close()


class TrainingRun:
    """One training run: prepare the data, train, and write the bundle."""

    def __init__(
        self,
        config: Config,
        output_dir: OutputDirectory,
        *,
        has_run: bool,
        device: torch.device,
        world: ProcessGroup,
        time_budget: TimeBudget,
        progress: Progress,
        explicit_settings: Collection[str] = (),
        on_record: RecordCallback | None = None,
    ) -> None:
        self.config, self.output_dir, self.has_run = config, output_dir, has_run
        self._on_record = on_record
        self.device, self.world, self.time_budget, self.progress, self.explicit_settings = (
            device,
            world,
            time_budget,
            progress,
            explicit_settings,
        )
        self._steps_are_default = "train.steps" not in explicit_settings and has_default_steps(
            output_dir.request() if has_run else config
        )
        self._vocab_size_is_default = False
        self._metric_is_default = False  # chosen by choose_config
        self._epochs = 0.0  # planned, if train.steps is a default and there is no time budget
        self._reported_steps = 0  # planned steps of the last report
        self._pretrained: PretrainedModel | None = None  # of a new fine-tuning run
        self._weights: Path | None = None  # initial weights of a fine-tuning run

    def choose_config(self, override: Callable[[Config], Config]) -> None:
        """Choose vocabulary, model size and schedule; `override` applies the given settings."""

        def choose() -> dict[str, object]:
            chosen = choose_config(
                measure_corpus(open_corpora(self.config.data).train),
                seconds=self.time_budget.seconds,
                measure=lambda config: measure_random_throughput(config, self.device),
                device=self.device.type,
                keep=self.explicit_settings,
            )
            for reason in chosen.reasons:
                self.progress.note(reason)
            return {"config": to_dict(chosen.config), "epochs": chosen.epochs}

        values = self.world.run_on_rank_zero(choose, "choose the configuration")
        base, self._epochs = from_dict(values["config"]), float(values["epochs"])
        self.config = override(base)
        self._steps_are_default = (
            "train.steps" not in self.explicit_settings
            and self.config.train.steps == base.train.steps
            and not self.config.train.epochs
        )
        self._vocab_size_is_default = self.config.text.vocab_size == base.text.vocab_size
        self._metric_is_default = base.train.best_metric == self.config.train.best_metric == "bleu"

    def open_pretrained(self) -> None:
        """Open the model to fine-tune, and choose the batch size for the corpus."""
        origin = self._pretrained = open_pretrained(self.config.train.init_from)
        self._weights, self._epochs = origin.weights, FINETUNE_EPOCHS
        tokens = f"{len(origin.tokenizers.src):,}" + (
            "" if origin.tokenizers.shared_vocab else f" and {len(origin.tokenizers.tgt):,}"
        )
        self.progress.note(
            f"fine-tuning {origin.name}: its architecture, weights and vocabulary of {tokens} "
            "tokens"
        )
        if (
            "train.batch_tokens" not in self.explicit_settings
            and self.config.train.batch_tokens == TrainConfig().batch_tokens
        ):
            size = measure_corpus(open_corpora(self.config.data).train)
            self.config = self.config.replace(
                train={"batch_tokens": choose_batch_tokens(size.tokens, self.device.type)}
            )

    def locate_init_weights(self) -> None:
        """Locate the initial weights of a resumed fine-tuning run; raise if they changed."""
        if self.config.train.init_from:
            self._weights = self.output_dir.training / INIT_WEIGHTS_FILE
            require_same_files(
                [each for each in self.output_dir.data_files() if each.part == INIT_PART],
                [DataFile.of(INIT_PART, self._weights)],
            )

    def execute(self, *, request: Config | None) -> Path:
        """Prepare the data, train, write the bundle, and return its directory."""
        config, output_dir = self.config, self.output_dir
        run = RunDirectory(
            output_dir.training,
            keep_checkpoints=config.train.keep_checkpoints,
            environment=lambda: describe_environment(
                device=str(self.device),
                world=self.world.size,
                deterministic=config.train.deterministic,
            ),
        )
        if self.world.is_rank_zero:
            run.lock()
        try:
            if self._is_already_finished(run):
                return output_dir.path
            with self._status_on_error(run):
                builder = self._run_builder(self._prepare())
                trainer = self._build_trainer(builder, run)
                if not self.has_run:
                    self._start(trainer, builder, request or config)
                elif self.world.is_rank_zero:
                    self.time_budget.spend(trained_seconds(run))
                signals.raise_if_stop_requested()
            run.data_digest, run.config_digest = builder.digest, config_digest(self.config)
            try:
                result = trainer.fit(resume=True)
            except StoppedError as error:
                if not signals.stop_requested():  # another rank was lost
                    raise
                raise self._stopped_error(run, None) from error
            self._report_stop(run, result)
            if self.world.is_rank_zero:
                self._finish(builder, run, result)
                self._report_target(result)
            return output_dir.path
        finally:
            if self.world.is_rank_zero:
                run.close()

    def _report_target(self, result: TrainResult) -> None:
        """Report whether `train.target_exact` was reached, and how to train further if not."""
        target = self.config.train.target_exact
        if not target:
            return
        if result.best.get("exact", 0.0) >= target:
            self.progress.note(
                f"target reached at step {result.step:,}: {_format_exact(result.best)}"
            )
            return
        found = (
            _format_exact(result.metrics)
            if "exact" in result.metrics
            else "no validation sentences were translated"
        )
        fix = f"{self._resume_command()} --set train.steps={2 * result.step}"
        logger.warning(
            "target not reached after %s steps: %s, and train.target_exact is %.0f %%; "
            "train further with: %s",
            f"{result.step:,}",
            found,
            100 * target,
            fix,
        )

    def _report_stop(self, run: RunDirectory, result: TrainResult) -> None:
        """Report an early end of training; raise StoppedError if it was requested."""
        if result.stopped == DEADLINE:
            self.progress.note(f"time budget used up: training ends at step {result.step:,}")
        elif result.stopped == PATIENCE:
            self.progress.note(
                f"no improvement in {self.config.train.patience} validations: "
                f"training ends at step {result.step:,}"
            )
        elif result.stopped and result.stopped != TARGET:
            raise self._stopped_error(run, result.step)
        if not result.step:
            raise self.time_budget.too_short_error()

    def _stopped_error(self, run: RunDirectory, step: int | None) -> StoppedError:
        """Return the error of a stopped run: after `step`, or during a step if that is None."""
        newest = max(run.steps(), default=0)
        if step is None or step > newest:  # a second request, or a disk that failed
            at = f"stopped by {signals.stop_reason() or 'another rank'} without saving"
            saved = (
                f"the latest checkpoint is that of step {newest:,}"
                if newest
                else "there is no checkpoint yet"
            )
        else:
            at, saved = (
                f"stopped at step {step:,}",
                "checkpoint saved" if step else "before the first step",
            )
        fix = f"resume with: {self._resume_command()}"
        return StoppedError(f"{at}, {saved}", found="", fix=fix)

    def _resume_command(self) -> str:
        return f"dragoman train --out {shlex.quote(str(self.output_dir.path))} --resume"

    @contextmanager
    def _status_on_error(self, run: RunDirectory) -> Iterator[None]:
        """Write the state "preparing" into status.json, and an error that ends the preparation."""
        if not self.world.is_rank_zero:
            yield
            return
        run.status(state="preparing", exit_code=None, reason="")
        try:
            yield
        except BaseException as error:
            state = "stopped" if isinstance(error, StoppedError) else "failed"
            run.status(
                state=state,
                exit_code=getattr(error, "exit_code", 1),
                reason=f"{type(error).__name__}: {error}",
            )
            raise

    def _is_already_finished(self, run: RunDirectory) -> bool:
        """Whether the run is finished; report it if so (OpenNMT-py#1364, #886)."""
        newest = (
            next(run.verified_checkpoints(), None)
            if self.has_run and self.output_dir.has_model
            else None
        )
        if newest is None:
            return False
        trainer_state = TrainerState.from_state_dict(read_trainer_state(newest))
        path, train = self.output_dir.path, self.config.train
        if trainer_state.has_reached(train.target_exact):
            state, setting = _format_exact(trainer_state.metrics), "train.target_exact=0"
        elif newest.step < (
            trainer_state.max_steps if self.time_budget.is_limited else train.steps
        ):
            return False
        else:
            state, setting = f"all {newest.step:,} steps done", f"train.steps={2 * newest.step}"
        self.progress.note(f"nothing to do: {path} is finished, {state}")
        self.progress.note(
            f"to train further: {self._resume_command()} --set {setting}; "
            "to train a new model, choose another --out"
        )
        return True

    def dry_run(self) -> Path:
        """Check and estimate the run; only the cache of prepared data is written."""
        output_dir = self.output_dir
        output_dir.require_unlocked()
        with tempfile.TemporaryDirectory(prefix="dragoman-") as folder:
            if not (self.has_run and (output_dir.tokenizer_dir / "text.json").exists()):
                self.output_dir = OutputDirectory(Path(folder))
            prepared = self._prepare_locally(output_dir.data_files() if self.has_run else None)
            builder = self._run_builder(prepared)
            with RunDirectory(
                Path(folder) / "training", keep_checkpoints=self.config.train.keep_checkpoints
            ) as run:
                estimate = self._choose_steps(self._build_trainer(builder, run), builder)
        self._require_time(estimate.throughput.seconds_per_step)
        output_dir.require_disk_space(
            (self.config.train.keep_checkpoints + 1) * estimate.checkpoint_bytes
        )
        self._report_estimate(estimate)
        written = [str(path) for path in prepared.written if path.exists()]
        if written:
            self.progress.note(f"dry run: prepared data is cached in {', '.join(written)}")
        self.progress.note(
            f"dry run: nothing was trained{'' if written else ' and nothing was written'}"
        )
        return output_dir.path

    def _prepare(self) -> Prepared:
        """Prepare the data on rank 0 first; the other ranks read its cache and compare digests."""
        initial_files = self.output_dir.data_files() if self.has_run else None
        if self.world.size == 1:
            return self._prepare_locally(initial_files)
        mine: list[Prepared] = []

        def first() -> str:
            mine.append(self._prepare_locally(initial_files))
            return mine[0].digest

        expected = self.world.run_on_rank_zero(first, "prepare the data")
        if not mine:
            mine.append(self._prepare_locally(initial_files))
        if mine[0].digest != expected:
            raise ConfigError(
                [
                    "all ranks must read the same data; "
                    f"found {mine[0].digest[:12]} and {expected[:12]}; check the files"
                ]
            )
        return mine[0]

    def _prepare_locally(
        self, initial_files: Sequence[DataFile] | None, *, retries: int = 2
    ) -> Prepared:
        """Prepare the data; change a chosen vocabulary size that the text does not allow."""
        if self.config.task != TRANSLATE:
            return prepare_task(
                self.config,
                self.output_dir.tokenizer_dir,
                self.progress,
                initial_files=initial_files,
            )
        try:
            given = self._pretrained.tokenizers if self._pretrained is not None else None
            prepared = prepare_data(
                self.config,
                self.output_dir.tokenizer_dir,
                self.progress,
                initial_files=initial_files,
                given=given,
            )
            if given is not None and self.config.train.extend_vocabulary:
                self.config = record_extension(self.config, given, prepared.tokenizers)
            return prepared
        except VocabularyError as error:
            if not (self._vocab_size_is_default and retries):
                raise
            self.progress.note(f"vocabulary size: {error.allowed:,}, {error.reason}")
            self.config = self.config.replace(text={"vocab_size": error.allowed})
            return self._prepare_locally(initial_files, retries=retries - 1)

    def _run_builder(self, prepared: Prepared) -> RunBuilder:
        if isinstance(prepared, PreparedTask):
            if not self.has_run:
                self.config = fit_to_few_examples(
                    self.config, prepared, keep=self.explicit_settings, progress=self.progress
                )
            return TaskBuilder(self.config, prepared, device=self.device, progress=self.progress)
        if self._metric_is_default and prepared.valid is not None:
            fitted = select_by_loss_of_few(self.config, len(prepared.valid))
            if fitted != self.config:
                self.progress.note(
                    f"checkpoint: of the lowest loss, because {len(prepared.valid)} validation "
                    "sentences are too few for BLEU"
                )
            self.config = fitted
        return TranslationBuilder(
            self.config, prepared, device=self.device, progress=self.progress, weights=self._weights
        )

    def _build_trainer(self, builder: RunBuilder, run: RunDirectory) -> Trainer:
        """Build the trainer; under a time budget it replans its steps at every checkpoint."""
        time_budget = self.time_budget

        def replan(done: int, seconds_per_step: float) -> int:
            """Return the steps that fit into the time left; report a large change."""
            reported, train = self._reported_steps or self.config.train.steps, self.config.train
            most = builder.max_useful_steps() if self._steps_are_default else train.steps
            steps = time_budget.plan_steps(done, seconds_per_step, most=most)
            # Before the first validation the measured throughput is still too high.
            is_measured = done >= train.validate_every
            if is_measured and abs(steps - reported) > REPORTED_STEP_CHANGE * reported:
                throughput = builder.tokens_per_step() / time_budget.seconds_per_step
                self.progress.note(
                    f"throughput {throughput:,.0f} tokens/s with validation and checkpoints: "
                    f"{builder.epochs_of(steps):.1f} epochs ({steps:,} steps) "
                    f"instead of {builder.epochs_of(reported):.1f}"
                )
                self._reported_steps = steps
            return steps

        is_limited = time_budget.is_limited
        return builder.build_trainer(
            run,
            world=self.world,
            deadline=time_budget.seconds_left if is_limited else None,
            replan=replan if is_limited else None,
            on_record=self._on_record,
        )

    def _start(self, trainer: Trainer, builder: RunBuilder, request: Config) -> None:
        """Choose the number of steps, report the estimate, and write the resolved configuration."""
        estimate = self._choose_steps(trainer, builder)
        self.config = from_dict(
            self.world.run_on_rank_zero(
                lambda: self._checked_config(estimate), "resolve the configuration"
            )
        )
        if self.world.is_rank_zero:
            self._report_estimate(estimate)
            files = builder.files
            if self._pretrained is not None:
                train = self.config.train
                self.progress.note(
                    f"schedule: {train.schedule}, peak learning rate {train.learning_rate:.2g}, "
                    f"{train.warmup_steps:,} warm-up steps"
                )
                self._weights = copy_init_weights(self._pretrained, self.output_dir.training)
                files = [*files, DataFile.of(INIT_PART, self._weights)]
            self.output_dir.write(request, self.config, files)
        trainer.reconfigure(self.config.train)
        builder.config, builder.weights = self.config, self._weights

    def _choose_steps(self, trainer: Trainer, builder: RunBuilder) -> RunEstimate:
        """Measure the throughput, and choose default steps by time budget or epochs."""
        if self.time_budget.is_limited and self.world.size == 1:  # ranks must decide alike
            self._require_time(builder.min_step_seconds(trainer.model))
        estimate = estimate_run(
            trainer, builder.plan, self.config, builder.describe_data(), self.device
        )
        if self.config.train.epochs and "train.steps" not in self.explicit_settings:
            self.config = apply_epochs(
                self.config, builder.steps_of(1.0), keep=self.explicit_settings
            )
            builder.config = self.config
            estimate = estimate.with_steps(self.config.train.steps)
        elif self.config.task != TRANSLATE and self._steps_are_default:
            self.config = limit_steps(
                self.config, builder.max_useful_steps(), keep=self.explicit_settings
            )
            builder.config = self.config
            estimate = estimate.with_steps(self.config.train.steps)
        if not self.time_budget.is_limited and not (self._steps_are_default and self._epochs):
            return estimate
        if self.time_budget.is_limited:
            self._require_time(estimate.throughput.seconds_per_step)
            estimate = estimate._replace(
                validation_seconds=builder.validation_seconds(trainer.model)
            )

            def overhead(steps: int) -> float:
                return estimate.overhead(self._with_steps(steps, estimate).train)

            most = (
                builder.max_useful_steps() if self._steps_are_default else self.config.train.steps
            )
            steps = self.time_budget.plan_steps(
                0, estimate.throughput.seconds_per_step, most=most, overhead=overhead
            )
        else:
            steps = max(MIN_TRAIN_STEPS, builder.steps_of(self._epochs))
        self._reported_steps = steps
        if self.config.task != TRANSLATE or self._steps_are_default:
            self.config = self._with_steps(max(1, steps), estimate)
        return estimate.with_steps(steps)

    def _with_steps(self, steps: int, estimate: RunEstimate) -> Config:
        """Return the configuration with a number of steps, and intervals that fit to it."""
        keep = self.explicit_settings
        if self.config.task == TRANSLATE:
            return apply_step_count(self.config, steps, keep=keep)
        validations = 10
        if self.time_budget.is_limited:
            each = estimate.validation_seconds + estimate.checkpoint_seconds
            seconds = VALIDATION_TIME_FRACTION * self.time_budget.seconds_left()
            validations = min(10, max(2, int(seconds / max(each, 1e-3))))
        return limit_steps(self.config, steps, validations=validations, keep=keep)

    def _checked_config(self, estimate: RunEstimate) -> dict[str, object]:
        """Return the configuration as plain values; raise if there is no time for one step."""
        self._require_time(estimate.throughput.seconds_per_step)
        if self._pretrained is not None:
            self.config = self.config.replace(train={"init_from": self._pretrained.name})
        return to_dict(self.config)

    def _require_time(self, seconds_per_step: float) -> None:
        """Raise ConfigError if the time budget leaves no time for even one step."""
        if self.time_budget.is_limited and self.time_budget.seconds_left() < seconds_per_step:
            raise self.time_budget.too_short_error(seconds_per_step)

    def _report_estimate(self, estimate: RunEstimate) -> None:
        for line in estimate.lines():
            self.progress.note(line)

    def _finish(self, builder: RunBuilder, run: RunDirectory, result: TrainResult) -> None:
        """Select the final weights, score them on the validation set, and write the bundle."""
        selected, chosen = select_weights(run, self.config)
        weights = builder.finish(selected)
        scores = builder.score(weights, self.time_budget)
        card = build_model_card(
            self.config,
            data=builder.data_rows(),
            result=result,
            chosen=chosen,
            scores=scores,
            seconds=self.time_budget.elapsed(),
            machine=describe_hardware(self.device, self.world.size),
        )
        fields = {
            "steps": result.step,
            "weights_from": chosen,
            "metrics": dict(result.metrics),
        }
        data = self.config.data
        one_language = bool(data.src_lang) and data.src_lang == data.tgt_lang  # couplets: low BLEU
        if (
            self.time_budget.is_limited
            and not one_language
            and any(each.metric == "BLEU" and each.value < _LOW_BLEU for each in scores)
        ):
            self.progress.note(
                f"BLEU below {_LOW_BLEU}: the model has hardly learnt to translate; train it "
                "longer (--budget), on more pairs, or from a trained model (--init-from)"
            )
        path = self.output_dir.path
        command = builder.write(path, weights, card, fields)
        draw_curves(run.path / "log.jsonl", run.path / "curves.png")
        self.progress.note(f"model written to {path} ({chosen})")
        self.progress.note(f"try: {command.format(model=shlex.quote(str(path)))}")


def _format_exact(metrics: Mapping[str, float]) -> str:
    """Return the fraction of exact translations as text."""
    return f"{100 * metrics['exact']:.0f} % of the validation sentences translated exactly"
