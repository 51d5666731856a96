"""What a file of an explanation answers without its model: branches, and heads switched off.

A branch takes another token at a step and decodes the rest again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dragoman.decoding.hypothesis import Hypothesis
from dragoman.errors import DataError
from dragoman.explain.explanation import Explanation
from dragoman.explain.explanation_builder import ExplainedTarget, build_steps, plain_logits
from dragoman.explain.token_changes import compare_tokens
from dragoman.explain.token_spans import tokenize_text
from dragoman.explain.wire_format import encode_step, encode_text
from dragoman.text.special_tokens import BOS, EOS, PAD

if TYPE_CHECKING:
    from dragoman.inference.translator import Translator

MAX_BRANCHES = 256  # of one explanation; each is a search of its own


def branch_prefix(explanation: Explanation, step: int, token: int) -> list[int]:
    """Return the forced tokens of a branch; raise DataError for a step that is not there."""
    target = [each.id for each in explanation.target.tokens]
    if not 0 <= step < len(target):
        raise DataError(
            f"a branch must leave the target at one of its steps, 0 to {len(target) - 1}",
            found=f"{step}",
            fix="choose a step of the explanation",
        )
    return [*target[:step], token]


def list_branches(explanation: Explanation, per_step: int) -> list[tuple[int, int]]:
    """Return (step, token) of the most probable alternatives of each step that was not forced."""
    found = list[tuple[int, int]]()
    for at, step in enumerate(explanation.steps):
        others = [token for token, _, _ in step.top if token != step.id and token not in (PAD, BOS)]
        found += [(at, token) for token in others[:per_step] if not step.forced]
    return found[:MAX_BRANCHES]


def compute_branches(
    translator: Translator, explanation: Explanation, chosen: Sequence[tuple[int, int]]
) -> dict[str, dict[str, Any]]:
    """Return branches as JSON values, by `step:token`: target, steps, score and changes."""
    prefixes = [branch_prefix(explanation, step, token) for step, token in chosen]
    found = translator.search_prefixes(explanation, prefixes)
    before = [each.id for each in explanation.target.tokens]
    branches = dict[str, dict[str, Any]]()
    for (step, token), prefix, (hypothesis, text) in zip(chosen, prefixes, found, strict=True):
        tokens = _written(hypothesis)
        target = ExplainedTarget(tokens=tokens, text=text, forced=len(prefix))
        source = [each.id for each in explanation.source.tokens[:-1]]
        logits = plain_logits(translator.model, source, tokens)
        steps = build_steps(logits, target, translator.tokenizers.tgt)
        total = math.fsum(each.logprob for each in steps)
        changes = compare_tokens(
            before,
            tokens,
            score_before=explanation.score.get("normalised"),
            score_after=hypothesis.score,
        )
        branches[f"{step}:{token}"] = {
            "target": encode_text(
                tokenize_text(translator.tokenizers.tgt, text, tokens, lang=explanation.target.lang)
            ),
            "steps": [encode_step(dataclasses.replace(each, top=[])) for each in steps],
            "score": {
                "sum": round(total, 6),
                "normalised": round(hypothesis.score, 6),
                "penalty": explanation.score.get("penalty"),
            },
            "changes": changes.to_dict(),
        }
    return branches


def list_heads(explanation: Explanation, most: int) -> list[str]:
    """Return the heads with the largest effects, exact where known and else estimated."""
    effects = dict[str, float]()
    for head in explanation.heads:
        effect = head.effect_estimate if head.effect_exact is None else head.effect_exact
        if effect is not None:
            effects[f"{head.site}.{head.head}"] = abs(effect)
    return sorted(effects, key=lambda each: -effects[each])[:most]


def add_ablations(predictor: Any, explanation: Explanation, heads: Sequence[str]) -> Explanation:
    """Return the explanation with what changes when each head is switched off by itself.

    A page that was written to a file shows these; a served one asks for any.
    """
    found = {head: predictor.ablate(explanation, [head]).to_dict() for head in heads}
    return dataclasses.replace(explanation, ablations={**explanation.ablations, **found})


def _written(hypothesis: Hypothesis) -> list[int]:
    """Return the tokens of a hypothesis, EOS included if it is finished."""
    return [*hypothesis.tokens, EOS] if hypothesis.finished else list(hypothesis.tokens)
