"""Training peers on our batches: `torch.nn.Transformer` and Marian with a plain training loop."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dragoman.config import ModelConfig
from dragoman.data.collate import Batch
from dragoman.text.special_tokens import BOS, EOS, PAD

SMOOTHING = 0.1


class NNTransformer(nn.Module):
    """`torch.nn.Transformer` with tied embeddings and output projection."""

    def __init__(
        self, model: ModelConfig, layers: int, vocabulary: int, longest: int = 512
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, model.width, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=model.width**-0.5)
        self.transformer = nn.Transformer(
            model.width,
            model.heads,
            layers,
            layers,
            model.ffn_width,
            model.dropout,
            activation="relu",
            batch_first=True,
        )
        self.dropout = nn.Dropout(model.dropout)
        angles = torch.arange(longest)[:, None] / 10_000 ** (
            torch.arange(0, model.width, 2) / model.width
        )
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], dim=1))

    def forward(self, src: Tensor, src_mask: Tensor, tgt_in: Tensor) -> Tensor:
        """Return logits (B, T, V)."""
        causal = nn.Transformer.generate_square_subsequent_mask(
            tgt_in.shape[1], device=tgt_in.device
        ).isinf()
        hidden = self.transformer(
            self.embed(src),
            self.embed(tgt_in),
            tgt_mask=causal,
            src_key_padding_mask=~src_mask,
            memory_key_padding_mask=~src_mask,
            tgt_is_causal=True,
        )
        return F.linear(hidden, self.embedding.weight)

    def embed(self, ids: Tensor) -> Tensor:
        """Return embeddings (B, T, D) with positions."""
        embedded = self.embedding(ids) * math.sqrt(self.embedding.embedding_dim)
        return self.dropout(embedded + self.positions[: ids.shape[1]])


class Marian(nn.Module):
    """Hugging Face's Marian model with random weights."""

    def __init__(self, model: ModelConfig, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.hf_model = build_marian(model, layers, vocabulary)

    def forward(self, src: Tensor, src_mask: Tensor, tgt_in: Tensor) -> Tensor:
        """Return logits (B, T, V)."""
        return self.hf_model(
            input_ids=src, attention_mask=src_mask, decoder_input_ids=tgt_in, use_cache=False
        ).logits


def build_marian(model: ModelConfig, layers: int, vocabulary: int) -> Any:
    """Return Hugging Face's Marian model of a size."""
    import transformers

    library: Any = transformers
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (
            ("layers", layers),
            ("attention_heads", model.heads),
            ("ffn_dim", model.ffn_width),
        )
    }
    settings = library.MarianConfig(
        vocab_size=vocabulary,
        decoder_vocab_size=vocabulary,
        d_model=model.width,
        **sides,
        activation_function="relu",
        dropout=model.dropout,
        attention_dropout=0.0,
        activation_dropout=0.0,
        max_position_embeddings=512,
        scale_embedding=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=None,
    )
    return library.MarianMTModel(settings)


class PeerStep:
    """One training step of a peer: autocast, cross-entropy, fused Adam."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        *,
        compiled: bool,
        static: bool = False,
    ) -> None:
        self.model = model.to(device).train()
        self.device, self.dtype = device, dtype
        self._loss: Any = (
            torch.compile(self._plain_loss, dynamic=not static) if compiled else self._plain_loss
        )
        self._optimizer = torch.optim.Adam(
            model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True
        )

    def __call__(self, batch: Batch) -> Tensor:
        """Run one training step without synchronizing the device."""
        batch = batch.to(self.device)
        src_mask = torch.arange(batch.src.shape[1], device=self.device) < batch.src_lengths[:, None]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            loss = self._loss(batch.src, src_mask, batch.tgt_in, batch.tgt_out)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _plain_loss(self, src: Tensor, src_mask: Tensor, tgt_in: Tensor, tgt_out: Tensor) -> Tensor:
        logits = self.model(src, src_mask, tgt_in)
        return F.cross_entropy(
            logits.flatten(0, 1), tgt_out.flatten(), ignore_index=PAD, label_smoothing=SMOOTHING
        )


PEERS = {"Hugging Face Marian": Marian, "torch.nn.Transformer": NNTransformer}
"""Training peers by name."""
