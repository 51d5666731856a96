"""Whole runs in miniature: started, resumed, finished, rejected."""

import hashlib
import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
from kernel_kit import cache_with_kernels

from dragoman.bundle import Bundle
from dragoman.config import Config, read_config
from dragoman.data.parallel_corpus import ConcatCorpus, ParallelFiles, TabularCorpus
from dragoman.errors import (
    BundleError,
    ConfigError,
    CorruptError,
    DataError,
    LockedError,
    PermissionDeniedError,
    StoppedError,
)
from dragoman.inference import Translator
from dragoman.runs import auto_config, training_run
from dragoman.runs.auto_config import measure_corpus
from dragoman.runs.output_directory_and_resume_checks import OutputDirectory
from dragoman.runs.training_run import train
from dragoman.runs.translation_data_preparation import open_corpora
from dragoman.runs.validation_split import SplitCorpus, is_held_out
from dragoman.runtime import signals
from dragoman.storage.disk_space_and_errors import DiskFullError
from dragoman.storage.lock import DirectoryLock
from dragoman.tasks.translation import TranslationValidator
from dragoman.text.sentencepiece_tokenizer import train_tokenizers
from dragoman.training.distributed.process_group import ProcessGroup
from dragoman.training.progress_display import QuietProgress
from dragoman.training.trainer_state import TrainerState

SETTINGS = [
    "model.width=16", "model.heads=2", "model.ffn_width=32", "model.encoder=transformer",
    "model.decoder=transformer", "text.tokenizer=characters",
    "text.byte_fallback=false", "train.steps=6", "train.batch_tokens=200",
    "train.checkpoint_every=2", "train.validate_every=3",
    "train.validate_sentences=2", "train.device=cpu", "train.precision=float32",
    "text.vocab_size=40",
]  # fmt: skip


