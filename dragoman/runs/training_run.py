"""A whole run: from a configuration to a model directory."""

from __future__ import annotations

import logging
import shlex
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from dragoman.bundle import CardScore, write_bundle
from dragoman.bundle.bundle import build_loaded_model
from dragoman.checkpoint.run_directory import RunDirectory, describe_environment
from dragoman.config import Config, TrainConfig, config_digest, from_dict, require_config, to_dict
from dragoman.errors import ConfigError, StoppedError
from dragoman.evaluate.metrics import score_translations
from dragoman.models.factory import build_meta_model, count_parameters
from dragoman.runs.auto_config import (
    MIN_TRAIN_STEPS,
    apply_step_count,
    choose_batch_tokens,
    choose_config,
    has_default_steps,
    measure_corpus,
)
from dragoman.runs.builder import RunBuilder
from dragoman.runs.data_preparation import PreparedData, open_corpora, prepare_data
from dragoman.runs.estimate import (
    RunEstimate,
    estimate_run,
    estimate_validation_seconds,
    measure_random_throughput,
    require_model_fits_memory,
)
from dragoman.runs.final_model import (
    build_model_card,
    select_golden_sentences,
    select_scored_sentences,
    select_weights,
)
from dragoman.runs.finetune import FINETUNE_EPOCHS as FINETUNING_EPOCHS
from dragoman.runs.finetune import (
    INIT_WEIGHTS_FILE,
    PretrainedModel,
    copy_init_weights,
    open_pretrained,
    require_same_model,
)
from dragoman.runs.output_directory import DataFile, OutputDirectory, require_same_files
from dragoman.runs.time_budget import TimeBudget, trained_seconds
from dragoman.runs.training_curves import draw_curves
from dragoman.runtime import signals
from dragoman.runtime.device import (
    describe_hardware,
    run_with_cpu_fallback,
    select_train_device,
)
from dragoman.text.sentencepiece_trainer import VocabularyError
from dragoman.training.distributed.process_group import ProcessGroup, init_process_group
from dragoman.training.progress import Progress, QuietProgress
from dragoman.training.train_state import TrainState, read_train_state
from dragoman.training.trainer import DEADLINE, PATIENCE, TARGET, Trainer, TrainResult

logger = logging.getLogger(__name__)

INIT_PART = "init"  # the part of DataFile that the weights of a fine-tuned model are
REPORTED_STEP_CHANGE = 0.2  # how far from what was announced the steps of a time budget may move without a line of the log


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
) -> Path:
    """Train a translator and write its directory; running the same again after an interruption resumes where it stopped.

    A run that was begun in `out` is resumed, with `resume` or without; then `config` may be None and must not differ in what
    makes the run. With `resume` there must be one. With `over`, a configuration is fitted to the corpus and the machine first,
    and `over` lays what was asked for over it; `asked` are the settings that were named, such as "train.steps", which a time
    budget leaves alone. `spent` is how many seconds of a time budget were gone before this call.
    """
    config = require_config(config)
    time_budget = TimeBudget(config.train.time_budget if config else 0.0, spent=spent)
    output_dir = OutputDirectory(out)
    progress = progress or QuietProgress()
    has_run = output_dir.has_run  # asked once, before the ranks meet: the first of them will begin the run while the others still look
    if has_run:
        resolved = output_dir.resume_config(config, explicit_settings)
        progress.note(f"resuming the run in {output_dir.out}")
    else:
        if config is None or (resume and not output_dir.was_started):
            output_dir.require_resumable()
        assert config is not None, "a directory without a run was rejected above"
        output_dir.require_usable()
        resolved = config
        if resolved.train.init_from:
            require_same_model(resolved, open_pretrained(resolved.train.init_from))
    # A list of blocks that makes no model is refused before anything is prepared.
    model = build_meta_model(
        resolved.model,
        src_vocab_size=resolved.text.vocab_size,
        tgt_vocab_size=resolved.text.vocab_size,
    )
    require_model_fits_memory(count_parameters(model))
    if resolved.train.threads:
        torch.set_num_threads(resolved.train.threads)
    time_budget.budget = resolved.train.time_budget
    device = select_train_device(resolved.train.device)
    world = ProcessGroup() if dry_run else init_process_group(device)
    shown = progress if world.is_rank_zero else QuietProgress()

    def run_on(where: torch.device) -> Path:
        elsewhere = where != device  # after an attempt that may have begun the run
        was_started = output_dir.has_run if elsewhere else has_run
        chosen = (
            output_dir.resume_config(config, explicit_settings)
            if elsewhere and was_started
            else resolved
        )
        run = _TrainingRun(
            chosen,
            output_dir,
            has_run=was_started,
            device=where,
            world=world,
            time_budget=time_budget,
            progress=shown,
            explicit_settings=explicit_settings,
        )
        # Named on the first line, so that nobody trains on a CPU beside an idle GPU without knowing (joeynmt#133).
        shown.note(f"training on {describe_hardware(where, world.size)}")
        if was_started:
            run.locate_init_weights()
        elif resolved.train.init_from:
            run.finetune()
        elif override is not None:
            run.fit(override)
        return run.dry_run() if dry_run else run.execute(request=config)

    try:
        return run_with_cpu_fallback(device, run_on) if world.size == 1 else run_on(device)
    finally:
        world.close()


