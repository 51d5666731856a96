"""Explanations of translations: the search, attributions, heads switched off, and branches."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dragoman.config import Config
from dragoman.config.translation_directions import Direction
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.errors import ConfigError, DataError
from dragoman.explain import Explanation
from dragoman.explain.attention_and_logit_capture import locate_sites
from dragoman.explain.attribution import attribute_one, attribute_tokens, attribution_fields
from dragoman.explain.explanation import Ablation, Array, Attribution
from dragoman.explain.head_ablation import (
    ablate_heads,
    head_batches,
    heads_switched_off,
    measure_head_batch,
    select_heads,
)
from dragoman.explain.teacher_forced_pass import TeacherForcedPair
from dragoman.explain.token_spans import tokenize_text
from dragoman.explain.translation_explanation_builder import (
    ExplainedTarget,
    add_search,
    build_score,
    build_steps,
    explain_pair,
    model_digest,
    plain_logits,
)
from dragoman.inference.capitals_and_final_stops import (
    add_final_stops,
    is_in_capitals,
    recase_capitals,
)
from dragoman.inference.dragoman_model_engine import NativeEngine
from dragoman.inference.engine_protocol import Engine
from dragoman.inference.forced_token_branches_and_head_ablation import (
    branch_prefix,
    compute_branches,
    list_branches,
)
from dragoman.inference.long_line_segments import (
    Segment,
    is_foreign,
    iter_texts,
    split_lines,
)
from dragoman.inference.single_batch_translator import BatchTranslator
from dragoman.inference.translation_direction_choice import DirectionChooser
from dragoman.inference.translation_options import TranslationOptions, parse_options
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.sentence_splitter import split_sentences
from dragoman.text.sentencepiece_tokenizer import Tokenizers
from dragoman.text.special_tokens import EOS


class _FirstSegment(NamedTuple):
    """The first segment of a text, the settings with its languages, and how many segments."""

    segment: Segment
    config: Config
    num_segments: int


class TranslationExplainer(abc.ABC):
    """The methods of a `Translator` that explain its translations.

    An explanation is of one search, on the native engine. What it does not hold is computed from
    it on request: another attribution, heads switched off, another token at a step.
    """

    tokenizers: Tokenizers
    config: Config
    _native: NativeEngine
    _batch_translator: BatchTranslator
    _chooser: DirectionChooser

    @property
    @abc.abstractmethod
    def engine(self) -> Engine:
        """The engine in use."""

    @property
    @abc.abstractmethod
    def model(self) -> EncoderDecoder:
        """The PyTorch model."""

    @abc.abstractmethod
    def _choose_directions(
        self, texts: Sequence[str], options: TranslationOptions
    ) -> list[Direction] | None:
        """Return the direction of each text; None for a model without language tags."""

    def explain(
        self,
        text: str,
        *,
        reference: str | None = None,
        off: Sequence[str] = (),
        attribution: str | None = "auto",
        **options: Any,
    ) -> Explanation:
        """Translate one text and record all attention weights; a long text is cut to a segment.

        With a `reference` the target is that text instead, and its score is compared with that of
        the translation. `off` are heads that are switched off, such as ["x3.2"]; `attribution` is
        a method, None for none, or "auto": attention x gradient and input x gradient. The other
        options are the fields of `TranslationOptions`; by default the second best is searched for
        too, so that it can be seen why it lost.
        """
        chosen, model = parse_options(options), self.model
        if chosen.mbr is not None:
            raise ConfigError(
                [
                    "an explanation is of one search, not of minimum Bayes risk decoding; "
                    f"found mbr={chosen.mbr!r}; leave it out, or explain its output as reference"
                ]
            )
        if "nbest" not in options:
            chosen = chosen.with_runner_up(self.config.decode)
        batches = self._batch_translator
        segment, config, count = self._first_segment(text, chosen)
        foreign = is_foreign(segment.src, self.tokenizers.src)
        if foreign and not chosen.source_language:
            config = config.replace(data={"src_lang": ""})  # whatever was identified, it is not
        if self.engine is not self._native:
            batches.log_native_fallback("cannot record or edit attention")
        strategy = chosen.strategy(self.config.decode)
        given = None if reference is None else batches.encode_reference(reference, chosen)
        with self._heads_off(off, len(segment.src) + 1):
            searched = batches.trace_search(segment, chosen, strategy)
            best = searched.best if given is None else given
            tokens = [*best.tokens, EOS] if best.finished else best.tokens
            target = ExplainedTarget(
                tokens=tokens,
                text=batches.detokenize([[best]])[0][0],
                forced=len(searched.prefix) if given is None else len(tokens),
                masked=searched.masked if given is None else (),
                search_sum=best.total if given is None else None,
            )
            with self._native.single_threaded():
                explanation = explain_pair(
                    model,
                    self.tokenizers,
                    config,
                    text=segment.text,
                    source=segment.src,
                    target=target,
                    penalty=strategy.penalty,
                    attribution=attribution,
                    request={
                        "text": text,
                        "source_lang": config.data.src_lang,
                        "target_lang": config.data.tgt_lang,
                        "strategy": strategy.name,
                        "beam": strategy.beam_size,
                        "length_penalty": getattr(strategy.penalty, "alpha", None),
                        "nbest": strategy.nbest,
                        "max_len": searched.max_length,
                        "prefix": list(searched.prefix),
                        "reference": reference,
                        "off": list(off),
                        "seed": chosen.seed if chosen.sample else None,
                    },
                )
        if foreign:
            explanation.missing["text"] = (
                "Most characters of this text are not in the model's vocabulary: it is in none of "
                "the model's languages, and the output means little."
            )
        sentences = len(split_sentences(text).texts) if self.config.decode.split_sentences else 1
        if count > 1:
            explanation.missing["text"] = (
                f"Segment 1 of {count:,} is explained: the text has more than the "
                f"{batches.max_segment_tokens:,} tokens that the model translates at once; explain "
                "the other sentences one by one."
            )
        elif self.config.decode.recase_capitals and is_in_capitals(text):
            explanation.missing["text"] = (
                "The text is in capitals: it is explained as it is translated, in sentence case "
                "(decode.recase_capitals)."
            )
        elif segment.text == f"{text.strip()}." and not foreign:
            explanation.missing["text"] = (
                "The text is explained with the full stop that it is translated with "
                "(decode.mirror_final_stop)."
            )
        elif sentences > 1 and not foreign:
            explanation.missing["text"] = (
                f"The {sentences:,} sentences of this text are explained as one, while they are "
                "translated one by one (decode.split_sentences): explain one at a time."
            )
        return add_search(
            explanation, searched, self.tokenizers.tgt, has_reference=given is not None
        )

    def ablate(self, explanation: Explanation, heads: Sequence[str], **options: Any) -> Ablation:
        """Return the effect of switching off heads such as "x3.2".

        `effect` is the change of each target token's log-probability under teacher forcing. The
        new translation is a search with the explanation's beam, length penalty and prefix; options
        that it does not state, such as constraints, are given again as `options`.
        """
        pair, before = self._forced_target(explanation), explanation.request.get("off", ())
        off = list(dict.fromkeys([*before, *heads]))
        chosen = parse_options(self._repeat_options(explanation.request) | options)
        segment, config, _ = self._first_segment(explanation.request["text"], chosen)
        strategy = chosen.strategy(self.config.decode)
        with self._native.single_threaded(), self._heads_off(before, pair.src_length):
            selected = select_heads(explanation.sites, [head for head in off if head not in before])
            effect = ablate_heads(pair, selected)
        with self._heads_off(off, pair.src_length):
            searched = self._batch_translator.trace_search(segment, chosen, strategy)
            best = searched.best
            tokens = [*best.tokens, EOS] if best.finished else best.tokens
            target = ExplainedTarget(
                tokens, searched.texts[0], len(searched.prefix), searched.masked, best.total
            )
            with self._native.single_threaded():
                logits = plain_logits(self.model, segment.src, tokens)
        steps = build_steps(logits, target, self.tokenizers.tgt)
        return Ablation(
            off=list(heads),
            effect=[float(each) for each in effect],
            sum_change=float(effect.sum()),
            target=tokenize_text(
                self.tokenizers.tgt, target.text, tokens, lang=config.data.tgt_lang
            ),
            steps=steps,
            score=build_score(steps, strategy.penalty),
        )

    def attribute(
        self, explanation: Explanation, method: str, *, step: int | None = None
    ) -> tuple[Attribution, dict[str, Array]]:
        """Return the attribution of an explanation's target by a method, and its arrays.

        The methods are attention_x_gradient, input_x_gradient, integrated_gradients, value_zeroing
        and occlusion; the first two can be of one target token, `step`: other rows are zero.
        """
        pair, off = self._forced_target(explanation), explanation.request.get("off", ())
        with self._native.single_threaded(), self._heads_off(off, pair.src_length):
            found = (
                attribute_tokens(pair, method)
                if step is None
                else attribute_one(pair, method, step)
            )
        return attribution_fields(found)

    def head_effects(self, explanation: Explanation) -> Iterator[tuple[str, float]]:
        """Yield each head with the change of the target's log-probability without it.

        Heads of the decoder come first; they come in batches, as they are computed.
        """
        pair, off = self._forced_target(explanation), explanation.request.get("off", ())
        ids = {site.path: site.id for site in explanation.sites}
        # Switched off and run within `next`, not between: a generator's context is its caller's.
        for batch in head_batches(pair):
            with self._native.single_threaded(), self._heads_off(off, pair.src_length):
                effects = measure_head_batch(pair, batch)
            yield from ((f"{ids[each.path]}.{each.head}", each.total) for each in effects)

    def _first_segment(self, text: str, options: TranslationOptions) -> _FirstSegment:
        """Return the first segment of a text to explain, and the settings with its languages.

        Raise DataError if it has none.
        """
        texts = recase_capitals(list(iter_texts([text])), self.config.decode)
        directions = self._choose_directions(texts, options)
        texts = add_final_stops(texts, self.config.decode)
        [line] = split_lines(
            texts,
            self.tokenizers.src,
            longest=self._batch_translator.max_segment_tokens,
            directions=directions,
        )
        if not line.segments:
            raise DataError(
                "a text to explain must hold words", found=repr(text), fix="pass a text with words"
            )
        config = self.config
        if directions is not None:
            [(source, target)] = directions
            config = config.replace(data={"src_lang": source, "tgt_lang": target})
        return _FirstSegment(line.segments[0], config, len(line.segments))

    def _repeat_options(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of an explanation's search, its languages included."""
        options = _repeat_options(request)
        if self._chooser.has_tags:
            named = {name: request.get(f"{name}_lang") for name in ("source", "target")}
            options |= {f"{name}_language": value for name, value in named.items() if value}
        return options

    @contextlib.contextmanager
    def _heads_off(self, names: Sequence[str], sources: int) -> Iterator[None]:
        """Switch heads off within the block, for this thread, if there are any."""
        if not names:
            yield
            return
        sites = [each.site for each in locate_sites(self.model)]
        with heads_switched_off(self.model, select_heads(sites, names), sources=sources):
            yield

    def _forced_target(self, explanation: Explanation) -> TeacherForcedPair:
        """Return an explanation's source and target; raise DataError if they are not ours."""
        source, target = (
            [token.id for token in side.tokens] for side in (explanation.source, explanation.target)
        )
        digest = model_digest(self.model, self.tokenizers)
        if explanation.model.get("digest", digest) != digest:
            raise DataError(
                "an explanation must be of this model",
                found=f"one of another, {explanation.model.get('name') or 'without a name'}",
                fix="explain the text with this model first",
            )
        return TeacherForcedPair.build(self.model, source, target)

    def branch(
        self, explanation: Explanation, step: int, token: int, **options: Any
    ) -> Explanation:
        """Explain the output with another token at a step; the tokens before it stay.

        It is a search with the explanation's beam and length penalty, and with the same heads off.
        """
        request = explanation.request
        repeated = self._repeat_options(request) | {"off": request.get("off", ())}
        prefix = {"prefix_ids": branch_prefix(explanation, step, token)}
        return self.explain(request["text"], **(repeated | options | prefix))

    def add_branches(self, explanation: Explanation, per_step: int = 2) -> Explanation:
        """Return the explanation with branches to the best alternatives of each step.

        A page that was written to a file shows these; a served one asks for any.
        """
        chosen = list_branches(explanation, per_step)
        pair, off = self._forced_target(explanation), explanation.request.get("off", ())
        with self._heads_off(off, pair.src_length), self._native.single_threaded():
            branches = compute_branches(self, explanation, chosen) if chosen else {}
        return dataclasses.replace(explanation, branches={**explanation.branches, **branches})

    def search_prefixes(
        self, explanation: Explanation, prefixes: Sequence[Sequence[int]]
    ) -> list[tuple[Hypothesis, str]]:
        """Search the source of an explanation once with each prefix; return the best of each."""
        chosen = parse_options(self._repeat_options(explanation.request) | {"prefix_ids": None})
        segment, _, _ = self._first_segment(explanation.request["text"], chosen)
        return self._batch_translator.search_prefixes(
            segment, prefixes, chosen.strategy(self.config.decode)
        )


def _repeat_options(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an explanation's search, as far as its request states them."""
    options = {name: request.get(name) for name in ("length_penalty", "nbest")}
    options["prefix_ids"] = request.get("prefix") or None
    if request.get("strategy") == "sampling":
        options |= {"sample": True, "seed": request.get("seed")}
    else:
        options["beam"] = request.get("beam")
    return {name: value for name, value in options.items() if value is not None}
