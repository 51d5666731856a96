"""LanguageModel: continues a text token by token, and scores texts."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.data.labeled_records import Record, find_text_field
from dragoman.decoding.constrained_logits import ConstrainedRows
from dragoman.decoding.constraint_automaton import (
    AutomatonState,
    CompiledConstraints,
    SentenceConstraints,
    check_constraints,
)
from dragoman.decoding.output_constraint_definitions import Constraint, constraint_problems
from dragoman.decoding.sampling import Sampling, uniform_draw
from dragoman.decoding.search_interface import to_host
from dragoman.decoding.token_surface_forms import TokenCharacters
from dragoman.errors import ConfigError, DataError
from dragoman.inference.long_line_segments import check_unicode, iter_texts
from dragoman.inference.predictors.base import Predictor
from dragoman.inference.translation_result import truncate_repr
from dragoman.models.decoder_state import DecoderState
from dragoman.models.language_model import NeuralLanguageModel
from dragoman.ops.topk import TopK
from dragoman.text.language_model_tokenizer import SubwordTokenizer, WordTokenizer
from dragoman.text.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS, UNK
from dragoman.text.vocabulary_and_labels import normalize_text

if TYPE_CHECKING:
    from dragoman.explain.task_explainers.base import TaskExplainer
    from dragoman.tasks.bert_and_xlnet_language_modeling import FilledText
    from dragoman.tasks.language_model import LanguageTask
    from dragoman.text.language_model_tokenizer import TextDecoder

EMPTY_NOTE = "the text is empty: there is nothing to score"
MAX_NLL = 80.0  # a loss whose perplexity still fits a float
MAX_PROMPT_CHARS = 1 << 20  # of a prompt: a book
PREFILL_TOKENS = 512  # of the prompt that are read at a time
MAX_TOKENS = 1_000_000  # to generate; more is a mistake
MAX_EXPLAINED_TOKENS = 1_024  # of an explanation, whose arrays grow by their square
CONTINUED_TOKENS = 20  # of a given beginning, in an explanation


class TextChunk(str):
    """Text that one or several tokens add to a continuation, and which continuation it is."""

    sample: int  # from 0
    log_prob: float  # of the token that completed it, before temperature, top-k and top-p

    def __new__(cls, text: str, *, sample: int = 0, log_prob: float = 0.0) -> TextChunk:
        """Return the text with its sample."""
        chunk = super().__new__(cls, text)
        chunk.sample, chunk.log_prob = sample, log_prob
        return chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """A model's continuation of a prompt."""

    prompt: str
    text: str
    tokens: int
    log_prob: float  # natural, of all tokens, before temperature, top-k and top-p
    constraints: tuple[str, ...] = ()  # those that were applied

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values; six decimals."""
        return {
            "prompt": self.prompt,
            "text": self.text,
            "tokens": self.tokens,
            "log_prob": round(self.log_prob, 6),
            **({"constraints": list(self.constraints)} if self.constraints else {}),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class TextScore:
    """The log-probability of a text as a document of its own."""

    text: str
    log_prob: float  # natural, of all tokens
    tokens: int
    notes: tuple[str, ...] = ()

    @property
    def perplexity(self) -> float:
        """The perplexity per token."""
        return math.exp(min(-self.log_prob / max(self.tokens, 1), MAX_NLL))

    def __repr__(self) -> str:
        """Return the text and its perplexity in one line."""
        return f"TextScore({truncate_repr(self.text)}, perplexity {self.perplexity:.4g})"

    def to_line(self, *, top: int = 1) -> str:
        """Return `log-probability TAB perplexity`."""
        return f"{self.log_prob:.6f}\t{self.perplexity:.4f}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values; six decimals."""
        return {
            "text": self.text,
            "log_prob": round(self.log_prob, 6),
            "tokens": self.tokens,
            "perplexity": round(self.perplexity, 6),
            "notes": list(self.notes),
        }


class EncodedText(NamedTuple):
    """A text and its token ids."""

    text: str
    ids: NDArray[np.int32]


