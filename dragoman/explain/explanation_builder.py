"""Build the explanation of one translation from its parts; what a model lacks is named."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dragoman.config import Config
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.explain.attention_maps import record_attention
from dragoman.explain.explanation import AttentionSite, Explanation, Step, is_cross_attention
from dragoman.explain.token_spans import tokenize_text
from dragoman.models.encoder_decoder import EncoderDecoder
from dragoman.text.special_tokens import EOS
from dragoman.text.tokenizer import Tokenizers, normalize


def explain_pair(
    model: EncoderDecoder,
    tokenizers: Tokenizers,
    config: Config,
    *,
    text: str,
    source: Sequence[int],
    best: Hypothesis,
    translation: str,
) -> Explanation:
    """Return the explanation of a source and the hypothesis that a search found for it."""
    target = [*best.tokens, EOS] if best.finished else best.tokens
    seen = record_attention(model, source, best.tokens, finished=best.finished)
    sites, arrays = list[AttentionSite](), {}
    for path, weights in seen.attentions.items():
        layer = int(path.split(".")[1])
        is_cross = is_cross_attention(path)
        group = "cross" if is_cross else path.split(".")[0]
        letter = {"encoder": "e", "decoder": "d", "cross": "x"}[group]
        site = AttentionSite(
            id=f"{letter}{layer}",
            path=path,
            kind="cross" if is_cross else "self",
            group=group,
            layer=layer,
            heads=weights.shape[0],
            query="source" if group == "encoder" else "target",
            key="target_in" if group == "decoder" else "source",
            causal=group == "decoder",
        )
        sites.append(site)
        arrays[site.tensor] = weights
    return Explanation(
        model={"task": "translate", "name": config.recipe or ""},
        request={"text": text},
        source=tokenize_text(
            tokenizers.src,
            normalize(text, tokenizers.src.normalization),
            [*source, EOS],
            lang=config.data.src_lang or "",
        ),
        target=tokenize_text(tokenizers.tgt, translation, target, lang=config.data.tgt_lang or ""),
        steps=[
            Step(id=token, logprob=logprob, rank=1, entropy=0.0)
            for token, logprob in zip(target, seen.log_probs, strict=True)
        ],
        score={
            "sum": math.fsum(seen.log_probs),
            "normalised": best.score,
            "penalty": f"gnmt {config.decode.length_penalty:g}",
        },
        sites=sites,
        arrays=arrays,
    )
