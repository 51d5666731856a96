"""Run the real commands on hostile directories or settings, in a forked child for each case."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import importlib
import json
import os
import re
import resource
import shutil
import signal
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

CPU_SECONDS, WALL_SECONDS = 5.0, 60
MEMORY = 2 << 30  # bytes more than the process has when it is forked
NOBODY = 65_534
DOCTOR = 40  # one case in so many is examined by the doctor too, which takes its time
# Control characters, bidirectional formatting and line separators must not reach a terminal.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
OWN_TEXT = {"translate"}  # whose stdout is text that a model wrote


def main(folder: Path, kind: str, count: int, seed: int) -> None:
    """Build what is sound, then run every case on a copy of it."""
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    report = os.fdopen(os.dup(1), "w")
    _import_torch(folder / "home")
    for name in ("HOME", "XDG_CACHE_HOME", "DRAGOMAN_CACHE", "XDG_CONFIG_HOME"):
        os.environ[name] = str(folder / "home")
    import hostile_settings
    from hostile_directories import generate

    if kind == "settings":
        _learn_imports(
            folder,
            lambda case_dir: None,
            lambda case_dir: [
                ["train", "--out", str(case_dir / "target"), "--set", "model.width=x"]
            ],
        )
        for case in hostile_settings.generate(count, seed):
            problems = _run(
                folder,
                case.prepare,
                lambda case_dir, case=case: [case.command(case_dir)],
                user=False,
            )
            print(json.dumps({"case": case.name, "problems": problems}), file=report, flush=True)
        return
    sound = folder / "sound"
    if not sound.exists():
        _in_child(lambda: BUILDERS[kind](sound))
    list_commands = DOORS[kind]
    _learn_imports(
        folder,
        lambda case_dir: shutil.copytree(sound, case_dir / "target"),
        lambda case_dir: list_commands(case_dir, min(count, DOCTOR) - 1),
    )
    for number, case in enumerate(generate(kind, sound, count, seed)):

        def prepare(case_dir: Path, case: Any = case) -> None:
            shutil.copytree(sound, case_dir / "target", symlinks=True)
            case.damage(case_dir / "target")

        problems = _run(
            folder,
            prepare,
            lambda case_dir, number=number: list_commands(case_dir, number),
            user=case.user,
        )
        print(json.dumps({"case": case.name, "problems": problems}), file=report, flush=True)


# What is sound


def _build_model(path: Path) -> None:
    """Write a small bundle whose tokenizers are apart."""
    import torch

    from dragoman.bundle import write_bundle
    from dragoman.config import Config
    from dragoman.models.factory import build_model
    from dragoman.text.sentencepiece_tokenizer import train_tokenizers

    sizes = {
        "width": 16,
        "heads": 2,
        "ffn_width": 16,
        "encoder": ("transformer",),
        "decoder": ("transformer",),
        "tie_embeddings": "target",
    }
    config = Config().replace(text={"vocab_size": 300, "shared_vocab": False}, model=sizes)
    lines = ["ein mann geht", "eine frau steht", "zwei kinder"] * 10
    tokenizers = train_tokenizers(lines, [line.upper() for line in lines], config.text)
    torch.manual_seed(0)
    model = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    )
    write_bundle(
        path, config=config, tokenizers=tokenizers, weights=model.state_dict(), golden=["ein mann"]
    )


def _build_run(path: Path) -> None:
    """Train four steps, so that a directory holds a run, its checkpoints and a model."""
    from dragoman.config import read_config
    from dragoman.runs.training_run import train

    corpus = [path.parent / "corpus.src", path.parent / "corpus.tgt"]
    lines = [f"{first} {second}" for first in "abcdefghij" for second in "klmnopqrst"] * 3
    corpus[0].write_text("\n".join(lines) + "\n", "utf-8")
    corpus[1].write_text("\n".join(line.upper() for line in lines) + "\n", "utf-8")
    settings = {
        "data.src": corpus[0], "data.tgt": corpus[1], "text.tokenizer": "characters",
        "model.width": 16, "model.heads": 2, "model.ffn_width": 16,
        "model.encoder": "[transformer]", "model.decoder": "[transformer]", "train.steps": 4,
        "train.batch_tokens": 64, "train.checkpoint_every": 2, "train.validate_every": 2,
        "train.validate_sentences": 4, "train.device": "cpu", "train.threads": 1,
    }  # fmt: skip
    train(read_config(overrides=[f"{name}={value}" for name, value in settings.items()]), path)


def _build_import(path: Path) -> None:
    """Write a Marian directory as Hugging Face lays it out."""
    from exchange_kit import build_exportable_model

    from dragoman.exchange.huggingface_export import save_hugging_face

    model, tokenizers, config = build_exportable_model(
        encoder=["transformer"], decoder=["transformer"], width=16, heads=2, ffn_width=16
    )
    path.mkdir()
    save_hugging_face(model, tokenizers, config, path)


def _build_directions(path: Path) -> None:
    """Write a bundle in the format of the built-in model: int8, several directions, a calibration
    and a language identifier.
    """
    import torch
    from confidence_kit import CALIBRATION

    from dragoman.bundle import write_bundle
    from dragoman.config import Config
    from dragoman.models.factory import build_model
    from dragoman.text.language_identification import LanguageIdentifier
    from dragoman.text.sentencepiece_tokenizer import train_tokenizers

    sizes = {"width": 16, "heads": 2, "ffn_width": 16}
    blocks = {"encoder": ("transformer",), "decoder": ("transformer",)}
    config = Config().replace(
        text={"vocab_size": 300},
        data={"directions": ("de-en", "en-de")},
        model={**sizes, **blocks},
    )
    texts = {"de": ["ein mann geht", "zwei kinder"] * 10, "en": ["a man walks", "children"] * 10}
    tokenizers = train_tokenizers(texts["de"], texts["en"], config.text, languages=("de", "en"))
    torch.manual_seed(0)
    model = build_model(
        config.model, src_vocab_size=len(tokenizers.src), tgt_vocab_size=len(tokenizers.tgt)
    )
    write_bundle(
        path,
        config=config,
        tokenizers=tokenizers,
        weights=model.state_dict(),
        identifier=LanguageIdentifier.train(texts),
        calibration=CALIBRATION,
        quantization="int8",
    )


def _task_builder(recipe: str) -> Callable[[Path], None]:
    """Return a function that writes the bundle of a recipe's miniature with random weights."""

    def build(path: Path) -> None:
        from task_models_kit import records_of, subject_of

        from dragoman.bundle.writer import write_task_bundle

        predictor = subject_of(recipe).predictor
        records, _ = records_of(predictor.config)
        write_task_bundle(
            path,
            task=predictor.task,
            weights=predictor.model.state_dict(),
            golden=predictor.task.golden_inputs(records),
        )

    return build


