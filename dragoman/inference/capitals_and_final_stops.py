"""Lines whose form a model was not trained on: capitals, and single words without a full stop.

`Translator` adapts lines by the settings `decode.recase_capitals` and `decode.mirror_final_stop`;
`SegmentedLine` of long_line_segments.py gives translations the form of their lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dragoman.config import DecodeConfig
from dragoman.text.sentence_splitter import split_sentences

_CASED_WORD = re.compile(r"[^\W\d_]{2,}")
_MIN_CAPITALS = 8  # letters of a line in capitals, in two words or more; fewer are abbreviations
_MIN_WORDS = 3  # of a line that is translated without a full stop


def is_in_capitals(text: str) -> bool:
    """Whether a text has words enough to tell, all of them in capitals."""
    words = _CASED_WORD.findall(text.replace("ß", ""))  # it has no common capital
    return (
        len(words) > 1
        and sum(map(len, words)) >= _MIN_CAPITALS
        and all(word.isupper() for word in words)
    )


def ends_in_word(text: str) -> bool:
    """Whether a text ends without punctuation, as titles, labels and single words do."""
    return text.rstrip()[-1:].isalnum()


def recase_capitals(texts: Sequence[str], decode: DecodeConfig) -> Sequence[str]:
    """Return the lines, those in capitals in sentence case if the settings say so."""
    if not decode.recase_capitals:
        return texts
    return [_sentence_case(text) if is_in_capitals(text) else text for text in texts]


def add_final_stops(texts: Sequence[str], decode: DecodeConfig) -> Sequence[str]:
    """Return the lines, those of one or two words with a full stop if the settings say so."""
    if not decode.mirror_final_stop:
        return texts
    return [
        f"{text.rstrip()}."
        if text.rstrip()[-1:].isalpha() and len(text.split()) < _MIN_WORDS
        else text
        for text in texts
    ]


def _sentence_case(text: str) -> str:
    """Return a text in lower case, with a capital at the start of each sentence and for "I"."""
    sentences, gaps = split_sentences(text)
    lowered = [re.sub(r"\bi\b", "I", sentence.lower()) for sentence in sentences]
    starts = [
        next((at for at, letter in enumerate(sentence) if letter.isalpha()), 0)
        for sentence in lowered
    ]
    cased = [
        sentence[:at] + sentence[at : at + 1].upper() + sentence[at + 1 :]
        for sentence, at in zip(lowered, starts, strict=True)
    ]
    return "".join(part + gap for part, gap in zip(cased, [*gaps, ""], strict=True))
