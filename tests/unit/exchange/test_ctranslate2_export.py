"""Export to CTranslate2: supported settings compute the same, others are rejected, and the engine
passes the engine tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_kit import LINES, build_exportable_model

from dragoman.data.inference_batches import pad_batch, pad_sources
from dragoman.decoding.beam_search import BeamSearch
from dragoman.decoding.greedy import GreedySearch
from dragoman.decoding.hypothesis import Hypothesis
from dragoman.decoding.length_penalty import WuLengthPenalty
from dragoman.decoding.sampling import Sampling
from dragoman.errors import ConfigError
from dragoman.exchange.ctranslate2_export import save_ctranslate2
from dragoman.inference import NativeEngine, SearchRequest
from dragoman.inference.ctranslate2_engine import CTranslate2Engine
from dragoman.text.sentencepiece_tokenizer import Tokenizers
from dragoman.text.special_tokens import BOS, EOS, UNK

pytest.importorskip("ctranslate2")


SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "pre-norm": {"residual": "pre_norm"},
    "pre-norm without a last norm": {"residual": "pre_norm", "final_norm": "off"},
    "post-norm with a last norm": {"final_norm": "on", "norm": "rms"},
    "sines in halves": {"positions": "sinusoidal_halves"},
    "learned positions": {"positions": "learned", "max_positions": 400},
    "no positions": {"positions": "none"},
    "rotary": {"positions": "rotary"},
    "t5's buckets": {"positions": "t5"},
    "shaw": {"positions": "shaw"},
    "gelu": {"activation": "gelu"},
    "swish": {"activation": "swish"},
    "geglu": {"activation": "geglu"},
    "rms": {"norm": "rms", "residual": "pre_norm", "norm_epsilon": 0.05},
    "t5's norm": {"norm": "t5", "norm_epsilon": 1e-6},
    "grouped heads": {"kv_heads": 2},
    "one head of keys": {"kv_heads": 1, "head_width": 12},
    "no biases": {"attention_bias": False},
    "output bias": {"output_bias": True, "norm_epsilon": 0.05},
    "target tied": {"tie_embeddings": "target"},
    "untied": {"tie_embeddings": "none", "scale_embeddings": False},
    "unequal stacks": {"encoder": ["transformer(heads=2)*3"], "decoder": ["transformer"]},
    "like llama": {
        "positions": "rotary",
        "kv_heads": 2,
        "residual": "pre_norm",
        "norm": "rms",
        "activation": "swiglu",
        "attention_bias": False,
    },
    "no biases at all": {"attention_bias": False, "ffn_bias": False},
    "a gate without biases": {"activation": "swiglu", "ffn_bias": False},
    "shared layers": {"share_layers": "all"},
    "narrow embeddings of length one": {"embedding_width": 16, "fix_norm": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_log_probabilities_are_ours_for_every_setting_that_it_can_express(
    name: str, tmp_path: Path
) -> None:
    model, tokenizers, config = build_exportable_model(**SETTINGS[name])
    save_ctranslate2(model, tokenizers, config, tmp_path, quantization="float32")
    engine = CTranslate2Engine(tmp_path, tokenizers, name="it", longest=1024, workers=1)
    sources = [tokenizers.src.encode(line) for line in [*LINES, " ".join(LINES * 3)]]
    targets = [tokenizers.tgt.encode(line.upper()) for line in [*LINES, " ".join(LINES * 3)]]
    with torch.inference_mode():
        given, mask = pad_batch([[BOS, *target] for target in targets])
        log_probs = model.project(
            model.decode(given, model.encode(*pad_sources(sources)), mask)
        ).log_softmax(-1)
    for row, (target, found) in enumerate(
        zip(targets, engine.log_probs(sources, targets), strict=True)
    ):
        expected = [
            float(log_probs[row, place, token]) for place, token in enumerate([*target, EOS])
        ]
        assert found == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ({"encoder": ["bilstm"]}, "BiLSTMLayer as block 0"),
        ({"positions": "alibi"}, "found AlibiBias"),
        ({"norm": "scale"}, "found ScaleNorm"),
        ({"residual": "scaled"}, "found Scaled"),
        ({"window": 3}, "found 3 and 3"),
        ({"decoder": ["transformer(window=3)*2"]}, "found 0 and 3"),
        ({"qk_norm": "rms"}, "found RMSNorm"),
        ({"encoder": ["transformer(activation=gelu)", "transformer"]}, "GELU and ReLU"),
        ({"talking_heads": True}, "found self.mix_scores"),
        ({"value_width": 5}, "values as wide as its keys; found model.value_width=5"),
    ],
)
def test_unsupported_models_are_rejected_with_the_reason(
    model: dict[str, Any], found: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        save_ctranslate2(*build_exportable_model(**model), tmp_path, quantization="float32")
    assert found in str(error.value)
    assert "the native engine runs every model" in str(error.value)


def test_quantization_does_not_change_the_loaded_model(tmp_path: Path) -> None:
    model, tokenizers, config = build_exportable_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    save_ctranslate2(model, tokenizers, config, tmp_path, quantization="int8")
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    with pytest.raises(ConfigError, match="found 'int4'"):
        save_ctranslate2(model, tokenizers, config, tmp_path, quantization="int4")


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[NativeEngine, CTranslate2Engine, Tokenizers]:
    """Return both engines of a model whose outputs vary in length and hold forbidden tokens."""
    model, tokenizers, config = build_exportable_model(output_bias=True)
    with torch.no_grad():
        model.output.bias[EOS] += 7.0  # type: ignore[index]
        model.output.bias[UNK] += 7.0  # type: ignore[index]
    folder = tmp_path_factory.mktemp("engine")
    save_ctranslate2(model, tokenizers, config, folder, quantization="float32")
    return (
        NativeEngine(lambda: model),
        CTranslate2Engine(folder, tokenizers, name="it", longest=1024, workers=2),
        tokenizers,
    )


def request(tokenizers: Tokenizers, **more: Any) -> SearchRequest:
    """Request a few lines, each with its own length limit."""
    sources = [tokenizers.src.encode(line) for line in LINES]
    defaults: dict[str, Any] = {
        "limits": [3, 30, 7, 12, 1],
        "prefixes": [[]] * 5,
        "strategy": GreedySearch(),
        "sample_ids": range(5),
    }
    return SearchRequest(sources=sources, **{**defaults, **more})


def assert_same(ours: list[list[Hypothesis]], theirs: list[list[Hypothesis]]) -> None:
    """Compare two searches' results, numbers included."""
    for one, other in zip(ours, theirs, strict=True):
        for mine, its in zip(one, other, strict=True):
            assert (mine.tokens, mine.finished) == (its.tokens, its.finished)
            assert its.log_probs == pytest.approx(mine.log_probs, abs=2e-5)
            assert its.score == pytest.approx(mine.score, abs=2e-4)


