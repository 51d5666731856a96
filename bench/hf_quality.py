"""Train Hugging Face's Marian model by its `Seq2SeqTrainer` for as long as a run of ours took.

    python bench/quality.py --data DATA --work models --out results --only m30k_deen_hf

Same data, tokenizer and model size as the run of ours that --model and --record name; its own
batches, optimizer and training loop, with usual settings for small data: AdamW, linear warm-up and
decay, label smoothing 0.1, dropout 0.3, bfloat16, batches of similar lengths. All seconds of our
run, with its imports and the learning of its vocabulary, are seconds of training here: the
throughput is measured before them, and validation does not count. The checkpoint with the lowest
validation loss translates by its beam search.

It writes the translations of the development and test sets, one after the other, to OUTPUT.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from bench.hf_trainer import (  # noqa: E402
    WORKERS,
    PaddingCollator,
    PairDataset,
    sentences_per_batch,
)
from bench.peers import SMOOTHING, build_marian  # noqa: E402
from bench.quality import DEV, read_lines  # noqa: E402
from bench.quality_rows import CORPORA, CorpusFiles  # noqa: E402
from dragoman.bundle import Bundle  # noqa: E402
from dragoman.config import Config, DataConfig  # noqa: E402
from dragoman.data.parallel_corpus import ParallelFiles  # noqa: E402
from dragoman.data.token_store import TokenStore  # noqa: E402
from dragoman.text.sentencepiece_tokenizer import Tokenizers  # noqa: E402
from dragoman.text.special_tokens import EOS, PAD  # noqa: E402

DROPOUT = 0.3
TRIAL_STEPS = 60  # before the time is measured, and as many while it is
EVALUATIONS = 10
MAX_EPOCHS = 60  # as ours; more overfit


def main() -> None:
    """Train, translate and write."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the corpora")
    parser.add_argument("--corpus", required=True, choices=sorted(CORPORA))
    parser.add_argument("--model", type=Path, required=True, help="our model")
    parser.add_argument("--record", type=Path, help="our run's results, for its seconds")
    parser.add_argument("--seconds", type=float, default=0.0, help="seconds of training instead")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="peak learning rate")
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("seed", type=int)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    seconds = options.seconds or float(json.loads(options.record.read_text())["seconds"])
    corpus, ours = CORPORA[options.corpus], Bundle.load(options.model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory(prefix="hf-quality-") as name:
        folder = Path(name)
        stores = {
            part: TokenStore.prepare(
                ParallelFiles(*(options.data / corpus.file(part, each) for each in corpus[1:3])),
                ours.tokenizers,
                folder=folder,
                data=DataConfig(),
            )
            for part in ("train", DEV)
        }
        model = train_marian(ours.config, ours.tokenizers, stores, folder, seconds, options)
    model.to(device).eval()
    lines = []
    for part in (DEV, *corpus.tests):
        lines += translate(
            model, ours.tokenizers, source_lines(options.data, corpus, part), options.beam
        )
    options.output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def source_lines(data: Path, corpus: CorpusFiles, part: str) -> list[str]:
    """Return the sources of a development or test set."""
    return read_lines(data / corpus.file(part, corpus.source))


def train_marian(
    config: Config,
    tokenizers: Tokenizers,
    stores: dict[str, TokenStore],
    folder: Path,
    seconds: float,
    options: Any,
) -> Any:
    """Return the model with the lowest validation loss after some seconds of training."""
    import transformers

    library: Any = transformers
    size = config.replace(model={"dropout": DROPOUT}).model
    layers = int(size.encoder[0].split("*")[1])
    data = {part: PairDataset(store, len(store)) for part, store in stores.items()}
    sentences = sentences_per_batch(
        stores["train"],
        padded_tokens=config.train.batch_tokens,
        vocabulary=len(tokenizers.tgt),
    )

    def trainer(steps: int, evaluations: int) -> Any:
        torch.manual_seed(options.seed)
        model = build_marian(size, layers, len(tokenizers.tgt))
        model.config.use_cache = False
        every = max(1, steps // max(1, evaluations))
        settings = training_arguments(
            folder, steps=steps, sentences=sentences, every=every if evaluations else 0,
            learning_rate=options.learning_rate, seed=options.seed,
        )  # fmt: skip
        return library.Seq2SeqTrainer(
            model=model,
            args=settings,
            train_dataset=data["train"],
            eval_dataset=data[DEV],
            data_collator=PaddingCollator(model),
        )

    step_seconds = time_of_a_step(trainer, library)
    steps = int(min(seconds / step_seconds, MAX_EPOCHS * len(stores["train"]) / sentences))
    print(
        f"{step_seconds * 1e3:.1f} ms per step of {sentences} pairs: {steps} steps, "
        f"{steps * sentences / len(stores['train']):.1f} epochs in {steps * step_seconds:.0f} s",
        flush=True,
    )
    chosen = trainer(max(EVALUATIONS, steps), EVALUATIONS)
    chosen.train()
    print(json.dumps(chosen.state.log_history[-(EVALUATIONS + 1) :]), flush=True)
    model = chosen.model
    model.config.use_cache = True
    return model


def time_of_a_step(trainer: Any, library: Any) -> float:
    """Return the seconds of a training step, after a warm-up."""
    clock: list[float] = []

    class TrialClock(library.TrainerCallback):  # type: ignore[misc]  # a class of Any
        """Reads the time after each step."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Read the time at the end of the warm-up and of the trial."""
            if state.global_step % TRIAL_STEPS == 0:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                clock.append(time.perf_counter())

    trial = trainer(2 * TRIAL_STEPS, 0)
    trial.add_callback(TrialClock())
    trial.train()
    return (clock[1] - clock[0]) / TRIAL_STEPS


def training_arguments(
    folder: Path, *, steps: int, sentences: int, every: int, learning_rate: float, seed: int
) -> Any:
    """Return the trainer's arguments; with `every`, it evaluates and saves after so many steps."""
    import transformers

    library: Any = transformers
    cuda = torch.cuda.is_available()
    strategy = "steps" if every else "no"
    return library.Seq2SeqTrainingArguments(
        output_dir=str(folder / "hf"),
        max_steps=steps,
        per_device_train_batch_size=sentences,
        per_device_eval_batch_size=64,
        train_sampling_strategy="group_by_length",
        label_smoothing_factor=SMOOTHING,
        bf16=cuda,
        use_cpu=not cuda,
        optim="adamw_torch_fused",
        learning_rate=learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=max(1, min(1000, steps // 10)),
        adam_beta2=0.98,
        max_grad_norm=1.0,
        dataloader_num_workers=WORKERS if cuda else 0,
        dataloader_pin_memory=cuda,
        remove_unused_columns=False,
        eval_strategy=strategy,
        save_strategy=strategy,
        eval_steps=every or None,
        save_steps=every or 500,
        save_only_model=True,
        save_total_limit=2,
        load_best_model_at_end=bool(every),
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        prediction_loss_only=True,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
    )


def translate(model: Any, tokenizers: Tokenizers, lines: list[str], beam: int) -> list[str]:
    """Return the translations by the library's beam search, in the order of the lines."""
    device = next(model.parameters()).device
    rows = tokenizers.src.encode_batch(lines)
    order = sorted(range(len(rows)), key=lambda at: -len(rows[at]))
    found: dict[int, str] = {}
    for start in range(0, len(order), 128):
        indices = order[start : start + 128]
        width = max(len(rows[at]) for at in indices) + 1
        ids = torch.full((len(indices), width), PAD)
        for number, at in enumerate(indices):
            ids[number, : len(rows[at]) + 1] = torch.tensor([*rows[at], EOS])
        ids = ids.to(device)
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids,
                attention_mask=(ids != PAD).long(),
                num_beams=beam,
                max_length=2 * width + 20,
                length_penalty=1.0,
                suppress_tokens=[PAD],
            )
        for at, row in zip(indices, output.tolist(), strict=True):
            ended = row[1:]
            ended = ended[: ended.index(EOS)] if EOS in ended else ended
            found[at] = tokenizers.tgt.decode([each for each in ended if each != PAD])
    return [found[at] for at in range(len(lines))]


if __name__ == "__main__":
    main()