# Recipes of the other tasks, with an input of `predict` or an option of `generate`.
TASK_RECIPES = {
    "kim2014": "the goal",
    "lample2016": "Anna walks",
    "radford2018": "--max-tokens=2",
    "merity2018": "--max-tokens=2",
    "chen2017": "a man\tthe goal",
    "lee2019": "[1, 2]",
}
BUILDERS = {
    "model": _build_model,
    "run": _build_run,
    "import": _build_import,
    "directions": _build_directions,
    **{recipe: _task_builder(recipe) for recipe in TASK_RECIPES},
}


# The commands that are tried on a directory


def _model_commands(case_dir: Path, number: int) -> list[list[str]]:
    target = str(case_dir / "target")
    list_commands = [
        ["info", target],
        ["info", "--json", target],
        ["info", "--card", target],
        ["verify", target],
        ["verify", "--json", target],
        ["translate", "-m", target, "--device", "cpu", "ein mann"],
        ["average", target, "--last", "1", "--out", str(case_dir / "new")],
    ]
    if number % DOCTOR == DOCTOR - 1:
        list_commands.append(["doctor", target, "--device", "cpu", "--sentences", "2"])
    return list_commands


def _run_commands(case_dir: Path, number: int) -> list[list[str]]:
    target = str(case_dir / "target")
    return [
        ["info", target],
        ["info", "--json", target],
        ["verify", target],
        ["average", target, "--last", "1", "--out", str(case_dir / "new")],
        ["train", "--out", target, "--resume", "--set", "train.steps=6"],
    ]