def test_greedy_search_is_ours_with_limits_prefixes_and_forbidden_tokens(
    pair: tuple[NativeEngine, CTranslate2Engine, Tokenizers],
) -> None:
    native, engine, tokenizers = pair
    prefix, ended = tokenizers.tgt.encode("EINE"), set[bool]()
    for query in (
        request(tokenizers),
        request(tokenizers, min_length=4),
        request(tokenizers, prefixes=[prefix, [], prefix, [], prefix * 3]),
        request(tokenizers, strategy=GreedySearch(penalty=WuLengthPenalty(0.0))),
    ):
        ours = native.generate(query)
        assert_same(ours, engine.generate(query))
        ended |= {one[0].finished for one in ours}
    assert ended == {True, False}, "outputs of both kinds must come up"


def test_unscored_outputs_are_the_scored_ones(
    pair: tuple[NativeEngine, CTranslate2Engine, Tokenizers],
) -> None:
    _, engine, tokenizers = pair
    for strategy in (GreedySearch(), BeamSearch(3, 2)):
        return_scores, plain = (
            engine.generate(request(tokenizers, strategy=strategy, return_scores=return_scores))
            for return_scores in (True, False)
        )
        assert [[each.tokens for each in row] for row in return_scores] == [
            [each.tokens for each in row] for row in plain
        ]
    assert not any(
        row[0].log_probs for row in engine.generate(request(tokenizers, return_scores=False))
    )


