"""Language tags (BCP 47) and script detection, with the scripts that write no spaces.

Scripts have ISO 15924 codes: `Hani` for Chinese, `Jpan` for Japanese, `Kore` for Korean, `Thai`. An
empty code stands for any script that separates words by spaces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_MAX_SAMPLE_CHARACTERS = 1_000_000  # characters counted at most: enough to detect a script
# Of Han and kana together: running Japanese has at least a third, Chinese quotes a few.
_KANA_FRACTION = 0.1

_CHARACTERS = {
    "Hani": "\u2e80-\u2fdf\u3005\u3007\u3021-\u3029\u3038-\u303b\u3105-\u312f\u31a0-\u31bf"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff",
    # Kana; Han characters are counted apart.
    "Jpan": "\u3041-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f"
    "\U0001b000-\U0001b16f",
    "Kore": "\u1100-\u11ff\u3131-\u318e\ua960-\ua97f\uac00-\ud7ff\uffa0-\uffdc",
    "Thai": "\u0e01-\u0e3a\u0e40-\u0e4e",
    "Laoo": "\u0e81-\u0ecf\u0edc-\u0edf",
    "Tibt": "\u0f00\u0f18-\u0f1f\u0f35-\u0fbc",
    "Mymr": "\u1000-\u103f\u1050-\u108f\u109a-\u109f\ua9e0-\ua9ef\ua9fa-\ua9fe\uaa60-\uaa7f",
    "Khmr": "\u1780-\u17d3\u17dc\u17dd",
    "Tale": "\u1950-\u1974",
    "Talu": "\u1980-\u19c9",
    "Lana": "\u1a20-\u1a5e\u1a61-\u1a7c",
    "Tavt": "\uaa80-\uaac2\uaadb-\uaadd",
    "Java": "\ua980-\ua9c0",
    "Bali": "\u1b00-\u1b4c",
}
SCRIPT_NAMES = {
    "Hani": "Chinese",
    "Jpan": "Japanese",
    "Kore": "Korean",
    "Thai": "Thai",
    "Laoo": "Lao",
    "Tibt": "Tibetan",
    "Mymr": "Burmese",
    "Khmr": "Khmer",
    "Tale": "Tai Le",
    "Talu": "New Tai Lue",
    "Lana": "Tai Tham",
    "Tavt": "Tai Viet",
    "Java": "Javanese",
    "Bali": "Balinese",
    "": "spaced",
}
"""Names of the scripts, for messages."""

_SCRIPT_PATTERNS = {code: re.compile(f"[{characters}]") for code, characters in _CHARACTERS.items()}
_UNSPACED_CHARACTERS = "".join(_CHARACTERS.values())
_OTHER_WORDS = re.compile(rf"[^\W\d_{_UNSPACED_CHARACTERS}]+")

# Script subtags, and languages by their usual script; ISO 639 codes of two and three letters.
_SPACED_SCRIPTS = """
    Latn Cyrl Arab Grek Hebr Deva Beng Taml Telu Knda Mlym Gujr Guru Orya Sinh Geor Armn Ethi Mong
    Cans Cher Thaa Tfng Nkoo Syrc Olck Mtei Vaii Adlm
"""
_SCRIPT_SUBTAGS = {
    **{code: code for code in _CHARACTERS},
    **dict.fromkeys(("Hans", "Hant", "Hanb", "Bopo"), "Hani"),
    **dict.fromkeys(("Hira", "Kana", "Hrkt"), "Jpan"),
    "Hang": "Kore",
    **dict.fromkeys(_SPACED_SCRIPTS.split(), ""),
}
_UNSPACED_LANGUAGES = {
    "Hani": "zh zho chi cmn yue wuu hak nan gan hsn cdo mnp cjy czh czo cpx lzh csp cnp",
    "Jpan": "ja jpn ojp",
    "Kore": "ko kor",
    "Thai": "th tha sou tts nod",
    "Laoo": "lo lao",
    "Tibt": "bo bod tib dz dzo adx khg",
    "Mymr": "my mya bur shn mnw ksw rki",
    "Khmr": "km khm",
}
# Languages written in several scripts, spaced and not (Javanese, Pali, Sanskrit), are detected from
# the text.
_SPACED_LANGUAGES = """
    aa aar ab abk af afr ak aka am amh an arg ar ara as asm av ava ay aym az aze ba bak be bel bg
    bul bi bis bm bam bn ben br bre bs bos ca cat ce che ch cha co cos cr cre cs ces cze cu chu cv
    chv cy cym wel da dan de deu ger dv div ee ewe el ell gre en eng eo epo es spa et est eu eus
    baq fa fas per ff ful fi fin fj fij fo fao fr fra fre fy fry ga gle gd gla gl glg gn grn gu
    guj gv glv ha hau he iw heb hi hin ho hmo hr hrv ht hat hu hun hy hye arm hz her ia ina id in
    ind ie ile ig ibo ik ipk io ido is isl ice it ita iu iku ka kat geo kg kon ki kik kj kua kk
    kaz kl kal kn kan kok kr kau ks kas ku kur kv kom kw cor ky kir la lat lb ltz lg lug li lim ln
    lin lt lit lu lub lv lav mg mlg mh mah mi mri mao mk mkd mac ml mal mn mon mr mar ms msa may
    mt mlt na nau nb nob nd nde ne nep ng ndo nl nld dut nn nno no nor nr nbl nv nav ny nya oc oci
    oj oji om orm or ori os oss pa pan pl pol ps pus pt por qu que rm roh rn run ro ron rum ru rus
    rw kin sc srd sd snd se sme sg sag si sin sk slk slo sl slv sm smo sn sna so som sq sqi alb sr
    srp ss ssw st sot su sun sv swe sw swa ta tam te tel tg tgk ti tir tk tuk tl tgl fil tn tsn to
    ton tr tur ts tso tt tat tw twi ty tah ug uig uk ukr ur urd uz uzb ve ven vi vie vo vol wa wln
    wo wol xh xho yi yid yo yor za zha zu zul