def _import_commands(case_dir: Path, number: int) -> list[list[str]]:
    return [["import", str(case_dir / "target"), "--out", str(case_dir / "new")]]


def _directions_commands(case_dir: Path, number: int) -> list[list[str]]:
    target = str(case_dir / "target")
    return [
        ["info", target],
        ["verify", target],
        ["translate", "-m", target, "--device", "cpu", "--json", "--to", "en", "ein mann"],
    ]


def _task_commands(recipe: str, case_dir: Path, number: int) -> list[list[str]]:
    target = str(case_dir / "target")
    command, text = "predict", TASK_RECIPES[recipe]
    if text.startswith("--"):
        command = "generate"
    list_commands = [
        ["info", target],
        ["info", "--json", target],
        ["verify", target],
        [command, "-m", target, "--device", "cpu", "--json", text],
    ]
    if number % DOCTOR == DOCTOR - 1:
        list_commands.append(["doctor", target, "--device", "cpu"])
    return list_commands


DOORS: dict[str, Callable[[Path, int], list[list[str]]]] = {
    "model": _model_commands,
    "run": _run_commands,
    "import": _import_commands,
    "directions": _directions_commands,
    **{recipe: functools.partial(_task_commands, recipe) for recipe in TASK_RECIPES},
}


# Running one case


def _run(
    folder: Path,
    prepare: Callable[[Path], object],
    commands: Callable[[Path], list[list[str]]],
    *,
    user: bool,
    names: Path | None = None,
) -> list[str]:
    """Prepare a case in its own folder, run its commands in a child, and return all problems."""
    case_dir = folder / "case"
    outside = case_dir / "outside"
    outside.mkdir(parents=True)
    case_dir.chmod(0o777)
    (outside / "secret.txt").write_text("a secret, which no command may print or change\n")
    prepare(case_dir)
    listed = commands(case_dir)
    gc.freeze()  # else each child's garbage collector would copy every page of the imports
    before = _snapshot(outside)
    log = case_dir / "log"
    pid = os.fork()
    if not pid:
        _child(listed, case_dir, log, user=user, names=names)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    problems = (
        [json.loads(line) for line in log.read_text("utf-8").splitlines()] if log.exists() else []
    )
    begun = [each["begun"] for each in problems if "begun" in each]
    found = [each["problem"] for each in problems if "problem" in each]
    if code:
        how = {
            -signal.SIGPROF: f"more than {CPU_SECONDS} CPU seconds",
            -signal.SIGALRM: "waits for ever",
        }.get(code, f"exit {code}")
        found.append(f"{' '.join(begun[-1:])}: {how}")
    if _snapshot(outside) != before:
        found.append("something outside the target was changed")
    unexpected = sorted(
        set(os.listdir(case_dir)) - {"outside", "target", "log", "new", "config.yaml"}
    )
    found += [f"left {name} beside the target" for name in unexpected]
    for path in [case_dir, *case_dir.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o700)
    shutil.rmtree(case_dir)
    return found


