"""What may be asked of a translation, checked all at once and turned into the objects that do the work."""

from __future__ import annotations

from dataclasses import dataclass

from dragoman.config import DecodeConfig
from dragoman.decoding.beam import Beam
from dragoman.decoding.greedy import Greedy
from dragoman.decoding.penalties import WuPenalty
from dragoman.decoding.sampling import Sampling
from dragoman.decoding.stepping import Strategy
from dragoman.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How to translate; None stands for what the model's own configuration says."""

    beam: int | None = None  # hypotheses kept in beam search; 1 is greedy
    nbest: int = 1  # translations of each line
    length_penalty: float | None = None  # Wu et al. (2016), alpha
    batch_size: int | None = None  # sentences translated together; by default as many as fill decode.batch_tokens
    prefix: str | None = None  # text that every translation begins with
    alignment: bool = False  # whether each translation carries its averaged cross-attention
    sample: bool = False  # whether to draw by chance instead of searching
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1
    window: int = 2048  # lines looked ahead, so that like lengths go together; 1 answers each line before reading on

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing, all at once."""
        smallest = {"beam": 1, "nbest": 1, "batch_size": 1, "window": 1}
        problems = [
            f"{name} must be at least {least}; found {getattr(self, name)}; try {least}"
            for name, least in smallest.items()
            if getattr(self, name) is not None and getattr(self, name) < least
        ]
        if self.sample and self.beam is not None:
            problems.append(f"beam belongs to search and not to sampling; found beam={self.beam} with sample=True; keep one")
        if problems:
            raise ConfigError(problems)

    def strategy(self, config: DecodeConfig) -> Strategy:
        """Choose the way of searching; an n-best list widens a beam that is too narrow for it."""
        penalty = WuPenalty(config.length_penalty if self.length_penalty is None else self.length_penalty)
        if self.sample:
            return Sampling(self.temperature, self.top_k, self.top_p, self.seed, samples=self.nbest, penalty=penalty)
        size = max(config.beam, self.nbest) if self.beam is None else self.beam
        if size == 1 and self.nbest == 1:
            return Greedy(penalty=penalty)
        return Beam(size, self.nbest, penalty)

    def width(self, config: DecodeConfig) -> int:
        """Count the rows that each sentence takes."""
        if self.sample:
            return self.nbest
        return max(config.beam, self.nbest) if self.beam is None else self.beam