def test_a_beam_ranks_by_our_penalty_and_scores_as_the_model_does(
    pair: tuple[NativeEngine, CTranslate2Engine, Tokenizers],
) -> None:
    """Its search stops by another criterion, so its n-best may differ; its scores must still be
    right.
    """
    native, engine, tokenizers = pair
    prefix = tokenizers.tgt.encode("EINE")
    penalty = WuLengthPenalty(0.7)
    query = request(
        tokenizers,
        strategy=BeamSearch(4, 3, penalty),
        prefixes=[prefix, *[[]] * 4],
        limits=[30, 30, 7, 12, 2],
    )
    for row, found in enumerate(engine.generate(query)):
        assert 1 <= len(found) <= 3
        assert found[0].tokens[: len(query.prefixes[row])] == query.prefixes[row]
        assert [each.score for each in found if each.finished] == sorted(
            (each.score for each in found if each.finished), reverse=True
        )
        for each in found:
            assert len(each.tokens) <= query.limits[row]
            assert not {0, BOS, UNK} & set(each.tokens)
            forced = SearchRequest(
                sources=[query.sources[row]],
                limits=[len(each.tokens)],
                prefixes=[each.tokens],
                strategy=GreedySearch(penalty),
                sample_ids=[0],
            )
            [[again]] = native.generate(forced)
            assert each.log_probs[: len(each.tokens)] == pytest.approx(
                again.log_probs[: len(each.tokens)], abs=2e-5
            )
            assert each.score == pytest.approx(
                penalty.score(sum(each.log_probs), len(each.log_probs)), abs=1e-5
            )


def test_the_best_of_a_beam_is_the_same_whether_one_or_all_are_returned(
    pair: tuple[NativeEngine, CTranslate2Engine, Tokenizers],
) -> None:
    """Its own sums leave a forced prefix out, which weighs less the longer an output is."""
    _, engine, tokenizers = pair
    penalty = WuLengthPenalty(1.0)
    for text in ("EINE", "ZWEI HUNDE", "EIN MANN GEHT"):
        prefix = tokenizers.tgt.encode(text)
        one, every = (
            engine.generate(
                request(
                    tokenizers,
                    strategy=BeamSearch(6, nbest, penalty),
                    prefixes=[prefix] * 5,
                    limits=[30] * 5,
                )
            )
            for nbest in (1, 6)
        )
        assert [row[0].tokens for row in one] == [row[0].tokens for row in every]
        assert [row[0].score for row in one] == pytest.approx([row[0].score for row in every])


def test_engine_reports_unsupported_requests(
    pair: tuple[NativeEngine, CTranslate2Engine, Tokenizers],
) -> None:
    _, engine, _ = pair
    assert (
        engine.unsupported_reason(GreedySearch())
        == engine.unsupported_reason(BeamSearch(4, 2), 1024)
        == ""
    )
    assert "sampling" in engine.unsupported_reason(Sampling(1.0, 0, 1.0, 1))
    assert "1024" in engine.unsupported_reason(GreedySearch(), 1025)

    class Other:
        def score(self, total: float, length: int) -> float:
            return total

        bound = score  # type: ignore[assignment]

    assert "Other" in engine.unsupported_reason(GreedySearch(penalty=Other()))  # type: ignore[arg-type]
