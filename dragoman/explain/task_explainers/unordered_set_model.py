"""Sets as inputs to be explained: elements without an order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dragoman.attention.attention_weight_hooks import AttentionRecords, WeightsEdit, find_attentions
from dragoman.errors import DataError
from dragoman.explain.explanation import AttentionSite, Token, TokenizedText
from dragoman.explain.task_explainers.base import (
    BATCH_ROWS,
    Floats,
    RecordedSite,
    Switch,
    TaskExplainer,
    column_off,
    contribution_norms,
    heads_of,
    name_classes,
    to_array,
)
from dragoman.models.set_transformer_and_deep_sets import SetTransformer
from dragoman.tasks.unordered_set_input_task import SetsTask
from dragoman.tasks.unordered_set_objectives import (
    Clustering,
    Counting,
    Regression,
    SetClassification,
)

_POOLING = "pooling.pool.cross"
_MORE_COUNTS = 16  # counts above the size of a set that may be probable


class SetInput(TaskExplainer):
    """A set and the prediction for it: a number, a label, a count, or clusters."""

    task: ClassVar[str] = "sets"
    model: SetTransformer

    def __init__(self, model: SetTransformer, task: SetsTask, elements: Floats) -> None:
        super().__init__(model, task.config)
        if not len(elements):
            raise DataError(
                "a set to explain must have elements", found="none", fix="pass [1.5, 2, 7]"
            )
        self.sets, self.elements = task, elements
        self.is_distribution = not isinstance(  # type: ignore[misc]
            task.objective, Regression
        )
        self._source = self._name_elements()
        self._value = 0.0  # the predicted number, once it is chosen

    def _name_elements(self) -> TokenizedText:
        """Return the elements as text, with a space before each but the first."""
        text, tokens = "", list[Token]()
        for number, element in enumerate(self.elements):
            name = f"image {number + 1}" if self.sets.objective.images else _format(element)
            start = len(text)
            text += f" {name}" if tokens else name
            tokens.append(Token(number, text[start:], (start, len(text))))
        return TokenizedText(
            text=text, tokens=tokens, words=[(at, at + 1) for at in range(len(tokens))]
        )

    @property
    def source(self) -> TokenizedText:
        """The elements."""
        return self._source

    @property
    def request(self) -> dict[str, Any]:
        """The set as text and as numbers."""
        # Shortest decimals that read as these float32 numbers again: 3.2, not 3.200000047683716.
        rows = [[float(str(each)) for each in row] for row in self.elements]
        text = "" if self.sets.objective.images else json.dumps(rows)
        return {"text": text, "set": self.elements.tolist()}

    def run(self, copies: int = 1, *, off: Sequence[str] = ()) -> Tensor:
        """Return log-probabilities (copies, T, V), or the predicted number (copies, 1, 1)."""
        return self._predict([self.elements] * copies)

    def _predict(self, sets: Sequence[Floats]) -> Tensor:
        """Return the predictions for sets; clusters only for those of equal sizes."""
        device = next(self.model.parameters()).device
        batch = self.sets.batch_sets(sets).to(device)
        outputs = self.model(batch.elements, batch.mask)
        objective = self.sets.objective
        if isinstance(objective, Regression):
            return objective.values(outputs).view(-1, 1, 1)
        if isinstance(objective, Counting):
            rates = objective.rates(outputs).unsqueeze(1)  # (B, 1)
            counts = torch.arange(len(self.elements) + _MORE_COUNTS, device=device).float()
            log_probs = counts * rates.log() - rates - torch.lgamma(counts + 1)
            return log_probs.unsqueeze(1)
        if isinstance(objective, Clustering):
            points = batch.elements[:, : len(sets[0])]
            joint = objective.mixture(outputs).component_log_probs(points)  # (B, N, K)
            return joint.log_softmax(dim=-1)
        return outputs.float().log_softmax(dim=-1).unsqueeze(1)

    def choose(self, log_probs: Tensor) -> list[int]:
        """Return the most probable label, count, or component of each element."""
        if not self.is_distribution:
            self._value = float(log_probs)
            return [0]
        if isinstance(self.sets.objective, Counting):
            # The rate, rounded, is the prediction; log p(1) - log p(0) is its logarithm.
            rate = float((log_probs[0, 1] - log_probs[0, 0]).exp())
            return [min(round(rate), log_probs.size(1) - 1)]
        return log_probs.argmax(dim=1).tolist()

    def explained(self, log_probs: Tensor, ids: Sequence[int]) -> Tensor:
        """Return the log-probabilities, or the predicted number, (copies, T)."""
        return super().explained(log_probs, ids) if self.is_distribution else log_probs[:, :, 0]

    def name_output(self, output_id: int) -> str:
        """Return a label, a count or a component."""
        objective = self.sets.objective
        if isinstance(objective, SetClassification):
            return objective.labels[output_id]
        return f"component {output_id + 1}" if isinstance(objective, Clustering) else str(output_id)

    def target(self, ids: Sequence[int]) -> TokenizedText:
        """Return the labels, or the predictions."""
        objective = self.sets.objective
        if isinstance(objective, SetClassification):
            return name_classes(objective.labels)
        if isinstance(objective, Regression):
            name = f"{self._value:g}"
            return TokenizedText(text=name, tokens=[Token(0, name, (0, len(name)))], words=[(0, 1)])
        text, tokens = "", list[Token]()
        for output_id in ids:
            start = len(text)
            text += f"{' ' if tokens else ''}{self.name_output(output_id)}"
            tokens.append(Token(output_id, text[start:], (start, len(text))))
        return TokenizedText(
            text=text, tokens=tokens, words=[(at, at + 1) for at in range(len(tokens))]
        )

    @property
    def model_fields(self) -> dict[str, Any]:
        """The family and the problem."""
        return {"family": "set", "problem": self.sets.text.problem}

    @property
    def embeddings(self) -> Sequence[nn.Module]:
        """The encoder of the elements."""
        return (self.model.elements,)

    def sum_inputs(self, parts: Mapping[int, Sequence[Tensor]], copies: int) -> Tensor:
        """Return numbers (copies, N) of the elements."""
        return parts[0][0][:, : len(self.elements)]

    def zero_values(self, token: int) -> dict[str, WeightsEdit]:
        """Return edits that make the values of an element zero."""
        return {
            path: column_off(token)
            for path in find_attentions(self.model)
            if not path.startswith("decoder.") and "spread" not in path
        }

    @torch.no_grad()
    def occlude(self, ids: Sequence[int]) -> Floats:
        """Return the drop (T, N) of each explained number without each element.

        An element's own cluster is not known without it: its drop is zero.
        """
        size = len(self.elements)
        base = to_array(self.explained(self.run(), ids)[0])  # (T,)
        drops = np.zeros((len(base), size), np.float32)
        if size == 1:  # there is no empty set
            return drops
        for first in range(0, size, BATCH_ROWS):
            left = range(first, min(first + BATCH_ROWS, size))
            changed = [np.delete(self.elements, at, axis=0) for at in left]
            outputs = self._predict(changed)
            for row, at in enumerate(left):
                others = [t for t in range(len(base)) if len(base) == 1 or t != at]
                kept = [ids[t] if self.is_distribution else 0 for t in others]
                found = self.explained(outputs[row : row + 1], kept)[0]
                drops[others, at] = base[others] - to_array(found)
        return drops

    def read_sites(self, records: AttentionRecords) -> list[RecordedSite]:
        """Return the attentions between elements, inducing points and seeds."""
        attentions = find_attentions(self.model)
        size, found = len(self.elements), list[RecordedSite]()
        for path in records:
            stack, _, rest = path.partition(".")
            seen = records[path]
            axes = {"self": ("element", "element")}.get(path.rpartition(".")[2], ("", ""))
            letter, suffix = {"encoder": "e", "pooling": "x", "decoder": "d"}[stack], ""
            if "gather" in path:
                axes = ("inducing", "element")
            elif "spread" in path:
                axes, suffix = ("element", "inducing"), "b"
            elif path == _POOLING:
                axes = ("seed", "element")
            elif stack == "decoder":
                axes = ("seed", "seed")
            layer = int(rest.split(".")[0]) if rest.split(".")[0].isdigit() else 0
            weights = seen.weights[0]
            weights = weights[:, :size] if axes[0] == "element" else weights
            weights = weights[..., :size] if axes[1] == "element" else weights
            values = seen.values[0, :, : weights.size(2)]
            labels = [
                self._labels(axis, count)
                for axis, count in zip(axes, weights.shape[1:], strict=True)
            ]
            site = AttentionSite(
                id=f"{letter}{layer}{suffix}",
                path=path,
                kind="pool" if path == _POOLING else "set",
                group="cross" if path == _POOLING else stack,
                layer=layer,
                heads=weights.size(0),
                query=axes[0],
                key=axes[1],
                ordered=False,
                query_labels=labels[0],
                key_labels=labels[1],
            )
            norms = contribution_norms(attentions[path], weights, values)
            found.append(RecordedSite(site, weights, norms, heads_of(path, weights.size(0))))
        return found

    def _labels(self, axis: str, count: int) -> list[str]:
        """Return a name for each position of an axis."""
        if axis == "element":
            return [token.text.strip() for token in self.source.tokens]
        name = "inducing point" if axis == "inducing" else "seed"
        return [f"{name} {number}" for number in range(1, count + 1)]

    @property
    def special_switches(self) -> dict[str, tuple[Switch, ...]]:
        """The seeds of the pooling: one that is off reads nothing from the set."""

        def make_off(seed: int) -> WeightsEdit:
            def off(weights: Tensor) -> Tensor:
                changed = weights.clone()
                changed[:, :, seed] = 0.0
                return changed

            return off

        seeds = self.config.sets.seeds if _POOLING in find_attentions(self.model) else 0
        return {f"seed.{seed}": (Switch(_POOLING, make_off(seed)),) for seed in range(seeds)}

    def extras(
        self, seen: Sequence[RecordedSite], ids: Sequence[int]
    ) -> dict[str, tuple[str, NDArray[Any]]]:
        """Return the weight of each element in the pooling, the mean of seeds and heads: (1, N)."""
        pooling = [to_array(each.weights) for each in seen if each.site.path == _POOLING]
        if not pooling:
            return {}
        return {"element_importance": ("elements.p", pooling[0].mean(axis=(0, 1))[None])}

    @property
    def positions(self) -> dict[str, Any]:
        """A set has no positions."""
        return {"kind": "none", "note": _NO_ORDER, "tensor": None, "curves": [], "reach": None}

    @property
    def missing(self) -> dict[str, str]:
        """There is no order, no search and no lens; a number has no probabilities."""
        missing = {
            "beam": "A set gets its prediction at once: there is no search.",
            "token": "A model of sets predicts no tokens: there is no logit lens.",
            "positions": _NO_ORDER,
        }
        if not self.is_distribution:
            missing["strip"] = (
                f"This model predicts a number, {self._value:g}: there are no probabilities."
            )
        return missing


_NO_ORDER = "A set has no order: permuting its elements permutes the columns and nothing else."


def _format(element: Floats) -> str:
    """Return an element (F,) as text: a number, or a vector in brackets."""
    numbers = [f"{each:g}" for each in element.tolist()]
    return numbers[0] if len(numbers) == 1 else f"[{', '.join(numbers)}]"
