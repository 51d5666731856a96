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

from dragoman import stopping
from dragoman.bundle import Score as CardScore
from dragoman.bundle import write_bundle
from dragoman.bundle.loading import assemble
from dragoman.config import Config, TrainConfig, config_digest, from_dict, require_config, to_dict
from dragoman.errors import ConfigError, StoppedError
from dragoman.evaluate.scoring import score
from dragoman.models.build import build_meta_model, count_parameters
from dragoman.runs.assembling import Assembly
from dragoman.runs.clock import Clock, seconds_spent
from dragoman.runs.finetune import COPY, Origin, keep_weights, open_origin, require_same_model
from dragoman.runs.finetune import EPOCHS as FINETUNING_EPOCHS
from dragoman.runs.finish import choose_weights, golden_texts, make_card, sentences_to_score
from dragoman.runs.fitting import FEWEST_STEPS, fit, fitting_batch, paced, steps_are_open
from dragoman.runs.forecast import Forecast, forecast, validation_seconds
from dragoman.runs.machine import machine_name, require_memory, take_device
from dragoman.runs.pace import measure_pace
from dragoman.runs.place import DataFile, Place, require_same
from dragoman.runs.prepare import Prepared, open_corpora, prepare
from dragoman.runs.survey import survey
from dragoman.text.learning import VocabularyError
from dragoman.training.checkpoint import RunDirectory
from dragoman.training.curves import draw_curves
from dragoman.training.distributed import World, join_world
from dragoman.training.environment import describe_environment
from dragoman.training.interlude import DEADLINE, PATIENCE, TARGET
from dragoman.training.loop import Result, Trainer
from dragoman.training.progress import Progress, QuietProgress
from dragoman.training.standing import Standing
from dragoman.translator.device import where_it_fits

logger = logging.getLogger(__name__)

INIT = "init"  # the part of DataFile that the weights of a fine-tuned model are
CORRECTED = 0.2  # how far from what was announced the steps of a time budget may move without a line of the log