class _TrainingRun:
    """One run, taken apart into its stages."""

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
    ) -> None:
        self.config, self.output_dir, self.has_run = config, output_dir, has_run
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
        self._epochs = 0.0  # how often a fitted run sees its corpus, without a time budget
        self._announced = 0  # steps that the estimate named
        self._pretrained: PretrainedModel | None = None  # the model that a new run fine-tunes ...
        self._weights: Path | None = None  # ... and the weights that it starts from

    def fit(self, override: Callable[[Config], Config]) -> None:
        """Choose what nobody named: vocabulary, size, schedule."""

        def choose() -> dict[str, object]:
            found = choose_config(
                measure_corpus(open_corpora(self.config.data).train),
                seconds=self.time_budget.budget,
                measure=lambda config: measure_random_throughput(config, self.device),
                device=self.device.type,
            )
            for reason in found.reasons:
                self.progress.note(reason)
            return {"config": to_dict(found.config), "epochs": found.epochs}

        chosen = self.world.run_on_rank_zero(choose, "fit the model to the corpus and the machine")
        base, self._epochs = from_dict(chosen["config"]), float(chosen["epochs"])
        self.config = override(base)
        self._steps_are_default = (
            "train.steps" not in self.explicit_settings
            and self.config.train.steps == base.train.steps
        )
        self._vocab_size_is_default = self.config.text.vocab_size == base.text.vocab_size

    def finetune(self) -> None:
        """Open the model that training starts from, and fit the batches to the corpus; the steps follow its size or the time."""
        origin = self._pretrained = open_pretrained(self.config.train.init_from)
        self._weights, self._epochs = origin.weights, FINETUNING_EPOCHS
        tokens = f"{len(origin.tokenizers.src):,}" + (
            "" if origin.tokenizers.shared_vocab else f" and {len(origin.tokenizers.tgt):,}"
        )
        self.progress.note(
            f"fine-tuning {origin.name}: its architecture, its tokenizer of {tokens} tokens and its weights"
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
        """Find the weights that a begun run was fine-tuned from, as they were."""
        if self.config.train.init_from:
            self._weights = self.output_dir.training / INIT_WEIGHTS_FILE
            require_same_files(
                [each for each in self.output_dir.data() if each.part == INIT_PART],
                [DataFile.of(INIT_PART, self._weights)],
            )

    def execute(self, *, request: Config | None) -> Path:
        """Prepare, train, finish."""
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
                return output_dir.out
            with self._status_on_error(run):
                prepared = self._prepare()
                if not self.has_run:
                    self._record_start(
                        self._trainer(prepared, run), prepared, request or self.config
                    )
                elif self.world.is_rank_zero:
                    self.time_budget.spend(trained_seconds(run))
                signals.raise_if_stop_requested()
            run.data_digest, run.config_digest = prepared.digest, config_digest(self.config)
            result = self._train(prepared, run)
            if not result.step:
                raise self.time_budget.too_short_error()
            if self.world.is_rank_zero:
                self._finish(prepared, run, result)
                self._report_target(result)
            return output_dir.out
        finally:
            if self.world.is_rank_zero:
                run.close()

    def _report_target(self, result: TrainResult) -> None:
        """Report whether a run that was to reach `train.target_exact` did, and how to train on where it did not."""
        target = self.config.train.target_exact
        if not target:
            return
        if result.best.get("exact", 0.0) >= target:
            self.progress.note(f"learnt at step {result.step:,}: {_format_exact(result.best)}")
            return
        found = (
            _format_exact(result.metrics)
            if "exact" in result.metrics
            else "there were no validation sentences to translate"
        )
        fix = f"dragoman train --out {shlex.quote(str(self.output_dir.out))} --resume --set train.steps={2 * result.step}"
        logger.warning(
            "not learnt after %s steps: %s, and train.target_exact is %.0f %%; more steps: %s",
            f"{result.step:,}",
            found,
            100 * target,
            fix,
        )

    def _train(self, prepared: PreparedData, run: RunDirectory) -> TrainResult:
        """Train to the end; raise StoppedError that tells how to resume where somebody asked to stop."""
        try:
            result = self._trainer(prepared, run).fit(resume=True)
        except StoppedError as error:
            if not signals.stop_requested():  # another rank was lost
                raise
            raise self._stopped_error(run, None) from error
        if result.stopped == DEADLINE:
            self.progress.note(f"time budget used up: training ends at step {result.step:,}")
        elif result.stopped == PATIENCE:
            self.progress.note(
                f"no improvement in {self.config.train.patience} validations: training ends at step {result.step:,}"
            )
        elif result.stopped and result.stopped != TARGET:
            raise self._stopped_error(run, result.step)
        return result

    def _stopped_error(self, run: RunDirectory, step: int | None) -> StoppedError:
        """Return the error of a run that was asked to stop: after `step`, or within one where that is None."""
        newest = max(run.steps(), default=0)
        if step is None or step > newest:  # a second request, or a disk that failed
            at = f"stopped by {signals.stop_reason() or 'another rank'} without saving"
            saved = (
                f"the newest checkpoint is that of step {newest:,}"
                if newest
                else "there is no checkpoint yet"
            )
        else:
            at, saved = (
                f"stopped at step {step:,}",
                "checkpoint saved" if step else "before the first step",
            )
        again = (
            f"resume with: dragoman train --out {shlex.quote(str(self.output_dir.out))} --resume"
        )
        return StoppedError(f"{at}, {saved}", found="", fix=again)

    @contextmanager
    def _status_on_error(self, run: RunDirectory) -> Iterator[None]:
        """Write into status.json that the run prepares, and how that ended if it did not end well."""
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
        """Say so where a run is finished: a command that silently does nothing is a riddle (OpenNMT-py#1364, #886)."""
        newest = (
            next(run.verified_checkpoints(), None)
            if self.has_run and self.output_dir.finished
            else None
        )
        if newest is None:
            return False
        train_state = TrainState.from_state_dict(read_train_state(newest))
        if train_state.has_reached(self.config.train.target_exact):
            self.progress.note(
                f"nothing to do: {self.output_dir.out} is finished, {_format_exact(train_state.metrics)}"
            )
            self.progress.note(
                f"to train it further: dragoman train --out {self.output_dir.out} --resume --set train.target_exact=0"
            )
            return True
        if newest.step < (
            train_state.max_steps if self.time_budget.is_limited else self.config.train.steps
        ):
            return False
        more = f"dragoman train --out {self.output_dir.out} --resume --set train.steps={2 * newest.step}"
        self.progress.note(
            f"nothing to do: {self.output_dir.out} is finished, with all {newest.step:,} updates made"
        )
        self.progress.note(f"to train it further: {more}; to begin anew, choose another --out")
        return True

    def dry_run(self) -> Path:
        """Check what the run would check and estimate what it takes; nothing but the cache of prepared data is written."""
        output_dir = self.output_dir
        output_dir.require_unlocked()
        with tempfile.TemporaryDirectory(prefix="dragoman-") as folder:
            if not (self.has_run and (output_dir.text / "text.json").exists()):
                self.output_dir = OutputDirectory(Path(folder))
            prepared = self._prepare_locally(output_dir.data() if self.has_run else None)
            with RunDirectory(
                Path(folder) / "training", keep_checkpoints=self.config.train.keep_checkpoints
            ) as run:
                estimate = self._choose_steps(self._trainer(prepared, run), prepared)
        self._require_time(estimate)
        output_dir.require_disk_space(
            (self.config.train.keep_checkpoints + 1) * estimate.checkpoint
        )
        self._report_estimate(estimate)
        written = [
            path for path in prepared.written if path.exists()
        ]  # where there is no cache, what was made is gone
        if written:
            self.progress.note(
                f"dry run: prepared data was written, for the run to use: {', '.join(map(str, written))}"
            )
        self.progress.note(
            f"dry run: nothing was trained{'' if written else ' and nothing was written'}"
        )
        return output_dir.out

    def _prepare(self) -> PreparedData:
        """Prepare on rank 0 first, so that the others find everything ready, and compare what each has."""
        initial_files = self.output_dir.data() if self.has_run else None
        if self.world.size == 1:
            return self._prepare_locally(initial_files)
        mine: list[PreparedData] = []

        def first() -> str:
            mine.append(self._prepare_locally(initial_files))
            return mine[0].digest

        expected = self.world.run_on_rank_zero(first, "prepare the data")
        if not mine:
            mine.append(self._prepare_locally(initial_files))
        if mine[0].digest != expected:
            raise ConfigError(
                [
                    f"all ranks must read the same data; found {mine[0].digest[:12]} and {expected[:12]}; check the files"
                ]
            )
        return mine[0]

    def _prepare_locally(self, initial_files: Sequence[DataFile] | None) -> PreparedData:
        """Prepare in this process; a vocabulary that was fitted, and is more than the text allows, is made smaller."""
        try:
            given = self._pretrained.tokenizers if self._pretrained is not None else None
            return prepare_data(
                self.config,
                self.output_dir.text,
                self.progress,
                initial_files=initial_files,
                given=given,
            )
        except VocabularyError as error:
            if not self._vocab_size_is_default:
                raise
            self.progress.note(f"vocabulary: {error.largest:,} pieces, all that this corpus allows")
            self.config = self.config.replace(text={"vocab_size": error.largest})
            return self._prepare_locally(initial_files)

    def _builder(self, prepared: PreparedData) -> RunBuilder:
        """Make ready to put together what the configuration says now."""
        return RunBuilder(
            self.config, prepared, device=self.device, progress=self.progress, weights=self._weights
        )

    def _trainer(self, prepared: PreparedData, run: RunDirectory) -> Trainer:
        """Put model, data and loop together, with an eye on the clock where there is a limit."""
        builder, time_budget = self._builder(prepared), self.time_budget
        announced = self._announced or self.config.train.steps

        def replan(done: int, pace: float) -> int:
            """Fit the steps to the time that is left; log it where that is far from what was announced."""
            nonlocal announced
            most = (
                builder.max_useful_steps() if self._steps_are_default else self.config.train.steps
            )
            steps = time_budget.plan_steps(done, pace, most=most)
            # Before the first validation the throughput is still too high.
            if (
                done >= self.config.train.validate_every
                and abs(steps - announced) > REPORTED_STEP_CHANGE * announced
            ):
                epochs = [f"{builder.epochs(each):.1f}" for each in (steps, announced)]
                rate = f"{builder.tokens_per_step() / time_budget.seconds_per_step:,.0f} tokens/s with validations and checkpoints"
                self.progress.note(
                    f"measured throughput {rate}: {epochs[0]} epochs ({steps:,} steps) instead of {epochs[1]}"
                )
                announced = steps
            return steps

        is_limited = time_budget.is_limited
        return builder.trainer(
            run,
            world=self.world,
            deadline=time_budget.seconds_left if is_limited else None,
            replan=replan if is_limited else None,
        )

    def _record_start(self, trainer: Trainer, prepared: PreparedData, request: Config) -> None:
        """Settle the number of steps, say what will happen, and record what was settled."""
        estimate = self._choose_steps(trainer, prepared)
        self.config = from_dict(
            self.world.run_on_rank_zero(
                lambda: self._checked_config(estimate), "settle the configuration"
            )
        )
        if self.world.is_rank_zero:
            self._report_estimate(estimate)
            files = prepared.files
            if self._pretrained is not None:
                train = self.config.train
                schedule = f"{train.schedule}, {train.warmup_steps:,} steps of warm-up"
                self.progress.note(
                    f"schedule: learning rate {train.learning_rate:.2g} at its peak, {schedule}"
                )
                self._weights = copy_init_weights(self._pretrained, self.output_dir.training)
                files = [*files, DataFile.of(INIT_PART, self._weights)]
            self.output_dir.write(request, self.config, files)

    def _choose_steps(self, trainer: Trainer, prepared: PreparedData) -> RunEstimate:
        """Measure the throughput and fit the steps to the time, or to the epochs, where nobody named them."""
        builder = self._builder(prepared)
        estimate = estimate_run(trainer, builder.plan, self.config, prepared, self.device)
        if not self.time_budget.is_limited and not (self._steps_are_default and self._epochs):
            return estimate
        if self.time_budget.is_limited:
            estimate = estimate._replace(
                validation=estimate_validation_seconds(builder.validation(), trainer.model)
            )

            def overhead(steps: int) -> float:
                return estimate.overhead(
                    apply_step_count(self.config, steps, keep=self.explicit_settings).train
                )

            most = (
                builder.max_useful_steps() if self._steps_are_default else self.config.train.steps
            )
            steps = self.time_budget.plan_steps(
                0, estimate.throughput.seconds_per_step, most=most, overhead=overhead
            )
        else:
            steps = max(
                MIN_TRAIN_STEPS,
                round(
                    self._epochs * builder.plan.batches(0) / self.config.train.gradient_accumulation
                ),
            )
        self._announced = steps
        if self._steps_are_default:
            self.config = apply_step_count(self.config, max(1, steps), keep=self.explicit_settings)
        return estimate.with_steps(steps)

    def _checked_config(self, estimate: RunEstimate) -> dict[str, object]:
        """Return the configuration as plain values, unless there is no time for even one step."""
        self._require_time(estimate)
        if self._pretrained is not None:
            self.config = self.config.replace(train={"init_from": self._pretrained.name})
        return to_dict(self.config)

    def _require_time(self, estimate: RunEstimate) -> None:
        """Raise ConfigError if the time budget leaves no time for even one step."""
        if (
            self.time_budget.is_limited
            and self.time_budget.seconds_left() < estimate.throughput.seconds_per_step
        ):
            raise self.time_budget.too_short_error()

    def _report_estimate(self, estimate: RunEstimate) -> None:
        for line in estimate.lines():
            self.progress.note(line)

    def _finish(self, prepared: PreparedData, run: RunDirectory, result: TrainResult) -> None:
        """Choose the weights, score them on the validation sentences, and write the bundle."""
        weights, chosen = select_weights(run, self.config)
        scores = self._score(prepared, self._builder(prepared), weights)
        machine = describe_hardware(self.device, self.world.size)
        card = build_model_card(
            self.config,
            prepared=prepared,
            result=result,
            chosen=chosen,
            scores=scores,
            seconds=self.time_budget.elapsed(),
            machine=machine,
        )
        manifest_fields = {
            "steps": result.step,
            "weights_from": chosen,
            "metrics": dict(result.metrics),
        }
        golden = select_golden_sentences(prepared)
        write_bundle(
            self.output_dir.out,
            config=self.config,
            tokenizers=prepared.tokenizers,
            weights=weights,
            card=card,
            golden=golden,
            manifest_fields=manifest_fields,
        )
        draw_curves(run.path / "log.jsonl", run.path / "curves.png")
        self.progress.note(
            f'{self.output_dir.out} is ready ({chosen}); try: dragoman translate -m {shlex.quote(str(self.output_dir.out))} "…"'
        )

    def _score(
        self, prepared: PreparedData, builder: RunBuilder, weights: dict[str, Tensor]
    ) -> list[CardScore]:
        """Translate validation sentences as the finished model will, as many as there is time for."""
        model = build_loaded_model(self.config, prepared.tokenizers, weights).to(self.device)
        began, trial = time.monotonic(), prepared.sentences[:32]
        builder.translate(model, [pair.src for pair in trial])
        pairs = select_scored_sentences(
            prepared.sentences, self.time_budget, (time.monotonic() - began) / max(1, len(trial))
        )
        if not pairs:
            return []
        found = score_translations(
            builder.translate(model, [pair.src for pair in pairs]),
            [pair.tgt for pair in pairs],
            tgt_lang=self.config.data.tgt_lang,
        )
        on = f"validation, {'all' if len(pairs) == len(prepared.sentences) else 'the first'} {len(pairs):,} pairs"
        self.progress.note(f"{on}: {', '.join(f'{each.name} {each.value:.1f}' for each in found)}")
        return [CardScore(each.name, each.value, each.signature, on) for each in found]


def _format_exact(metrics: Mapping[str, float]) -> str:
    """Return how many validation sentences are right, in words."""
    return f"{100 * metrics['exact']:.0f} % of the validation sentences translated exactly"
