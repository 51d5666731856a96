"""README of an export: the model card with code that runs as it is."""

from __future__ import annotations

import re
from pathlib import Path

from dragoman.bundle import Bundle
from dragoman.text.imported_tokenizer import marian_language_code
from dragoman.text.special_tokens import language_tag

_PACKAGES = {
    "ctranslate2": "ctranslate2 sentencepiece",
    "huggingface": "transformers torch sentencepiece",
    "onnx": "onnxruntime sentencepiece numpy",
}
_LIBRARIES = {"ctranslate2": "ctranslate2", "huggingface": "transformers", "onnx": "onnx"}
_USAGE_PATTERN = re.compile(
    r"\n## Use\n.*?(?=\n## |\Z)", re.DOTALL
)  # the section of a card with instructions for dragoman
_PROGRAM_NAMES = {
    "ctranslate2": "CTranslate2",
    "huggingface": "Hugging Face transformers",
    "onnx": "ONNX Runtime",
}

_CTRANSLATE2 = """import unicodedata

import ctranslate2
import sentencepiece

translator = ctranslate2.Translator(".", device="cpu")
source = sentencepiece.SentencePieceProcessor(model_file="source.spm")
target = sentencepiece.SentencePieceProcessor(model_file="target.spm")


def translate(texts):
    tokens = [source.encode({text}, out_type=str) for text in texts]
    found = translator.translate_batch(
        tokens,
        beam_size={beam},
        length_penalty={penalty},
        max_decoding_length={longest},
        disable_unk=True,
    )
    return [target.decode(each.hypotheses[0]) for each in found]


print(translate([{example}])[0])
"""

_HUGGING_FACE = """import unicodedata

from transformers import AutoModelForSeq2SeqLM, MarianTokenizer

tokenizer = MarianTokenizer.from_pretrained(".")
model = AutoModelForSeq2SeqLM.from_pretrained(".")


def translate(texts):
    batch = tokenizer([{text} for text in texts], return_tensors="pt", padding=True)
    found = model.generate(**batch, num_beams={beam}, max_length={longest})
    options = {{"skip_special_tokens": True, "clean_up_tokenization_spaces": False}}
    return tokenizer.batch_decode(found, **options)


print(translate([{example}])[0])
"""

_ONNX = '''import json
import unicodedata

import numpy as np
import onnxruntime
import sentencepiece


def read(name):
    with open(name, encoding="utf-8") as file:
        return json.load(file)


facts = read("model.json")
src_ids = {{token: number for number, token in enumerate(read("source_vocabulary.json"))}}
tgt_tokens = read("target_vocabulary.json")
encoder = onnxruntime.InferenceSession("encoder.onnx")
decoder = onnxruntime.InferenceSession("decoder_step.onnx")
source = sentencepiece.SentencePieceProcessor(model_file="source.spm")
target = sentencepiece.SentencePieceProcessor(model_file="target.spm")
inputs = [each.name for each in decoder.get_inputs()]
outputs = [each.name for each in decoder.get_outputs()]


def translate(text, longest={longest}):
    """Translate one sentence greedily."""
    tokens = source.encode({text}, out_type=str)
    src = np.array([[*(src_ids.get(token, facts["unk"]) for token in tokens), facts["eos"]]])
    found = encoder.run(None, {{"src": src, "mask": np.ones(src.shape, bool)}})
    state = {{each["name"]: value for each, value in zip(facts["state"], found)}}
    state["tokens"], written = np.array([facts["bos"]]), []
    while len(written) < longest:
        found = dict(zip(outputs, decoder.run(None, {{name: state[name] for name in inputs}})))
        logits = found.pop("logits")[0]
        logits[[facts["pad"], facts["bos"], facts["unk"]]] = -np.inf
        best = int(logits.argmax())
        if best == facts["eos"]:
            break
        written.append(best)
        state |= {{name.removeprefix("new_"): value for name, value in found.items()}}
        state["tokens"] = np.array([best])
    return target.decode([tgt_tokens[each] for each in written])


print(translate({example}))
'''

_EXAMPLES = {"ctranslate2": _CTRANSLATE2, "huggingface": _HUGGING_FACE, "onnx": _ONNX}


def write_readme(bundle: Bundle, folder: Path, program: str, *, precision: str = "float32") -> None:
    """Write README.md into an export outside the bundle."""
    form = bundle.tokenizers.src.normalization
    decode = bundle.config.decode
    code = _EXAMPLES[program].format(
        text="text" if form == "none" else f'unicodedata.normalize("{form.upper()}", text)',
        beam=decode.beam,
        penalty=decode.length_penalty,
        longest=min(200, max(20, bundle.config.data.max_length)),
        example=_example_sentence(bundle),
    )
    if bundle.default_target:
        code = _add_tag(code, program, bundle.default_target)
    if form == "none":
        code = code.replace("import unicodedata\n\n", "", 1).replace("import unicodedata\n", "", 1)
    tagged = (
        f"It translates into {bundle.default_target}: every text begins with the tag of the target "
        "language.\n\n"
        if bundle.default_target
        else ""
    )
    use = (
        f"## Use\n\nExported to {_PROGRAM_NAMES[program]} in {precision} by `dragoman export`; "
        "`manifest.json` has the SHA-256 of each file.\n"
        "To translate, run this Python code in this directory "
        f"(`pip install {_PACKAGES[program]}`):\n\n```python\n{code}```\n\n{tagged}"
        "Other programs stop a beam search by other rules, "
        "so their outputs may differ from those of `dragoman translate`.\n"
    )
    card = bundle.card.replace(
        "library_name: dragoman\n", f"library_name: {_LIBRARIES[program]}\n", 1
    )
    fitting = _USAGE_PATTERN.sub(lambda _: f"\n{use}\n", card, count=1)
    (folder / "README.md").write_text(
        fitting if fitting != card else f"{use}\n{card}", encoding="utf-8"
    )


def _add_tag(code: str, program: str, language: str) -> str:
    """Return the example with the tag of the target language before every text."""
    if program == "huggingface":
        return code.replace("tokenizer([", f'tokenizer(["{marian_language_code(language)}" + ')
    return code.replace("source.encode(", f'["{language_tag(language)}"] + source.encode(')


def _example_sentence(bundle: Bundle) -> str:
    """Return a golden sentence of the model as a Python literal."""
    inputs = [case["input"] for case in bundle.golden["cases"]]
    text = next(
        (each for each in inputs if each.isprintable() and "`" not in each and len(each) < 200),
        "Hello.",
    )
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