def _child(
    commands: Sequence[Sequence[str]], case_dir: Path, log: Path, *, user: bool, names: Path | None
) -> None:
    """Run commands under limits and record what each does that it must not; never returns."""
    code = 1
    try:
        with log.open("w") as notes:
            if user and os.getuid() == 0:
                for path in [case_dir, *case_dir.rglob("*")]:
                    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
                commands = [
                    command for command in commands if command[0] in ("info", "verify")
                ]  # the others compile kernels
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            known = set(sys.modules)
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY,) * 2)
            for command in commands:
                print(json.dumps({"begun": command[0]}), file=notes, flush=True)
                for problem in _problems(command, case_dir, CPU_SECONDS if names is None else 60.0):
                    print(
                        json.dumps({"problem": f"{command[0]}: {problem}"}), file=notes, flush=True
                    )
        if names is not None:
            names.write_text("\n".join(name for name in list(sys.modules) if name not in known))
        code = 0
    except BaseException:
        with log.open("a") as notes:
            print(json.dumps({"problem": traceback.format_exc()[-600:]}), file=notes)
    finally:
        os._exit(code)


def _problems(command: Sequence[str], case_dir: Path, seconds: float) -> Iterator[str]:
    """Run one command in this process; return its violations."""
    from dragoman.cli.app import main as dragoman

    descriptors = []
    for number in (1, 2):
        with tempfile.TemporaryFile() as file:
            descriptors.append(os.dup(file.fileno()))
        os.dup2(descriptors[-1], number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    os.chdir(case_dir)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(WALL_SECONDS)
    code = dragoman([*command])
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.alarm(0)
    with contextlib.suppress(ValueError, OSError):
        sys.stdout.flush()
    sys.stderr.flush()
    texts = []
    for descriptor in descriptors:
        os.lseek(descriptor, 0, os.SEEK_SET)
        texts.append(os.read(descriptor, 8 << 20).decode("utf-8", "replace"))
        os.close(descriptor)
    yield from _complaints(command, code, *texts)
    if code and command[0] == "import" and (case_dir / "new" / "manifest.json").exists():
        yield "left a finished model behind"
    if (case_dir / "new").exists():
        shutil.rmtree(case_dir / "new")


def _complaints(command: Sequence[str], code: int, out: str, err: str) -> Iterator[str]:
    last = err.strip().rsplit("\n", 1)[-1]
    if "Traceback" in err or code == 1:
        yield f"a traceback: {' | '.join(err.strip().splitlines()[-4:])[-600:]}"
    elif code == 71:
        yield f"memory was exhausted: {last[:300]}"
    elif code and "dragoman: error: " not in err:
        yield f"exit {code} without a word: {last[:300]}"
    shown = err if command[0] in OWN_TEXT else out + err
    if found := UNPRINTABLE.search(shown):
        yield (
            f"prints {found.group()!r} raw: "
            f"{shown[max(0, found.start() - 60) : found.end() + 20]!r}"
        )
    if "a secret, which" in shown:
        yield "prints a file outside the target"
    if len(err) > 20_000:
        yield f"{len(err)} characters of errors"


def _snapshot(folder: Path) -> list[tuple[str, int, int, str]]:
    """List what lies in a folder, with modes, sizes and hashes."""
    found = []
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        digest = (
            hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(status.st_mode) else ""
        )
        found.append((str(path), status.st_mode, status.st_size if digest else 0, digest))
    return found


def _import_torch(home: Path) -> None:
    """Import torch once for all children; no backward pass, whose threads must not be forked.

    Their home and cache folder is new, but for compiled kernels; only its owner may write there.
    """
    import torch
    from kernel_kit import cache_with_kernels

    from dragoman.runs import measured_resource_estimate

    measured_resource_estimate.PROBE_SECONDS = 0.0  # how fast this machine is does not matter here
    torch.set_num_threads(1)
    cache_with_kernels(home)


def _learn_imports(
    folder: Path, prepare: Callable[[Path], object], commands: Callable[[Path], list[list[str]]]
) -> None:
    """Run the commands on valid input, which must succeed, and import their modules once."""
    names = folder / "imported"
    problems = _run(folder, prepare, commands, user=False, names=names)
    assert not problems, f"what is sound must have no problems; found {problems}"
    for name in names.read_text().split():
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _in_child(work: Callable[[], None]) -> None:
    """Do something in a child, so that no thread of it is forked later."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.dup2(2, 1)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, f"what is sound could not be built: exit {code}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
