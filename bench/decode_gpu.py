"""Time decoding on a GPU: the translator's native engine against `transformers.generate` with the same weights.

python bench/decode_gpu.py                                  about six minutes: a base model is first trained for some seconds
python bench/decode_gpu.py --data ../shared/data            the same on Multi30k, whose dev and test sentences are translated
python bench/decode_gpu.py --size tiny --sentences 8 --updates 2 --batches 0 --peer-batches 8 --beams 1 --dtypes float32      on a CPU

Ours goes from text to text, tokenising and spelling included; the peer gets ready-made ids in batches of like lengths, and its ids
are not spelt. Each is timed at several batch sizes, after one round that is not counted, and judged by its best. Both search by
the sum of log-probabilities, without a length penalty, which they define differently.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from bench.drawn import Corpus, Rounds
from bench.train_gpu import SIZES, corpus_of, free, machine, model_of, reset_peak, trainer_of, wait_for
from dragoman.config import Config, DecodeConfig, TextConfig, TrainConfig
from dragoman.data.corpus import PairedFiles
from dragoman.exchange.huggingface import save_hugging_face
from dragoman.exchange.transformers_side import quietly
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.specials import BOS, EOS, PAD
from dragoman.training.checkpoint import RunDirectory
from dragoman.training.compiling import prepare_device
from dragoman.translator import Translator

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PARTS = ("test_2016_flickr", "test_2017_flickr", "dev")  # of Multi30k: 3,014 sentences that are not trained on


def main() -> None:
    """Train a little, then time both at every setting, printing each as it is done, then ratios and one line of JSON."""
    options = parsed()
    began = time.monotonic()
    device = torch.device(options.device)
    prepare_device(device, deterministic=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = corpus_of(options, folder)
        texts = sentences(options, corpus)
        model = trained(options, corpus, device, folder / "run")
        config = Config(
            text=TextConfig(kind=corpus.tokenizers.src.kind), model=model_of(options.size), decode=DecodeConfig(beam=4, length_penalty=0.0)
        )
        (folder / "theirs").mkdir()
        save_hugging_face(model, corpus.tokenizers, config, folder / "theirs")
        print(
            f"{machine(device)}, torch {torch.__version__}; {options.size}, {len(corpus.tokenizers.tgt):,} pieces, "
            f"{len(texts):,} sentences, best of {options.rounds}",
            flush=True,
        )
        rows: list[dict[str, Any]] = []
        for beam in options.beams:
            for dtype in options.dtypes:
                ours = Ours(model, corpus, config, DTYPES[dtype], texts)
                theirs = Theirs(folder / "theirs", corpus, config, DTYPES[dtype], texts, device)
                for who, sizes in ((ours, options.batches), (theirs, options.peer_batches)):
                    for size in sizes:
                        if time.monotonic() - began < options.seconds:
                            rows.append(timed(who, size, beam, dtype, device, options.rounds))
                del ours, theirs, who
                free(device)
    results = report(rows, options)
    signature = {"device": machine(device), "torch": torch.__version__, "size": options.size, "sentences": len(texts)}
    kept = [{name: value for name, value in row.items() if name != "ids"} for row in rows]
    print(json.dumps({"bench": "decode_gpu", "rows": kept, "results": results} | signature))


def parsed() -> argparse.Namespace:
    """Read the options; what is not given follows from the size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=list(SIZES), default="base")
    parser.add_argument("--sentences", type=int, default=3000)
    parser.add_argument("--beams", type=int, nargs="+", default=[4, 1])
    parser.add_argument("--batches", type=int, nargs="+", default=[0, 512, 1536], help="sentences together; 0 as the translator chooses")
    parser.add_argument("--peer-batches", type=int, nargs="+", default=[256, 512, 768, 1536])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=600, help="of training before, so that outputs end")
    parser.add_argument("--data", type=Path, help="a folder of corpora: takes multi30k from it instead of drawing")
    parser.add_argument("--vocabulary", type=int)
    parser.add_argument("--stretch", type=float, default=1.0, help="times which drawn sentences are longer than Multi30k's")
    parser.add_argument("--seconds", type=float, default=450.0, help="begin nothing after so long")
    options = parser.parse_args()
    tiny = options.size == "tiny"
    options.vocabulary = options.vocabulary or (512 if tiny else 32_768)
    options.pairs = max(options.sentences, 200 if tiny else 60_000)
    options.batch_tokens = 256 if tiny else 25_600
    return options


def sentences(options: argparse.Namespace, corpus: Corpus) -> list[str]:
    """Choose what is translated: unseen text where there is any."""
    if not options.data:
        return corpus.src[: options.sentences]
    folder = options.data / "multi30k"
    parts = [PairedFiles(folder / f"{part}.de.xz", folder / f"{part}.en.xz") for part in PARTS]
    return [pair.src for part in parts for pair in part.pairs()][: options.sentences]


def trained(options: argparse.Namespace, corpus: Corpus, device: torch.device, folder: Path) -> EncoderDecoder:
    """Train for a moment: random weights never end a sentence, and say nothing about agreement."""
    plan = Rounds(corpus.store, batch_tokens=options.batch_tokens, max_shapes=8, steps=options.updates, rounds=1)
    config = TrainConfig(
        steps=options.updates, batch_tokens=options.batch_tokens, checkpoint_every=10**6, warmup=200, compile="off", keep=1
    )
    with RunDirectory(folder, keep=1) as run:
        trainer = trainer_of(model_of(options.size), plan, config, run, device, len(corpus.tokenizers.tgt))
        trainer.run(resume=False)
    assert isinstance(trainer.model, EncoderDecoder), "what was built"
    return trainer.model.eval()