def train(
    config: Config | None,
    out: str | Path,
    *,
    resume: bool = False,
    dry_run: bool = False,
    over: Callable[[Config], Config] | None = None,
    asked: Collection[str] = (),
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
    clock = Clock(config.train.budget if config else 0.0, spent=spent)
    place = Place(out)
    progress = progress or QuietProgress()
    begun = place.begun  # asked once, before the ranks meet: the first of them will begin the run while the others still look
    if begun:
        settled = place.go_on(config, asked)
        progress.note(f"resuming the run in {place.out}")
    else:
        if config is None or (resume and not place.started):
            place.require_resumable()
        assert config is not None, "a directory without a run was rejected above"
        place.check_empty_enough()
        settled = config
        if settled.train.init_from:
            require_same_model(settled, open_origin(settled.train.init_from))
    # A list of blocks that makes no model is refused before anything is prepared.
    model = build_meta_model(settled.model, src_vocabulary=settled.text.vocabulary, tgt_vocabulary=settled.text.vocabulary)
    require_memory(count_parameters(model))
    if settled.train.threads:
        torch.set_num_threads(settled.train.threads)
    clock.budget = settled.train.budget
    device = take_device(settled.train.device)
    world = World() if dry_run else join_world(device)
    shown = progress if world.leads else QuietProgress()

    def run_on(where: torch.device) -> Path:
        elsewhere = where != device  # after an attempt that may have begun the run
        started = place.begun if elsewhere else begun
        chosen = place.go_on(config, asked) if elsewhere and started else settled
        run = _Run(chosen, place, begun=started, device=where, world=world, clock=clock, progress=shown, asked=asked)
        # Named on the first line, so that nobody trains on a CPU beside an idle GPU without knowing (joeynmt#133).
        shown.note(f"training on {machine_name(where, world.size)}")
        if started:
            run.take_up()
        elif settled.train.init_from:
            run.finetune()
        elif over is not None:
            run.fit(over)
        return run.rehearse() if dry_run else run.go(request=config)

    try:
        return where_it_fits(device, run_on) if world.size == 1 else run_on(device)
    finally:
        world.close()


class _Run:
    """One run, taken apart into its stages."""

    def __init__(
        self,
        config: Config,
        place: Place,
        *,
        begun: bool,
        device: torch.device,
        world: World,
        clock: Clock,
        progress: Progress,
        asked: Collection[str] = (),
    ) -> None:
        self.config, self.place, self.begun = config, place, begun
        self.device, self.world, self.clock, self.progress, self.asked = device, world, clock, progress, asked
        self._steps_open = "train.steps" not in asked and steps_are_open(place.request() if begun else config)
        self._vocabulary_open = False
        self._epochs = 0.0  # how often a fitted run sees its corpus, without a time budget
        self._announced = 0  # steps that the estimate named
        self._origin: Origin | None = None  # the model that a new run fine-tunes ...
        self._weights: Path | None = None  # ... and the weights that it starts from

    def fit(self, over: Callable[[Config], Config]) -> None:
        """Choose what nobody named: vocabulary, size, schedule."""

        def choose() -> dict[str, object]:
            found = fit(
                survey(open_corpora(self.config.data).train),
                seconds=self.clock.budget,
                measure=lambda config: measure_pace(config, self.device),
                device=self.device.type,
            )
            for reason in found.reasons:
                self.progress.note(reason)
            return {"config": to_dict(found.config), "epochs": found.epochs}

        chosen = self.world.share(choose, "fit the model to the corpus and the machine")
        base, self._epochs = from_dict(chosen["config"]), float(chosen["epochs"])
        self.config = over(base)
        self._steps_open = "train.steps" not in self.asked and self.config.train.steps == base.train.steps
        self._vocabulary_open = self.config.text.vocabulary == base.text.vocabulary

    def finetune(self) -> None:
        """Open the model that training starts from, and fit the batches to the corpus; the steps follow its size or the time."""
        origin = self._origin = open_origin(self.config.train.init_from)
        self._weights, self._epochs = origin.weights, FINETUNING_EPOCHS
        tokens = f"{len(origin.tokenizers.src):,}" + ("" if origin.tokenizers.joint else f" and {len(origin.tokenizers.tgt):,}")
        self.progress.note(f"fine-tuning {origin.name}: its architecture, its tokenizer of {tokens} tokens and its weights")
        if "train.batch_tokens" not in self.asked and self.config.train.batch_tokens == TrainConfig().batch_tokens:
            size = survey(open_corpora(self.config.data).train)
            self.config = self.config.replace(train={"batch_tokens": fitting_batch(size.tokens, self.device.type)})

    def take_up(self) -> None:
        """Find the weights that a begun run was fine-tuned from, as they were."""
        if self.config.train.init_from:
            self._weights = self.place.training / COPY
            require_same([each for each in self.place.data() if each.part == INIT], [DataFile.of(INIT, self._weights)])

    def go(self, *, request: Config | None) -> Path:
        """Prepare, train, finish."""
        config, place = self.config, self.place
        run = RunDirectory(
            place.training,
            keep=config.train.keep,
            environment=lambda: describe_environment(
                device=str(self.device), world=self.world.size, deterministic=config.train.deterministic
            ),
        )
        if self.world.leads:
            run.lock()
        try:
            if self._nothing_left(run):
                return place.out
            with self._telling(run):
                prepared = self._prepare()
                if not self.begun:
                    self._begin(self._trainer(prepared, run), prepared, request or self.config)
                elif self.world.leads:
                    self.clock.spend(seconds_spent(run))
                stopping.raise_if_requested()
            run.data_digest, run.config_digest = prepared.digest, config_digest(self.config)
            result = self._train(prepared, run)
            if not result.step:
                raise self.clock.too_short()
            if self.world.leads:
                self._finish(prepared, run, result)
                self._report_target(result)
            return place.out
        finally:
            if self.world.leads:
                run.close()

    def _report_target(self, result: Result) -> None:
        """Report whether a run that was to reach `train.target_exact` did, and how to train on where it did not."""
        target = self.config.train.target_exact
        if not target:
            return
        if result.best.get("exact", 0.0) >= target:
            self.progress.note(f"learnt at step {result.step:,}: {_exact(result.best)}")
            return
        found = _exact(result.metrics) if "exact" in result.metrics else "there were no validation sentences to translate"
        fix = f"dragoman train --out {shlex.quote(str(self.place.out))} --resume --set train.steps={2 * result.step}"
        logger.warning(
            "not learnt after %s steps: %s, and train.target_exact is %.0f %%; more steps: %s",
            f"{result.step:,}",
            found,
            100 * target,
            fix,
        )

    def _train(self, prepared: Prepared, run: RunDirectory) -> Result:
        """Train to the end; raise StoppedError that tells how to resume where somebody asked to stop."""
        try:
            result = self._trainer(prepared, run).run(resume=True)
        except StoppedError as error:
            if not stopping.requested():  # another rank was lost
                raise
            raise self._stopped(run, None) from error
        if result.stopped == DEADLINE:
            self.progress.note(f"time budget used up: training ends at step {result.step:,}")
        elif result.stopped == PATIENCE:
            self.progress.note(f"no improvement in {self.config.train.patience} validations: training ends at step {result.step:,}")
        elif result.stopped and result.stopped != TARGET:
            raise self._stopped(run, result.step)
        return result

    def _stopped(self, run: RunDirectory, step: int | None) -> StoppedError:
        """Return the error of a run that was asked to stop: after `step`, or within one where that is None."""
        newest = max(run.steps(), default=0)
        if step is None or step > newest:  # a second request, or a disk that failed
            at = f"stopped by {stopping.reason() or 'another rank'} without saving"
            saved = f"the newest checkpoint is that of step {newest:,}" if newest else "there is no checkpoint yet"
        else:
            at, saved = f"stopped at step {step:,}", "checkpoint saved" if step else "before the first step"
        again = f"resume with: dragoman train --out {shlex.quote(str(self.place.out))} --resume"
        return StoppedError(f"{at}, {saved}", found="", fix=again)

    @contextmanager
    def _telling(self, run: RunDirectory) -> Iterator[None]:
        """Write into status.json that the run prepares, and how that ended if it did not end well."""
        if not self.world.leads:
            yield
            return
        run.status(state="preparing", exit_code=None, reason="")
        try:
            yield
        except BaseException as error:
            state = "stopped" if isinstance(error, StoppedError) else "failed"
            run.status(state=state, exit_code=getattr(error, "exit_code", 1), reason=f"{type(error).__name__}: {error}")
            raise

    def _nothing_left(self, run: RunDirectory) -> bool:
        """Say so where a run is finished: a command that silently does nothing is a riddle (OpenNMT-py#1364, #886)."""
        newest = next(run.verified(), None) if self.begun and self.place.finished else None
        if newest is None:
            return False
        standing = Standing.from_state(newest.standing)
        if standing.reached(self.config.train.target_exact):
            self.progress.note(f"nothing to do: {self.place.out} is finished, {_exact(standing.metrics)}")
            self.progress.note(f"to train it further: dragoman train --out {self.place.out} --resume --set train.target_exact=0")
            return True
        if newest.step < (standing.steps if self.clock.limited else self.config.train.steps):
            return False
        more = f"dragoman train --out {self.place.out} --resume --set train.steps={2 * newest.step}"
        self.progress.note(f"nothing to do: {self.place.out} is finished, with all {newest.step:,} updates made")
        self.progress.note(f"to train it further: {more}; to begin anew, choose another --out")
        return True

    def rehearse(self) -> Path:
        """Check what the run would check and estimate what it takes; nothing but the cache of prepared data is written."""
        place = self.place
        place.require_free()
        with tempfile.TemporaryDirectory(prefix="dragoman-") as folder:
            if not (self.begun and (place.text / "text.json").exists()):
                self.place = Place(Path(folder))
            prepared = self._prepare_here(place.data() if self.begun else None)
            with RunDirectory(Path(folder) / "training", keep=self.config.train.keep) as run:
                estimate = self._settle_steps(self._trainer(prepared, run), prepared)
        self._require_time(estimate)
        place.require_room((self.config.train.keep + 1) * estimate.checkpoint)
        self._tell(estimate)
        written = [path for path in prepared.written if path.exists()]  # where there is no cache, what was made is gone
        if written:
            self.progress.note(f"dry run: prepared data was written, for the run to use: {', '.join(map(str, written))}")
        self.progress.note(f"dry run: nothing was trained{'' if written else ' and nothing was written'}")
        return place.out

    def _prepare(self) -> Prepared:
        """Prepare on rank 0 first, so that the others find everything ready, and compare what each has."""
        began_with = self.place.data() if self.begun else None
        if self.world.size == 1:
            return self._prepare_here(began_with)
        mine: list[Prepared] = []

        def first() -> str:
            mine.append(self._prepare_here(began_with))
            return mine[0].digest

        expected = self.world.share(first, "prepare the data")
        if not mine:
            mine.append(self._prepare_here(began_with))
        if mine[0].digest != expected:
            raise ConfigError([f"all ranks must read the same data; found {mine[0].digest[:12]} and {expected[:12]}; check the files"])
        return mine[0]

    def _prepare_here(self, began_with: Sequence[DataFile] | None) -> Prepared:
        """Prepare in this process; a vocabulary that was fitted, and is more than the text allows, is made smaller."""
        try:
            given = self._origin.tokenizers if self._origin is not None else None
            return prepare(self.config, self.place.text, self.progress, began_with=began_with, given=given)
        except VocabularyError as error:
            if not self._vocabulary_open:
                raise
            self.progress.note(f"vocabulary: {error.largest:,} pieces, all that this text allows")
            self.config = self.config.replace(text={"vocabulary": error.largest})
            return self._prepare_here(began_with)

    def _parts(self, prepared: Prepared) -> Assembly:
        """Make ready to put together what the configuration says now."""
        return Assembly(self.config, prepared, device=self.device, progress=self.progress, weights=self._weights)

    def _trainer(self, prepared: Prepared, run: RunDirectory) -> Trainer:
        """Put model, data and loop together, with an eye on the clock where there is a limit."""
        parts, clock = self._parts(prepared), self.clock
        announced = self._announced or self.config.train.steps

        def replan(done: int, pace: float) -> int:
            """Fit the steps to the time that is left; log it where that is far from what was announced."""
            nonlocal announced
            most = parts.most_updates() if self._steps_open else self.config.train.steps
            steps = clock.updates(done, pace, most=most)
            # Before the first validation the throughput is still too high.
            if done >= self.config.train.validate_every and abs(steps - announced) > CORRECTED * announced:
                epochs = [f"{parts.epochs(each):.1f}" for each in (steps, announced)]
                rate = f"{parts.tokens_a_step() / clock.pace:,.0f} tokens/s with validations and checkpoints"
                self.progress.note(f"measured throughput {rate}: {epochs[0]} epochs ({steps:,} steps) instead of {epochs[1]}")
                announced = steps
            return steps

        limited = clock.limited
        return parts.trainer(run, world=self.world, deadline=clock.left if limited else None, replan=replan if limited else None)

    def _begin(self, trainer: Trainer, prepared: Prepared, request: Config) -> None:
        """Settle the number of steps, say what will happen, and record what was settled."""
        estimate = self._settle_steps(trainer, prepared)
        self.config = from_dict(self.world.share(lambda: self._settle(estimate), "settle the configuration"))
        if self.world.leads:
            self._tell(estimate)
            files = prepared.files
            if self._origin is not None:
                train = self.config.train
                schedule = f"{train.schedule}, {train.warmup:,} steps of warm-up"
                self.progress.note(f"schedule: learning rate {train.learning_rate:.2g} at its peak, {schedule}")
                self._weights = keep_weights(self._origin, self.place.training)
                files = [*files, DataFile.of(INIT, self._weights)]
            self.place.write(request, self.config, files)

    def _settle_steps(self, trainer: Trainer, prepared: Prepared) -> Forecast:
        """Measure the throughput and fit the steps to the time, or to the epochs, where nobody named them."""
        parts = self._parts(prepared)
        estimate = forecast(trainer, parts.plan, self.config, prepared, self.device)
        if not self.clock.limited and not (self._steps_open and self._epochs):
            return estimate
        if self.clock.limited:
            estimate = estimate._replace(validation=validation_seconds(parts.validation(), trainer.model))

            def overhead(steps: int) -> float:
                return estimate.overhead(paced(self.config, steps, keep=self.asked).train)

            most = parts.most_updates() if self._steps_open else self.config.train.steps
            steps = self.clock.updates(0, estimate.pace.seconds, most=most, overhead=overhead)
        else:
            steps = max(FEWEST_STEPS, round(self._epochs * parts.plan.batches(0) / self.config.train.accumulate))
        self._announced = steps
        if self._steps_open:
            self.config = paced(self.config, max(1, steps), keep=self.asked)
        return estimate.with_steps(steps)

    def _settle(self, estimate: Forecast) -> dict[str, object]:
        """Return the configuration as plain values, unless there is no time for even one step."""
        self._require_time(estimate)
        if self._origin is not None:
            self.config = self.config.replace(train={"init_from": self._origin.name})
        return to_dict(self.config)

    def _require_time(self, estimate: Forecast) -> None:
        """Raise ConfigError if the time budget leaves no time for even one step."""
        if self.clock.limited and self.clock.left() < estimate.pace.seconds:
            raise self.clock.too_short()

    def _tell(self, estimate: Forecast) -> None:
        for line in estimate.lines():
            self.progress.note(line)

    def _finish(self, prepared: Prepared, run: RunDirectory, result: Result) -> None:
        """Choose the weights, score them on the validation sentences, and write the bundle."""
        weights, chosen = choose_weights(run, self.config)
        scores = self._score(prepared, self._parts(prepared), weights)
        machine = machine_name(self.device, self.world.size)
        card = make_card(
            self.config, prepared=prepared, result=result, chosen=chosen, scores=scores, seconds=self.clock.elapsed(), machine=machine
        )
        facts = {"updates": result.step, "weights_from": chosen, "metrics": dict(result.metrics)}
        golden = golden_texts(prepared)
        write_bundle(
            self.place.out, config=self.config, tokenizers=prepared.tokenizers, weights=weights, card=card, golden=golden, facts=facts
        )
        draw_curves(run.path / "log.jsonl", run.path / "curves.png")
        self.progress.note(f'{self.place.out} is ready ({chosen}); try: dragoman translate -m {shlex.quote(str(self.place.out))} "…"')

    def _score(self, prepared: Prepared, parts: Assembly, weights: dict[str, Tensor]) -> list[CardScore]:
        """Translate validation sentences as the finished model will, as many as there is time for."""
        model = assemble(self.config, prepared.tokenizers, weights).to(self.device)
        began, trial = time.monotonic(), prepared.sentences[:32]
        parts.translate(model, [pair.src for pair in trial])
        pairs = sentences_to_score(prepared.sentences, self.clock, (time.monotonic() - began) / max(1, len(trial)))
        if not pairs:
            return []
        found = score(
            parts.translate(model, [pair.src for pair in pairs]), [pair.tgt for pair in pairs], tgt_lang=self.config.data.tgt_lang
        )
        on = f"validation, {'all' if len(pairs) == len(prepared.sentences) else 'the first'} {len(pairs):,} pairs"
        self.progress.note(f"{on}: {', '.join(f'{each.name} {each.value:.1f}' for each in found)}")
        return [CardScore(each.name, each.value, each.signature, on) for each in found]


def _exact(metrics: Mapping[str, float]) -> str:
    """Return how many validation sentences are right, in words."""
    return f"{100 * metrics['exact']:.0f} % of the validation sentences translated exactly"