"""
_LANGUAGES = dict.fromkeys(_SPACED_LANGUAGES.split(), "") | {
    language: script
    for script, languages in _UNSPACED_LANGUAGES.items()
    for language in languages.split()
}


class LanguageTag(NamedTuple):
    """Language, script and region of a language tag, in BCP 47's usual case; empty if absent."""

    language: str  # `zh`; of an extended language that one: `yue` of `zh-yue`
    script: str = ""  # `Hant`
    region: str = ""  # `TW`


def parse_language(tag: str) -> LanguageTag:
    """Parse a BCP 47 tag such as `zh-Hant-TW`; return an empty one if it is no tag.

    Underscores, any case and a locale's `.UTF-8` are accepted.
    """
    subtags = re.split(r"[-_]", re.split(r"[.@]", tag.strip())[0])
    if not re.fullmatch(r"[A-Za-z]{2,8}", subtags[0]) or len(subtags[0]) == 4:
        return LanguageTag("")
    language, script, region = subtags[0].lower(), "", ""
    for index, subtag in enumerate(subtags[1:], 1):
        if len(subtag) == 1 or not subtag.isascii():
            # an extension or private use: the rest is ignored
            break
        if subtag.isalpha() and len(subtag) == 3 and not script and not region and index <= 3:
            # zh-yue, zh-min-nan
            language = subtag.lower() if subtag.lower() in _LANGUAGES else language
        elif subtag.isalpha() and len(subtag) == 4 and not script and not region:
            script = subtag.title()
        elif not region and re.fullmatch(r"[A-Za-z]{2}|[0-9]{3}", subtag):
            region = subtag.upper()
    return LanguageTag(language, script, region)


def script_of_language(tag: str) -> str | None:
    """Return the script of a language tag, "" for a spaced one; None if the tag does not decide."""
    parsed = parse_language(tag)
    if parsed.script in _SCRIPT_SUBTAGS:
        return _SCRIPT_SUBTAGS[parsed.script]
    return None if parsed.script else _LANGUAGES.get(parsed.language)


class ScriptCounts(NamedTuple):
    """The script that most of a text is written in, and the number of characters counted."""

    script: str
    characters: int


def count_scripts(texts: Iterable[str]) -> ScriptCounts:
    """Return the script of a text; each unspaced character and each spaced word has one vote.

    So a Chinese text with many English names is Chinese, and an English text that quotes Chinese
    words is not.
    """
    counts = dict.fromkeys(_SCRIPT_PATTERNS, 0)
    words = seen = 0
    for text in texts:
        seen += len(text)
        if text.isascii():
            words += len(_OTHER_WORDS.findall(text))
        else:
            for code, pattern in _SCRIPT_PATTERNS.items():
                counts[code] += len(pattern.findall(text))
            words += len(_OTHER_WORDS.findall(text))
        if seen > _MAX_SAMPLE_CHARACTERS:
            break
    chinese_japanese = counts["Hani"] + counts["Jpan"]
    if counts["Jpan"] > _KANA_FRACTION * chinese_japanese:
        counts |= {"Jpan": chinese_japanese, "Hani": 0}
    else:
        counts |= {"Hani": chinese_japanese, "Jpan": 0}
    best = max(counts, key=lambda code: counts[code])
    return ScriptCounts(best, counts[best]) if counts[best] > words else ScriptCounts("", words)