class LanguageModel(Predictor[str, EncodedText, TextScore]):
    """Continues and scores texts.

    `"".join(LanguageModel.load("my-lm").generate("The", max_tokens=100))`
    """

    task_name: ClassVar[str] = "language"
    task: LanguageTask
    model: NeuralLanguageModel

    def __new__(cls, model: nn.Module, task: LanguageTask) -> LanguageModel:
        """Return the predictor of `language.objective`: MaskedLanguageModel unless causal."""
        if task.language.objective != "causal":
            from dragoman.inference.predictors.masked_language_model import MaskedLanguageModel

            return super().__new__(MaskedLanguageModel)
        return super().__new__(cls)

    # Generation

    def generate(
        self,
        prompt: str = "",
        *,
        max_tokens: int = 100,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 1,
        n: int = 1,
        constraints: Sequence[Constraint] = (),
    ) -> Iterator[TextChunk]:
        """Yield the continuation of a prompt as it is written.

        A temperature of 0 takes the most probable token. With `n` several continuations are written
        at once, and each chunk has its `sample`; sample i is the same for any n. The seed decides
        all draws.

        With `constraints` a continuation is one line, which ends within `max_tokens` and fulfils
        them; a space before its first word is not counted. Constraints on the source
        refer to the prompt.
        """
        options = _check_options(max_tokens, temperature, top_k, top_p, seed, n)
        if problems := list(constraint_problems(constraints)):
            raise ConfigError(problems)
        if not isinstance(prompt, str):
            raise DataError(
                "a prompt must be text",
                found=f"{type(prompt).__name__} {prompt!r:.60}",
                fix='pass "The" or ""',
            )
        if len(prompt) > MAX_PROMPT_CHARS:
            raise DataError(
                f"a prompt must have at most {MAX_PROMPT_CHARS:,} characters",
                found=f"{len(prompt):,} or more",
                fix="give the end of it, which matters most",
            )
        check_unicode(prompt)
        bound = self._bind_constraints(constraints, prompt, max_tokens) if constraints else None
        return self._generate(prompt, max_tokens, options, n, bound)

    def complete(self, prompt: str = "", *, n: int = 1, **options: Any) -> list[Continuation]:
        """Return n whole continuations of a prompt; the options are those of `generate`."""
        chunks: list[list[TextChunk]] = [[] for _ in range(n)] if isinstance(n, int) else []
        for chunk in self.generate(prompt, n=n, **options):
            chunks[chunk.sample].append(chunk)
        return [
            Continuation(
                prompt=prompt,
                text="".join(each),
                tokens=len(each),
                log_prob=math.fsum(chunk.log_prob for chunk in each),
                constraints=tuple(each.label for each in options.get("constraints", ())),
            )
            for each in chunks
        ]

    @torch.inference_mode()
    def _generate(
        self,
        prompt: str,
        max_tokens: int,
        sampling: Sampling | None,
        n: int,
        constraints: SentenceConstraints | None,
    ) -> Iterator[TextChunk]:
        """Yield the chunks, one per token and sample; "" where a token completes no character."""
        ids = self.task.text.encode_prompt(prompt)
        decoders: list[TextDecoder] = [self.task.text.decoder(ids) for _ in range(n)]
        written = [[BOS, *ids] for _ in range(n)]
        logits, state = self._read(torch.tensor([[BOS, *ids]], device=self.device), None)
        logits = logits.expand(n, -1)
        state = state.select(torch.zeros(n, dtype=torch.int64, device=self.device))
        constrained = (
            None if constraints is None else _ConstrainedSamples(constraints, n, max_tokens - 1)
        )
        for step in range(max_tokens):
            tokens, log_probs = self._choose(logits, sampling, step, constrained)
            for sample, (token, log_prob) in enumerate(zip(tokens, log_probs, strict=True)):
                written[sample].append(int(token))
                if constrained and not constrained.advance(sample, int(token)):
                    continue
                text = decoders[sample].push(int(token))
                yield TextChunk(text, sample=sample, log_prob=float(log_prob))
            if constrained and constrained.all_ended:
                return
            if step + 1 < max_tokens:
                logits, state = self._advance(written, state)

    def _choose(
        self,
        logits: Tensor,
        sampling: Sampling | None,
        step: int,
        constrained: _ConstrainedSamples | None = None,
    ) -> tuple[Sequence[int], Sequence[float]]:
        """Return one token for each row of logits (N, V), and its log-probability."""
        log_probs = logits.double().log_softmax(dim=-1)
        allowed = log_probs.clone()
        allowed[:, [PAD, BOS, UNK]] = -torch.inf
        if self.config.text.tokenizer == "bytes":
            allowed[:, EOS] = -torch.inf  # bytes have line breaks of their own
        if constrained:
            allowed = constrained.mask(allowed, step)
        rows = list(range(len(logits)))
        tokens, found = [0] * len(rows), [0.0] * len(rows)
        for rejections in itertools.count():
            left = allowed[rows] if rejections else allowed
            if sampling is None:
                best = left.argmax(dim=-1)
                chosen = to_host(left.gather(1, best[:, None]).squeeze(1), best, step)
            else:
                draws = [uniform_draw(sampling.seed, 0, row, step, rejections) for row in rows]
                chosen = sampling.draw(left, draws, step)
            for row, token, log_prob in zip(rows, *map(np.ndarray.tolist, chosen), strict=True):
                tokens[row], found[row] = token, log_prob
            if constrained:
                rows = constrained.reject(allowed, tokens, rows, step)
            if not constrained or not rows:
                return tokens, found
        raise AssertionError("itertools.count does not end")

    def _bind_constraints(
        self, constraints: Sequence[Constraint], prompt: str, max_tokens: int
    ) -> SentenceConstraints:
        """Compile constraints; raise ConstraintError if no continuation fulfils them."""
        form = self.config.text.normalization
        normalized = [
            each.normalized(lambda text: normalize_text(text, form)) for each in constraints
        ]
        compiled = CompiledConstraints(normalized, self._token_characters)
        bound = compiled.bind(prompt.strip())
        check_constraints(compiled, bound, max_tokens - 1, limit_name="max_tokens")
        return bound

    @functools.cached_property
    def _token_characters(self) -> TokenCharacters:
        """The text of every token; a line break ends a constrained continuation."""
        text = self.task.text
        if isinstance(text, SubwordTokenizer):
            return TokenCharacters.of(text.tokenizer)
        specials: list[str | bytes | None] = [None] * len(SPECIAL_TOKENS)
        if isinstance(text, WordTokenizer):
            words = text.vocabulary.tokens[len(SPECIAL_TOKENS) :]
            return TokenCharacters([*specials, *(f" {word}" for word in words)])
        single = [bytes([byte]) for byte in range(256)]
        return TokenCharacters([*specials, *single], end=len(specials) + ord("\n"))

    def _advance(
        self, written: Sequence[Sequence[int]], state: DecoderState
    ) -> tuple[Tensor, DecoderState]:
        """Return logits (N, V) after the last written tokens, reusing the state.

        A model whose positions end with the training segment reads the last half of one anew.
        """
        if not self.task.carries and state.length >= self.config.language.segment:
            kept = max(1, self.config.language.segment // 2)
            recent = torch.tensor([row[-kept:] for row in written], device=self.device)
            return self._read(recent, None)
        last = torch.tensor([row[-1] for row in written], device=self.device)
        return self.model.step(last, state)

    def _read(self, tokens: Tensor, state: DecoderState | None) -> tuple[Tensor, DecoderState]:
        """Read tokens (N, T) into a new state; return the logits (N, V) of the next."""
        settings = self.config.language
        if not self.task.carries:  # positions past the segment were never trained
            tokens = tokens[:, -settings.segment :]
        if state is None:
            state = self.model.start(len(tokens), memory=settings.resolved_eval_memory)
        size = settings.segment if settings.memory else PREFILL_TOKENS
        for first in range(0, tokens.size(1), size):
            hidden, state = self.model.extend_hidden(tokens[:, first : first + size], state)
        return self.model.project(hidden[:, -1]), state

    def fill_mask(self, text: str, *, top: int = 5) -> FilledText:
        """Raise ConfigError: only a model trained with masks fills them in."""
        raise ConfigError(
            [
                "fill_mask needs a model trained with language.objective=masked or permuted; found "
                "causal; use generate"
            ]
        )

    # Explanations

    def task_input(  # type: ignore[override]
        self,
        example: str,
        *,
        max_tokens: int | None = None,
        prefix: str = "",
        prefix_ids: Sequence[int] = (),
    ) -> TaskExplainer:
        """Return a text to be explained, with up to `max_tokens` more tokens of the model's own.

        Without any, the text is a document, whose last line has ended. A `prefix` follows the text;
        `prefix_ids` are tokens instead of it, which are continued unless `max_tokens` is 0.
        """
        from dragoman.explain.task_explainers.causal_language_model import LanguageModelInput

        if not isinstance(example, str):
            raise DataError(
                "a text to explain must be text",
                found=f"{type(example).__name__} {example!r:.60}",
                fix='pass "The cat sat."',
            )
        if max_tokens is None:
            max_tokens = CONTINUED_TOKENS if prefix_ids else 0
        if not isinstance(max_tokens, int) or not 0 <= max_tokens <= MAX_EXPLAINED_TOKENS:
            raise ConfigError(
                [
                    f"max_tokens of an explanation must be from 0 to {MAX_EXPLAINED_TOKENS:,}; "
                    f"found {max_tokens!r}; try {CONTINUED_TOKENS}"
                ]
            )
        given, text = example + prefix, self.task.text
        ids = list(prefix_ids)
        if not ids and given:
            ids = text.encode_prompt(given) if max_tokens else text.encode(given).tolist()
        if len(ids) + max_tokens > MAX_EXPLAINED_TOKENS:
            raise DataError(
                f"a text to explain must have at most {MAX_EXPLAINED_TOKENS:,} tokens",
                found=f"{len(ids) + max_tokens:,}",
                fix="shorten it",
            )
        return LanguageModelInput(self.model, self.task, ids, max_tokens=max_tokens, text=given)

    def repeat_input(self, request: Mapping[str, Any]) -> TaskExplainer:
        """Return the text of an explanation, with the tokens that it was continued by."""
        from dragoman.explain.task_explainers.causal_language_model import LanguageModelInput

        return LanguageModelInput(
            self.model,
            self.task,
            request["ids"],
            forced=len(request["prefix_ids"]),
            max_tokens=request["max_tokens"],
            text=request["text"],
        )

    # Scores

    def score(self, texts: Iterable[str], *, batch_size: int | None = None) -> list[TextScore]:
        """Return the log-probability and perplexity of each text, as a document of its own."""
        return self.predict(texts, batch_size=batch_size)

    def read_record(self, record: Record, *, text_field: str = "") -> str:
        """Return the text of a record; the column is `text_field`, or that of training."""
        trained = self.config.data.text_field
        wanted = text_field or (trained if trained in record.fields else "")
        return record.text(find_text_field(record, wanted, setting="--text-field"))

    def iter_inputs(self, inputs: Iterable[Any]) -> Iterator[str]:
        """Yield texts; raise DataError for the first value that is none."""
        return iter_texts(inputs)

    def encode(self, inputs: Sequence[str]) -> Sequence[EncodedText]:
        """Encode texts as documents; an empty one has no tokens."""
        empty = np.zeros(0, np.int32)
        return [
            EncodedText(text, self.task.text.encode(text) if text else empty) for text in inputs
        ]

    def length(self, encoded: EncodedText) -> int:
        """Return the number of tokens that are read at a time."""
        return min(len(encoded.ids), self.config.language.segment)

    def predict_batch(
        self, model: nn.Module, encoded: Sequence[EncodedText], device: torch.device
    ) -> list[TextScore]:
        """Score a batch of texts."""
        assert isinstance(model, NeuralLanguageModel), f"found {type(model).__name__}"
        scores = self.task.scorer(model, device).documents([each.ids for each in encoded])
        return [
            TextScore(
                text=each.text,
                log_prob=-nll,
                tokens=len(each.ids),
                notes=() if len(each.ids) else (EMPTY_NOTE,),
            )
            for each, nll in zip(encoded, scores, strict=True)
        ]


class _ConstrainedSamples:
    """The state of each continuation in the automaton of the constraints; None once it ended."""

    def __init__(self, constraints: SentenceConstraints, n: int, limit: int) -> None:
        self._rows = ConstrainedRows([constraints], [limit])
        self._end = constraints.compiled.vocabulary.end
        self._states: list[AutomatonState | None] = [constraints.start() for _ in range(n)]

    @property
    def all_ended(self) -> bool:
        """Whether every continuation has ended."""
        return not any(self._states)

    def mask(self, log_probs: Tensor, step: int) -> Tensor:
        """Set the log-probabilities of tokens that leave no completion to -inf, in place."""
        return self._rows.mask(log_probs, [0] * len(self._states), self._states, step)

    def reject(
        self, log_probs: Tensor, tokens: Sequence[int], rows: Sequence[int], step: int
    ) -> list[int]:
        """Set chosen tokens without a completion to -inf; return their rows."""
        ids = torch.tensor([[tokens[row]] for row in rows])
        candidates = TopK(torch.zeros(ids.shape), ids)
        sentences = [0] * len(self._states)
        return self._rows.reject(log_probs, sentences, self._states, candidates, step, rows)

    def advance(self, sample: int, token: int) -> bool:
        """Advance by a token; return whether the continuation has not ended."""
        state = self._states[sample]
        if state is not None:
            ended = token == self._end
            self._states[sample] = None if ended else self._rows.advance(0, state, token)
        return self._states[sample] is not None


def _check_options(
    max_tokens: int, temperature: float, top_k: int, top_p: float, seed: int, n: int
) -> Sampling | None:
    """Return the sampling settings, None for greedy; raise ConfigError with all bad values."""
    problems = [
        f"{name} must be an integer from 1 to {most:,}; found {value!r}; try {fix}"
        for name, value, most, fix in (
            ("max_tokens", max_tokens, MAX_TOKENS, 100),
            ("n", n, 1024, 1),
        )
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most
    ]
    greedy = isinstance(temperature, (int, float)) and temperature == 0
    try:
        sampling = Sampling(
            temperature=1.0 if greedy else temperature, top_k=top_k, top_p=top_p, seed=seed
        )
    except ConfigError as error:
        problems += error.problems
    except TypeError:
        problems.append(
            "temperature, top_k, top_p and seed must be numbers; found "
            f"{(temperature, top_k, top_p, seed)!r:.120}"
        )
    if problems:
        raise ConfigError(problems)
    return None if greedy else sampling