class Ours:
    """The translator, native engine."""

    name = "ours"

    def __init__(self, model: EncoderDecoder, corpus: Corpus, config: Config, dtype: torch.dtype, texts: list[str]) -> None:
        self._translator = Translator(model, corpus.tokenizers, config)
        self._texts, self._dtype = texts, dtype

    def __call__(self, size: int, beam: int) -> list[str]:
        """Translate everything."""
        kind = self._translator.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=self._dtype == torch.bfloat16):
            return self._translator.translate(self._texts, beam=beam, batch_size=size or None, window=len(self._texts))

    def spell(self, found: list[str]) -> list[str]:
        """Leave text as it is."""
        return found


class Theirs:
    """`transformers.generate`, by batches of like lengths."""

    name = "transformers"

    def __init__(self, folder: Path, corpus: Corpus, config: Config, dtype: torch.dtype, texts: list[str], device: torch.device) -> None:
        import transformers

        library: Any = transformers
        with quietly():
            self._model = library.MarianMTModel.from_pretrained(str(folder)).to(device, dtype).eval()
        self._tokenizer, self._decode, self._device = corpus.tokenizers.tgt, config.decode, device
        self._sources = [[*ids, EOS] for ids in corpus.tokenizers.src.encode_batch(texts)]
        self._order = sorted(range(len(texts)), key=lambda number: -len(self._sources[number]))

    @torch.inference_mode()
    def __call__(self, size: int, beam: int) -> list[list[int]]:
        """Generate for everything, and bring the ids to the host."""
        made: dict[int, list[int]] = {}
        for first in range(0, len(self._order), size):
            numbers = self._order[first : first + size]
            rows = [torch.tensor(self._sources[number]) for number in numbers]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD).to(self._device)
            longest = int(self._decode.max_ratio * (ids.shape[1] - 1)) + self._decode.max_extra
            settings = {"num_beams": beam, "do_sample": False, "max_length": None, "forced_eos_token_id": None}
            settings |= {"length_penalty": 0.0} if beam > 1 else {}
            found = self._model.generate(input_ids=ids, attention_mask=ids != PAD, max_new_tokens=longest + 1, **settings)
            made |= dict(zip(numbers, found[:, 1:].tolist(), strict=True))
        return [made[number] for number in range(len(self._order))]

    def spell(self, found: list[list[int]]) -> list[str]:
        """Turn ids into text as ours does."""
        # It knows one limit for a batch; an output that does not end is compared up to its own.
        limits = [int(self._decode.max_ratio * (len(source) - 1)) + self._decode.max_extra for source in self._sources]
        cut = [ids[: ids.index(EOS)] if EOS in ids else ids[:limit] for ids, limit in zip(found, limits, strict=True)]
        return self._tokenizer.decode_batch([[each for each in ids if each not in (PAD, BOS)] for ids in cut])


def timed(who: Any, size: int, beam: int, dtype: str, device: torch.device, rounds: int) -> dict[str, Any]:
    """Time one setting and show it."""
    row: dict[str, Any] = {"who": who.name, "beam": beam, "dtype": dtype, "batch": size}
    try:
        reset_peak(device)
        took, found = _seconds(lambda: who(size, beam), device, rounds)
    except RuntimeError as error:
        print(f"  {who.name:14s} beam {beam}  {dtype:9s} batch {size:5d}  failed: {' '.join(str(error).split())[:120]}", flush=True)
        return row | {"error": " ".join(str(error).split())[:200]}
    row |= {"sentences_s": len(found) / min(took), "slowest": len(found) / max(took), "ids": who.spell(found)}
    row["MiB"] = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    memory = "" if row["MiB"] is None else f"  {row['MiB']:8,.0f} MiB"
    print(
        f"  {who.name:14s} beam {beam}  {dtype:9s} batch {size:5d}  {row['sentences_s']:9.1f} sentences/s "
        f"(slowest {row['slowest']:.1f}){memory}",
        flush=True,
    )
    return row


def _seconds(action: Callable[[], Any], device: torch.device, rounds: int) -> tuple[list[float], Any]:
    """Time an action after a first run that is not counted."""
    found = action()
    took = []
    for _ in range(rounds):
        wait_for(device)
        began = time.perf_counter()
        found = action()
        wait_for(device)
        took.append(time.perf_counter() - began)
    return took, found


def report(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare the best batch size of each, setting by setting, and what they said."""
    results = []
    print("\nbest batch size of each:")
    for beam in options.beams:
        for dtype in options.dtypes:
            good = [row for row in rows if row["beam"] == beam and row["dtype"] == dtype and "error" not in row]
            best = {
                who: max((row for row in good if row["who"] == who), key=lambda row: row["sentences_s"], default=None)
                for who in ("ours", "transformers")
            }
            ours, theirs = best["ours"], best["transformers"]
            if ours is None or theirs is None:
                continue
            same = sum(one == other for one, other in zip(ours["ids"], theirs["ids"], strict=True)) / len(ours["ids"])
            ratio = ours["sentences_s"] / theirs["sentences_s"]
            results.append({"beam": beam, "dtype": dtype, "ratio": ratio, "same_outputs": same, "ours": ours["batch"]})
            print(
                f"  beam {beam}  {dtype:9s} ours {ours['sentences_s']:9.1f} (batch {ours['batch']})  transformers "
                f"{theirs['sentences_s']:9.1f} (batch {theirs['batch']})  {ratio:.2f} times  same outputs {same:.1%}"
            )
    return results


if __name__ == "__main__":
    main()
