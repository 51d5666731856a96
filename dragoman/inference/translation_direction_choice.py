"""Choice of the translation direction of each text, for models of one or several directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dragoman.config import Config
from dragoman.config.translation_directions import Direction, parse_directions
from dragoman.errors import ConfigError
from dragoman.text.language_identification import LanguageIdentifier

# Log-probability by which another language must exceed the rest for a text to count as written in
# it: that of names and single words is close, and so is that of most errors.
OTHER_LANGUAGE_MARGIN = 10.0


class DirectionChooser:
    """Chooses the direction of each text from the languages that are named or identified.

    A model without language tags has one direction, of which it may know the languages.
    """

    def __init__(
        self,
        config: Config,
        identifier: LanguageIdentifier | None = None,
        *,
        is_foreign: Callable[[str], bool] = lambda text: False,
    ) -> None:
        """Take whether a text is in none of the model's languages as `is_foreign`."""
        self._directions = parse_directions(config.data.directions)
        self._single = Direction(config.data.src_lang, config.data.tgt_lang)
        self._identifier, self._is_foreign = identifier, is_foreign

    @property
    def has_tags(self) -> bool:
        """Whether sources begin with a language tag."""
        return bool(self._directions)

    @property
    def directions(self) -> list[Direction]:
        """The directions that the model was trained on; empty without language tags."""
        return list(self._directions)

    def choose(
        self, texts: Sequence[str], source: str | None = None, target: str | None = None
    ) -> list[Direction]:
        """Return the direction of each text; raise ConfigError for one that the model has not.

        A source language that is not named is identified among those of the target; a target
        language need not be named where the source has only one.
        """
        if not self._directions:
            self._check_single(source, target)
            return [self._single] * len(texts)
        possible = self._possible_directions(source, target)
        sources = list(dict.fromkeys(each.source for each in possible))
        found = [
            sources[0] if len(sources) == 1 or not text.strip() else self._identify(text, sources)
            for text in texts
        ]
        chosen = {
            language: [each for each in possible if each.source == language] for language in sources
        }
        for text, language in zip(texts, found, strict=True):
            if len(chosen[language]) > 1 and text.strip():
                targets = [each.target for each in chosen[language]]
                if not source and self._is_foreign(text):
                    raise ConfigError(
                        [
                            "a text must be in a language of the model; found "
                            f"{text!r:.40}, whose characters it does not know; its directions are "
                            f"{', '.join(map(str, self._directions))}"
                        ]
                    )
                raise ConfigError(
                    [
                        "target_language (--to) must be named where there is a choice; found "
                        f"{text!r:.40} in {language}, which the model translates into "
                        f"{' and '.join(targets)}; add "
                        f"{' or '.join(f'--to {each}' for each in targets)}"
                        f"{'' if source else ', or --from if it is in another language'}"
                    ]
                )
        return [chosen[language][0] for language in found]

    def identify(self, text: str, among: Sequence[str] = ()) -> str:
        """Return the source language of a text."""
        sources = list(dict.fromkeys(each.source for each in self._directions))
        candidates = [each for each in sources if not among or each in among]
        return candidates[0] if len(candidates) == 1 else self._identify(text, candidates)

    def other_language(self, text: str, direction: Direction) -> str:
        """Return the language that a text is clearly in if it is not the source's, or "".

        It may be the target language, or one that the model does not translate into it.
        """
        if self._identifier is None:
            return ""
        scores = self._identifier.scores(text)
        language = max(scores, key=scores.__getitem__)
        best = scores.pop(language)
        is_clear = all(best - score >= OTHER_LANGUAGE_MARGIN for score in scores.values())
        return language if is_clear and language != direction.source else ""

    def _identify(self, text: str, sources: Sequence[str]) -> str:
        if self._identifier is None:
            raise ConfigError(
                [
                    "source_language (--from) must be named for a model that cannot detect it; "
                    f"found none of {', '.join(sources) or 'its languages'}; name one"
                ]
            )
        return self._identifier.identify(text, sources)

    def _possible_directions(self, source: str | None, target: str | None) -> list[Direction]:
        """Return the directions between the named languages; raise ConfigError if there is none."""
        possible = [
            each
            for each in self._directions
            if source in (None, "", each.source) and target in (None, "", each.target)
        ]
        if possible:
            return possible
        named = [
            f"{option} {language!r:.40}"
            for option, language in (("--from", source), ("--to", target))
            if language
        ]
        raise ConfigError(
            [
                "languages must be a direction of the model; found "
                f"{' and '.join(named)}; its directions are "
                f"{', '.join(map(str, self._directions))}"
            ]
        )

    def _check_single(self, source: str | None, target: str | None) -> None:
        """Raise ConfigError for a language that a model of one direction does not have."""
        for option, named, own in (
            ("source_language (--from)", source, self._single.source),
            ("target_language (--to)", target, self._single.target),
        ):
            if named and named != own:
                what = (
                    f"{self._single.source or '?'}-{self._single.target or '?'} only"
                    if any(self._single)
                    else "unknown languages"
                )
                raise ConfigError(
                    [
                        f"{option} must be a language of the model; found {named!r:.40} for a "
                        f"model of {what}; leave it out"
                    ]
                )