class CapturedNotes(QuietProgress):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Words and the same words backwards, in two files."""
    monkeypatch.setenv("DRAGOMAN_CACHE", str(cache_with_kernels(tmp_path / "cache")))
    draw = random.Random(3)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(3, 8))) for _ in range(150)]
    (tmp_path / "a.src").write_text("\n".join(words) + "\n")
    (tmp_path / "a.tgt").write_text("\n".join(word[::-1] for word in words) + "\n")
    return tmp_path


def configured(corpus, *more: str) -> Config:
    files = [f"data.src={corpus / 'a.src'}", f"data.tgt={corpus / 'a.tgt'}"]
    return read_config(recipe="tiny", overrides=[*files, *SETTINGS, *more])


def digest(out) -> str:
    return hashlib.sha256((out / "weights.safetensors").read_bytes()).hexdigest()


def test_a_run_becomes_a_bundle_that_translates(corpus):
    from dragoman import Translator

    out = train(configured(corpus), corpus / "model")
    assert isinstance(Translator.load(out, device="cpu").translate(["abc"])[0], str)
    assert (out / "training" / "curves.png").exists()
    assert json.loads((out / "training" / "status.json").read_text())["state"] == "finished"


def test_the_same_run_gives_the_same_bits(corpus):
    assert digest(train(configured(corpus), corpus / "a")) == digest(
        train(configured(corpus), corpus / "b")
    )


def test_a_run_calibrates_a_confidence_on_its_validation_translations(corpus, monkeypatch):
    """By the pass that the scores of the card come from, and equal in equal runs."""
    draw = random.Random(5)
    words = [" ".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(160)]
    (corpus / "v.src").write_text("\n".join(words) + "\n")
    (corpus / "v.tgt").write_text("\n".join(word[::-1] for word in words) + "\n")
    passes = list[int]()
    stream = Translator.stream

    def counted(self, lines, **options):
        passes.append(len(lines))
        return stream(self, lines, **options)

    monkeypatch.setattr(Translator, "stream", counted)
    config = configured(
        corpus, f"data.valid_src={corpus / 'v.src'}", f"data.valid_tgt={corpus / 'v.tgt'}"
    )
    captured = CapturedNotes()
    out = train(config, corpus / "model", progress=captured)
    assert passes == [32, 160], "to time a pass, and all once"
    calibration = Bundle.load(out).calibration
    assert calibration is not None
    assert calibration.fitted_on + calibration.measured_on == 160
    assert any(
        note.startswith(f"confidence of {calibration.measured_on} held-out validation sentences: ")
        for note in captured.notes
    )
    assert "## Confidence" in (out / "card.md").read_text()
    [found] = Translator.load(out, device="cpu").stream(["a b c"])
    assert 0 < found.confidence < 1
    assert Bundle.load(train(config, corpus / "again")).calibration == calibration


def test_few_validation_sentences_calibrate_nothing(corpus):
    out = train(configured(corpus), corpus / "model")
    assert Bundle.load(out).calibration is None
    assert "## Confidence" not in (out / "card.md").read_text()


def test_more_steps_continue_the_run(corpus):
    """Resuming needs no arithmetic about absolute steps (OpenNMT-py#1364)."""
    config = configured(corpus, "train.schedule=constant")
    whole = train(configured(corpus, "train.schedule=constant", "train.steps=8"), corpus / "whole")
    train(config, corpus / "parts")
    parts = train(
        configured(corpus, "train.schedule=constant", "train.steps=8"),
        corpus / "parts",
        resume=True,
    )
    assert digest(parts) == digest(whole)


def test_a_run_that_ended_before_its_model_was_written_writes_it(corpus):
    """A run with all steps done but without a bundle still writes the bundle."""
    out = train(configured(corpus), corpus / "model")
    before = digest(out)
    for name in ("manifest.json", "weights.safetensors"):
        (out / name).unlink()
    assert digest(train(configured(corpus), corpus / "model", resume=True)) == before
    assert (out / "manifest.json").exists()


def test_a_finished_run_reports_that_nothing_is_left(corpus):
    """A run without steps left reports it (OpenNMT-py#886)."""
    train(configured(corpus), corpus / "model")
    captured = CapturedNotes()
    train(None, corpus / "model", resume=True, progress=captured)
    assert any("nothing to do" in note and "all 6 steps done" in note for note in captured.notes)


def test_a_run_that_continues_must_be_the_same_run(corpus):
    train(configured(corpus), corpus / "model")
    with pytest.raises(ConfigError, match=r"model.width cannot change in the run") as caught:
        train(configured(corpus, "model.width=32", "train.seed=9"), corpus / "model", resume=True)
    assert "found 32 instead of 16" in str(caught.value)
    assert "train.seed" in str(caught.value)


def test_resume_alone_needs_a_run(corpus):
    for config in (None, configured(corpus)):
        with pytest.raises(
            ConfigError,
            match=r"found no run in .*nothing; leave out --resume to start one",
        ):
            train(config, corpus / "nothing", resume=True)
    assert not (corpus / "nothing").exists()


def test_unknown_files_are_left_alone(corpus):
    with pytest.raises(BundleError, match=r"a\.src"):
        train(configured(corpus), corpus)


def test_a_file_is_no_directory(corpus):
    with pytest.raises(ConfigError, match=r"found the file .*a\.src"):
        OutputDirectory(corpus / "a.src")


def test_a_dry_run_writes_nothing(corpus):
    captured = CapturedNotes()
    train(configured(corpus), corpus / "model", dry_run=True, progress=captured)
    assert not (corpus / "model").exists()
    assert any("parameters" in note for note in captured.notes)
    assert any("steps" in note and "epochs" in note for note in captured.notes)


def test_without_a_recipe_everything_is_fitted(corpus):
    def override(base):
        return read_config(
            base=base,
            overrides=[f"data.src={corpus / 'a.src'}", f"data.tgt={corpus / 'a.tgt'}", *SETTINGS],
        )

    captured = CapturedNotes()
    out = train(override(None), corpus / "model", override=override, progress=captured)
    assert OutputDirectory(out).config().recipe == "small"
    assert OutputDirectory(out).config().model.width == 16  # explicit settings take precedence
    assert any(note.startswith("vocabulary size:") for note in captured.notes)


@pytest.mark.parametrize(
    ("enough", "more", "metric"),
    [(1, [], "bleu"), (10_000, [], "loss"), (10_000, ["train.best_metric=bleu"], "bleu")],
)
def test_few_held_out_sentences_select_by_loss_unless_bleu_is_requested(
    corpus, monkeypatch, enough, more, metric
):
    def override(base):
        files = [f"data.{side}={corpus / f'a.{side}'}" for side in ("src", "tgt")]
        return read_config(base=base, overrides=[*files, *SETTINGS, *more])

    def choose(*args, keep, **options):
        chosen = auto_config.choose_config(*args, keep=keep, **options)
        if "train.best_metric" in keep:
            return chosen
        train = {"best_metric": "bleu", "validate_sentences": 1000}  # as on a GPU
        return chosen._replace(config=chosen.config.replace(train=train))

    monkeypatch.setattr(training_run, "choose_config", choose)
    monkeypatch.setattr(auto_config, "MIN_SELECTION_SENTENCES", enough)
    captured = CapturedNotes()
    explicit = [each.partition("=")[0] for each in more]
    out = train(
        override(None),
        corpus / "model",
        override=override,
        explicit_settings=explicit,
        progress=captured,
    )
    assert OutputDirectory(out).config().train.best_metric == metric
    told = any("too few for BLEU" in note for note in captured.notes)
    assert told == (metric == "loss")


def test_without_a_recipe_the_requested_epochs_are_trained(corpus):
    def override(base):
        files = [f"data.{side}={corpus / f'a.{side}'}" for side in ("src", "tgt")]
        settings = [each for each in SETTINGS if not each.startswith("train.steps")]
        return read_config(base=base, overrides=[*files, *settings, "train.epochs=3"])

    captured = CapturedNotes()
    train(override(None), corpus / "model", override=override, dry_run=True, progress=captured)
    assert any(", 3.0 epochs, " in note for note in captured.notes)


def test_a_budget_ends_in_time_and_still_leaves_a_model(corpus):
    out = train(configured(corpus, "train.steps=2000", "train.time_budget=30"), corpus / "model")
    status = json.loads((out / "training" / "status.json").read_text())
    assert status["state"] == "finished"
    assert 0 < status["step"] < 20_000


def test_some_pairs_are_held_out_when_no_validation_is_given(corpus):
    whole = ParallelFiles(corpus / "a.src", corpus / "a.tgt")
    parts = [
        [pair.number for pair in SplitCorpus(whole, held_out=held).pairs()]
        for held in (True, False)
    ]
    assert [(number - 1) // 50 for number in parts[0]] == [0, 1, 2]
    assert len({number % 50 for number in parts[0]}) > 1
    assert sorted(parts[0] + parts[1]) == list(range(1, 151))
    assert not is_held_out(100_000)


def test_a_handful_of_pairs_is_trained_on_whole(corpus, tmp_path):
    for side in ("src", "tgt"):
        (tmp_path / f"few.{side}").write_text("a\nb\n")
    data = read_config(
        overrides=[f"data.src={tmp_path / 'few.src'}", f"data.tgt={tmp_path / 'few.tgt'}"]
    ).data
    corpora = open_corpora(data)
    assert corpora.valid is None
    assert "fewer than 50" in corpora.note


def test_a_survey_counts_or_estimates(corpus):
    whole = ParallelFiles(corpus / "a.src", corpus / "a.tgt")
    assert measure_corpus(whole).pairs == 150
    assert measure_corpus(whole).exact
    assert not measure_corpus(whole, most=10).exact


def test_an_empty_corpus_is_named(tmp_path):
    for side in ("src", "tgt"):
        (tmp_path / f"none.{side}").write_text("\n\n")
    with pytest.raises(DataError, match="2 pairs, all of them empty"):
        measure_corpus(ParallelFiles(tmp_path / "none.src", tmp_path / "none.tgt"))


def test_a_run_that_fails_while_preparing_reports_it_in_its_status(corpus):
    """Some launchers lose the exit code; status.json keeps it."""
    (corpus / "a.tgt").write_text("one line\n")
    with pytest.raises(DataError, match="150 and 1"):
        train(configured(corpus), corpus / "model")
    status = json.loads((corpus / "model" / "training" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 2)
    assert "150 and 1" in status["reason"]


def test_a_request_to_stop_is_heard_while_preparing(corpus, monkeypatch):
    def stop() -> None:
        raise StoppedError(
            "preparation continues unless a stop is requested",
            found="SIGTERM",
            fix="run the same command again",
        )

    monkeypatch.setattr("dragoman.runtime.signals.raise_if_stop_requested", stop)
    with pytest.raises(StoppedError):
        train(configured(corpus), corpus / "model")
    assert (
        json.loads((corpus / "model" / "training" / "status.json").read_text())["exit_code"] == 75
    )


def test_leftovers_of_an_attempt_that_failed_decide_nothing(corpus):
    """A failed attempt leaves no configuration: the next one starts anew."""
    from dragoman import Translator

    missing = configured(
        corpus, f"data.valid_src={corpus / 'no.src'}", f"data.valid_tgt={corpus / 'no.tgt'}"
    )
    with pytest.raises(DataError, match=r"no\.src must exist"):
        train(missing, corpus / "model")
    (corpus / "a.src").write_text((corpus / "a.src").read_text().replace("a", "ж"))
    out = train(configured(corpus, "train.steps=1"), corpus / "model")
    assert 3 not in Translator.load(out, device="cpu").tokenizers.src.encode("жb"), (
        "the pieces are those of the text as it is now"
    )


def test_a_budget_that_leaves_no_time_to_train(corpus):
    with pytest.raises(
        ConfigError,
        match=r"the time budget must leave time to train; found 3 s, of which preparation and "
        r"writing take \d+ s",
    ):
        train(configured(corpus, "train.time_budget=3"), corpus / "model")
    assert not OutputDirectory(corpus / "model").has_run, "the next attempt may be another"


def test_fitted_vocabulary_size_never_raises_a_user_error(corpus):
    config = configured(
        corpus,
        "train.steps=1",
        "text.tokenizer=bpe",
        "text.vocab_size=350",
        "text.byte_fallback=true",
    )
    for side in ("a.src", "a.tgt"):
        (corpus / side).write_text("one pair\n")
    captured = CapturedNotes()
    out = train(
        config,
        corpus / "model",
        override=lambda base: config.replace(text={"vocab_size": base.text.vocab_size}),
        progress=captured,
    )
    assert any("the largest for this corpus" in note for note in captured.notes)
    assert OutputDirectory(out).config().text.vocab_size < 500


def test_chosen_vocabulary_holds_the_characters_of_the_corpus(corpus, tmp_path):
    """A few thousand Chinese sentences have more characters than subwords were chosen for."""
    rng = random.Random(1)
    for side in ("src", "tgt"):
        lines = ("".join(chr(0x4E00 + rng.randrange(900)) for _ in range(8)) for _ in range(400))
        (corpus / f"a.{side}").write_text("\n".join(lines) + "\n")
    text = ("text.tokenizer=bpe", "text.vocab_size=500", "text.byte_fallback=true")
    config = configured(corpus, "train.steps=1", *text)
    captured = CapturedNotes()
    train(
        config,
        tmp_path / "m",
        dry_run=True,
        override=lambda base: config.replace(text={"vocab_size": base.text.vocab_size}),
        progress=captured,
    )
    (note,) = (each for each in captured.notes if "for the characters of this corpus" in each)
    size, needed = (int(each.replace(",", "")) for each in re.findall(r"[\d,]*\d", note))
    assert size > needed > 900
    with pytest.raises(DataError, match=f"must be at least {needed} to cover this corpus's char"):
        train(config, tmp_path / "m2", dry_run=True)


def test_one_file_for_both_sides_is_reported(corpus):
    captured = CapturedNotes()
    train(
        configured(corpus, f"data.tgt={corpus / 'a.src'}", "train.steps=1"),
        corpus / "model",
        dry_run=True,
        progress=captured,
    )
    assert any(
        note.startswith("warning: source and target are the same file") and "a.src" in note
        for note in captured.notes
    )


@pytest.mark.parametrize(("copies", "is_reported"), [(0.4, False), (1.0, True)])
def test_equal_sources_and_targets_are_reported(corpus, tmp_path, copies, is_reported):
    lines = (corpus / "a.src").read_text().splitlines()
    kept = int(copies * len(lines))
    (tmp_path / "a.tgt").write_text("\n".join([*lines[:kept], *(f"{x} y" for x in lines[kept:])]))
    captured = CapturedNotes()
    train(
        configured(corpus, f"data.tgt={tmp_path / 'a.tgt'}", "train.steps=1"),
        tmp_path / "model",
        dry_run=True,
        progress=captured,
    )
    found = [note for note in captured.notes if "have equal source and target" in note]
    assert len(found) == is_reported
    assert all(re.search(r"of the first (\d+) pairs \1 have equal", note) for note in found)
    assert any("continue from a trained model (--init-from)" in note for note in captured.notes)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ("tiny", r"found 'tiny' \(str\)"),
        ({"model": {}}, r"\(dict\)"),
        (Config().replace(model={"width": "3x"}), "found .3x."),
    ],
)
def test_invalid_configurations(config, found, tmp_path):
    with pytest.raises(ConfigError, match=found):
        train(config, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_path_below_a_file_is_rejected(tmp_path):
    (tmp_path / "notes").write_text("")
    with pytest.raises(
        ConfigError, match=r"--out must be in a directory; found .*model below the file .*notes"
    ):
        OutputDirectory(tmp_path / "notes" / "model")


def test_skipped_pairs_are_reported_once(corpus):
    """Any pair left out is counted and shown (OpenNMT-py#1161)."""
    for side in ("a.src", "a.tgt"):
        with (corpus / side).open("a") as file:
            file.write("\n" + "ab" * 200 + "\n")
    captured = CapturedNotes()
    train(configured(corpus, "train.steps=1"), corpus / "model", dry_run=True, progress=captured)
    assert [
        note
        for note in captured.notes
        if "; skipped: " in note
        and "1 with an empty side (line 151)" in note
        and "over 200 tokens" in note
    ]


@pytest.mark.parametrize(("dropout", "simcut"), [(0.0, 0), (0.9, 0), (0.9, 3)])
def test_segmentations_sampled_in_training_fit_learned_positions(corpus, dropout, simcut):
    """Words of 3 tokens become 9 by BPE dropout; the padded length stays within 10 positions."""
    text = [
        "text.tokenizer=bpe",
        "text.vocab_size=80",
        f"text.bpe_dropout={dropout}",
        "model.positions=learned",
        "train.batch_tokens=16",
        f"train.simcut={simcut}",
    ]
    out = train(
        configured(corpus, *text, "data.max_length=9", "model.max_positions=10"), corpus / "model"
    )
    assert (out / "weights.safetensors").exists()


def test_a_run_that_reaches_its_target_ends_there_and_has_nothing_left(corpus, monkeypatch):
    monkeypatch.setattr(
        TranslationValidator, "__call__", lambda self, model: {"loss": 1.0, "exact": 0.98}
    )
    captured = CapturedNotes()
    out = train(configured(corpus, "train.target_exact=0.9"), corpus / "model", progress=captured)
    assert json.loads((out / "manifest.json").read_text())["steps"] == 3  # the first validation
    assert (
        "target reached at step 3: 98 % of the validation sentences translated exactly"
        in captured.notes
    )
    again = CapturedNotes()
    train(None, out, resume=True, progress=again)
    assert any(
        "nothing to do" in note and "98 % of the validation sentences" in note
        for note in again.notes
    )
    assert any("--set train.target_exact=0" in note for note in again.notes)
    train(configured(corpus, "train.target_exact=0"), out, resume=True)
    assert json.loads((out / "manifest.json").read_text())["steps"] == 6


def test_a_run_that_ends_below_its_target_warns(corpus, caplog):
    out = train(configured(corpus, "train.target_exact=0.9"), corpus / "model")
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith(
        "target not reached after 6 steps: 0 % of the validation sentences translated exactly, and "
        "train.target_exact is 90 %"
    )
    assert f"--out {out} --resume --set train.steps=12" in warning


def begun_without_a_checkpoint(corpus, monkeypatch, *more: str):
    """Begin a run and end it before its first step, as a kill would."""

    class Killed(BaseException):
        pass

    def killed(*_, **__):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("dragoman.training.trainer.Trainer.fit", killed)
        with pytest.raises(Killed):
            train(configured(corpus, *more), corpus / "model")
    assert OutputDirectory(corpus / "model").has_run
    assert not list((corpus / "model" / "training").glob("step-*"))


@pytest.mark.parametrize("name", ["a.src", "a.tgt", "v.src"])
@pytest.mark.parametrize("resume", [True, False])
def test_a_corpus_that_changed_before_the_first_checkpoint_is_named(
    corpus, monkeypatch, name, resume
):
    """It was resumed silently, with the tokenizer of the old one."""
    for side in ("src", "tgt"):
        (corpus / f"v.{side}").write_text("abc\ndef\n")
    validation = [f"data.valid_{side}={corpus / f'v.{side}'}" for side in ("src", "tgt")]
    begun_without_a_checkpoint(corpus, monkeypatch, *validation)
    path = corpus / name
    times, content = path.stat(), path.read_text()
    path.write_text(content[::-1].strip() + "\n")  # of the same size
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(
        CorruptError,
        match=rf"{name} must not change after the start of the run; found \d+ bytes with SHA-256 "
        r".* restore it",
    ):
        train(None if resume else configured(corpus, *validation), corpus / "model", resume=resume)
    path.write_text(content)
    assert train(None, corpus / "model", resume=True)


@pytest.mark.parametrize("name", ["shared.model", "text.json"])
def test_a_tokenizer_that_changed_is_named(corpus, monkeypatch, name):
    begun_without_a_checkpoint(corpus, monkeypatch)
    path = corpus / "model" / "training" / "text" / name
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(CorruptError, match=rf"{name} must not change after the start of the run"):
        train(None, corpus / "model", resume=True)


def test_a_tokenizer_that_was_lost_is_learnt_again(corpus, monkeypatch):
    begun_without_a_checkpoint(corpus, monkeypatch)
    shutil.rmtree(corpus / "model" / "training" / "text")
    for prepared in (corpus / "cache").iterdir():
        if not prepared.name.startswith("kernels-"):  # which would be compiled again
            shutil.rmtree(prepared)
    assert digest(train(None, corpus / "model", resume=True)) == digest(
        train(configured(corpus), corpus / "whole")
    )


def test_a_corpus_that_changes_while_it_is_prepared_is_noticed(corpus, monkeypatch):
    """The tokenizer would be of one text and the pairs of another."""
    learn = train_tokenizers

    def changed(*arguments):
        made = learn(*arguments)
        (corpus / "a.src").write_text((corpus / "a.src").read_text().replace("a", "b"))
        return made

    monkeypatch.setattr("dragoman.runs.translation_data_preparation.train_tokenizers", changed)
    with pytest.raises(CorruptError, match=r"a\.src must stay as it is while it is prepared"):
        train(configured(corpus), corpus / "model")


def test_a_run_of_an_older_release_has_no_list_of_files(corpus):
    train(configured(corpus), corpus / "model")
    (corpus / "model" / "training" / "data.json").unlink()
    assert train(configured(corpus, "train.steps=7"), corpus / "model", resume=True)
    endless = '{"part": "train", "path": "a.src", "bytes": Infinity, "sha256": ""}'
    for entry, found in (("3", "TypeError"), (endless, "OverflowError")):
        (corpus / "model" / "training" / "data.json").write_text(f'{{"files": [{entry}]}}')
        with pytest.raises(
            CorruptError, match=rf"data\.json must list the run's files; found {found}"
        ):
            train(configured(corpus, "train.steps=8"), corpus / "model", resume=True)


def test_a_fitted_run_names_the_value_that_it_has(corpus):
    """`--resume --set model.width=128` was answered with the default, which the run never had."""

    def override(base):
        return read_config(
            base=base,
            overrides=[
                f"data.src={corpus / 'a.src'}",
                f"data.tgt={corpus / 'a.tgt'}",
                *SETTINGS[1:],
            ],
        )

    out = train(override(None), corpus / "model", override=override)
    assert OutputDirectory(out).config().model.width == 128
    for width in (64, 512):  # 512 is every setting's default, and so what the request had
        changed = OutputDirectory(out).config().replace(model={"width": width})
        with pytest.raises(
            ConfigError, match=rf"model\.width cannot change .* found {width} instead of 128"
        ):
            train(changed, out, resume=True, explicit_settings={"model.width"})
    assert train(
        OutputDirectory(out).config(), out, resume=True, explicit_settings={"model.width"}
    ), "the same value is no change"


def test_several_corpora_are_read_in_order(corpus):
    for name, words in (("b", ["xyz", "", "zyx"]), ("c", [])):
        for side in ("src", "tgt"):
            (corpus / f"{name}.{side}").write_text("".join(f"{word}\n" for word in words))
    files = [
        f"data.{side}=[{', '.join(str(corpus / f'{name}.{side}') for name in 'cab')}]"
        for side in ("src", "tgt")
    ]
    captured = CapturedNotes()
    out = train(configured(corpus, *files, "train.steps=1"), corpus / "model", progress=captured)
    assert [
        note.replace(f"{corpus}/", "") for note in captured.notes if note.startswith("corpus ")
    ] == [
        "corpus 1 of 3: c.src, c.tgt: 0 pairs",
        "corpus 2 of 3: a.src, a.tgt: 150 pairs",
        "corpus 3 of 3: b.src, b.tgt: 3 pairs",
    ]
    assert any(
        f"with an empty side (line 2 of {corpus / 'b.src'})" in note for note in captured.notes
    )
    assert [Path(each.path).name for each in OutputDirectory(out).data_files()[:6]] == [
        "c.src",
        "c.tgt",
        "a.src",
        "a.tgt",
        "b.src",
        "b.tgt",
    ]
    assert "c.src, a.src, b.src" in (out / "card.md").read_text()
    assert json.loads((out / "config.json").read_text())["data"]["src"] == [
        "c.src",
        "a.src",
        "b.src",
    ]


def test_a_concatenation_numbers_through_and_names_lines(corpus):
    (corpus / "p.tsv").write_text("src\ttgt\none\teins\n\tleer\n")
    parts = [
        ParallelFiles(corpus / "a.src", corpus / "a.tgt"),
        TabularCorpus(corpus / "p.tsv"),
        TabularCorpus(corpus / "p.tsv"),
    ]
    both = ConcatCorpus(parts)
    read = list(both.pairs())
    assert (len(read), both.part_counts()) == (154, [150, 2, 2])
    assert [pair.number for pair in read] == [*range(1, 151), 152, 153, 155, 156]
    assert [both.describe_line(number) for number in (150, 152, 156)] == [
        f"150 of {corpus / 'a.src'}",
        f"2 of {corpus / 'p.tsv'}",
        f"3 of {corpus / 'p.tsv'}",
    ]
    assert both.fraction_read() == 1.0
    few = both.pairs()
    next(few)
    assert 0 < both.fraction_read() < 1.0
    assert both.part_counts() == []
    (corpus / "p.tsv").write_text("src\ttgt\none\n")
    with pytest.raises(DataError, match=r"p\.tsv line 2 must have 2 columns; found 1"):
        list(ConcatCorpus(parts).pairs())


def test_one_order_of_corpora_is_not_another(corpus):
    parts = [
        ParallelFiles(corpus / "a.src", corpus / "a.tgt"),
        ParallelFiles(corpus / "a.tgt", corpus / "a.src"),
    ]
    assert [pair.src for pair in ConcatCorpus(parts).pairs()] != [
        pair.src for pair in ConcatCorpus(parts[::-1]).pairs()
    ]
    assert ConcatCorpus(parts).layout() != parts[0].layout()


@pytest.mark.parametrize(("pairs", "named"), [(1, "only 1 pair to"), (20, "only 20 pairs to")])
def test_a_corpus_of_a_few_pairs_is_warned_about(corpus, pairs, named):
    for side in ("src", "tgt"):
        (corpus / f"few.{side}").write_text("abc\n" * pairs)
    files = [f"data.{side}={corpus / f'few.{side}'}" for side in ("src", "tgt")]
    captured = CapturedNotes()
    train(
        configured(corpus, *files, "train.steps=1", "text.vocab_size=12"),
        corpus / "model",
        dry_run=True,
        progress=captured,
    )
    assert any(note.startswith("warning: ") and named in note for note in captured.notes)


def test_a_dry_run_names_the_files_it_wrote(corpus):
    notes = []
    for _ in range(2):
        captured = CapturedNotes()
        train(configured(corpus), corpus / "model", dry_run=True, progress=captured)
        notes.append([note for note in captured.notes if note.startswith("dry run")])
    made = sorted(str(each) for each in (corpus / "cache").iterdir() if each.is_dir())
    assert len(made) == 3  # the tokenizer, the training pairs, the validation pairs
    assert all(path in notes[0][0] for path in made)
    assert notes[1] == ["dry run: nothing was trained and nothing was written"]
    assert not (corpus / "model").exists()


def test_a_dry_run_rejects_the_same_as_a_run(corpus, monkeypatch):
    out = corpus / "model"
    begun_without_a_checkpoint(corpus, monkeypatch)
    with pytest.raises(ConfigError, match="found 32 instead of 16"):
        train(configured(corpus, "model.width=32"), out, dry_run=True)
    lock = DirectoryLock(out / "training")
    lock.acquire()
    before = sorted((path, path.stat().st_mtime_ns) for path in out.rglob("*"))
    with pytest.raises(LockedError, match=f"process {os.getpid()} "):
        train(configured(corpus), out, dry_run=True)
    assert sorted((path, path.stat().st_mtime_ns) for path in out.rglob("*")) == before
    lock.release()
    train(configured(corpus), out, dry_run=True)
    (corpus / "a.src").write_text((corpus / "a.src").read_text().replace("a", "b"))
    with pytest.raises(CorruptError, match=r"a\.src must not change after the start of the run"):
        train(None, out, resume=True, dry_run=True)
    with pytest.raises(BundleError, match=r"a\.src"):
        train(configured(corpus), corpus, dry_run=True)
    with pytest.raises(ConfigError, match="found 3 s, of which"):
        train(configured(corpus, "train.time_budget=3"), corpus / "other", dry_run=True)
    monkeypatch.setattr("dragoman.storage.disk_space_and_errors.free_disk_bytes", lambda path: 1000)
    with pytest.raises(DiskFullError, match="the checkpoints must fit"):
        train(configured(corpus), corpus / "other", dry_run=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_dry_run_into_a_folder_that_is_not_ours(corpus):
    (corpus / "closed").mkdir(mode=0o500)
    with pytest.raises(PermissionDeniedError, match="closed"):
        train(configured(corpus), corpus / "closed" / "model", dry_run=True)


def test_a_dry_run_checks_write_permission(corpus, monkeypatch):
    monkeypatch.setattr(
        "dragoman.runs.output_directory_and_resume_checks.os.access", lambda path, mode: False
    )
    with pytest.raises(PermissionDeniedError, match=f"Permission denied at {corpus}"):
        train(configured(corpus), corpus / "new" / "model", dry_run=True)


@pytest.fixture
def stop_requests(monkeypatch):
    """Send `times` stop requests at a step."""

    def ask(at: int, times: int = 1) -> None:
        count, left = TrainerState.advance, [times]

        def counted(self, update, *rest):
            record = count(self, update, *rest)
            if update.step == at:
                for _ in range(left.pop() if left else 0):
                    signals.request_stop("SIGINT")
            return record

        monkeypatch.setattr(TrainerState, "advance", counted)

    signals.uninstall_handlers()
    yield ask
    signals.uninstall_handlers()


@pytest.mark.parametrize(
    ("at", "times", "words"),
    [
        (3, 1, "stopped at step 3, checkpoint saved; resume with: dragoman train --out "),
        (
            3,
            2,
            "stopped by SIGINT, SIGINT without saving, the latest checkpoint is that of step 2; "
            "resume with: ",
        ),
        (
            1,
            2,
            "stopped by SIGINT, SIGINT without saving, there is no checkpoint yet; resume with: ",
        ),
    ],
)
def test_a_stop_reports_the_checkpoint_and_how_to_resume(corpus, stop_requests, at, times, words):
    stop_requests(at, times)
    with pytest.raises(StoppedError) as caught:
        train(configured(corpus), corpus / "my model")
    assert str(caught.value).startswith(words)
    assert str(caught.value).endswith(f"dragoman train --out '{corpus / 'my model'}' --resume")
    assert caught.value.exit_code == 75
    signals.uninstall_handlers()
    assert digest(train(None, corpus / "my model", resume=True)) == digest(
        train(configured(corpus), corpus / "whole")
    )


def test_a_resumed_run_has_only_the_rest_of_its_time_budget(corpus, stop_requests, monkeypatch):
    stop_requests(3)
    advance = TrainerState.advance

    def slow(self, update, *rest):
        self.seconds += 200
        return advance(self, update, *rest)

    budget = ("train.steps=40", "train.time_budget=600")
    with monkeypatch.context() as patched:
        patched.setattr(TrainerState, "advance", slow)
        with pytest.raises(StoppedError, match="stopped at step 3, checkpoint saved"):
            train(configured(corpus, *budget), corpus / "model")
    signals.uninstall_handlers()
    captured = CapturedNotes()
    train(None, corpus / "model", resume=True, progress=captured)
    assert "time budget used up: training ends at step 3" in captured.notes


def test_a_budget_too_short_to_learn_is_reported(corpus):
    captured = CapturedNotes()
    budget = ("train.steps=2", "train.time_budget=600")
    train(configured(corpus, *budget), corpus / "model", progress=captured)
    (low,) = (note for note in captured.notes if "BLEU below 5" in note)
    assert "longer (--budget), on more pairs, or from a trained model (--init-from)" in low


def test_fitted_run_is_as_long_as_announced(corpus):
    """It announced 60 epochs and trained 34, because words were counted, not tokens."""
    for side in ("src", "tgt"):
        text = (corpus / f"a.{side}").read_text()
        (corpus / f"a.{side}").write_text(
            "\n".join(" ".join(line) for line in text.splitlines() * 20) + "\n"
        )
    files = [
        f"data.src={corpus / 'a.src'}",
        f"data.tgt={corpus / 'a.tgt'}",
        "train.device=cpu",
        "model.width=16",
        "model.heads=2",
    ]

    def override(base):
        return read_config(base=base, overrides=files)

    captured = CapturedNotes()
    train(override(None), corpus / "model", override=override, dry_run=True, progress=captured)
    (planned_epochs,) = [
        float(re.search(r"schedule: (\d+) epochs", note)[1])
        for note in captured.notes
        if "schedule:" in note
    ]
    (trained,) = [
        float(re.search(r", ([\d.]+) epochs", note)[1])
        for note in captured.notes
        if note.startswith("training:")
    ]
    assert trained == pytest.approx(planned_epochs, rel=0.02)


def test_a_plan_that_moves_far_is_logged_once(corpus, monkeypatch):
    """Epochs were announced twice, and differed: 60 and 34."""

    def plan_steps(self, done, seconds, *, most, overhead=None):
        self.seconds_per_step = 0.01
        return 20 if not done else 40

    monkeypatch.setattr("dragoman.runs.time_budget.TimeBudget.plan_steps", plan_steps)
    captured = CapturedNotes()
    train(
        configured(corpus, "train.steps=50", "train.time_budget=600"),
        corpus / "model",
        progress=captured,
    )
    (announced,) = [note for note in captured.notes if "epochs, about" in note]
    (corrected,) = [note for note in captured.notes if "instead of" in note]
    assert announced.startswith("training: 20 steps, ")
    epochs = re.search(r"([\d.]+) epochs", announced)[1]
    assert re.fullmatch(
        r"throughput [\d,]+ tokens/s with .*: [\d.]+ epochs \(40 steps\) instead of "
        rf"{epochs}",
        corrected,
    )


def test_records_are_passed_on_and_an_exception_ends_the_run(corpus):
    seen = []

    class EnoughError(Exception):
        pass

    def on_record(record):
        seen.append(record)
        if record.get("event") == "validation":
            raise EnoughError

    with pytest.raises(EnoughError):
        train(configured(corpus), corpus / "out", on_record=on_record)
    assert [record["step"] for record in seen] == [1, 2, 3, 3]
    assert not (corpus / "out" / "manifest.json").exists()
    train(configured(corpus), corpus / "out")  # from the checkpoint
    assert (corpus / "out" / "manifest.json").exists()


def test_without_the_fallback_a_full_gpu_is_an_error(corpus, monkeypatch):
    from dragoman.runs import training_run

    devices = []

    def full(run, **options):
        devices.append(run.device.type)
        if run.device.type != "cpu":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run.output_dir.path

    monkeypatch.setattr(training_run, "select_train_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(training_run, "describe_hardware", lambda device, ranks: str(device))
    monkeypatch.setattr(training_run, "warn_cpu_fallback", lambda device: None)
    monkeypatch.setattr(training_run, "init_process_group", lambda device: ProcessGroup())
    monkeypatch.setattr(training_run.TrainingRun, "execute", full)
    train(configured(corpus), corpus / "out")
    assert devices == ["cuda", "cpu"]
    with pytest.raises(torch.OutOfMemoryError):
        train(configured(corpus), corpus / "out", cpu_fallback=False)
    assert devices == ["cuda", "cpu", "cuda"]
