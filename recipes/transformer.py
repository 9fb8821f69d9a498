"""A small decoder Transformer for sequences of tokens. Needs torch; keeps no state between calls."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class Attention(nn.Module):
    """Causal self-attention with several heads: a place sees itself and what is before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.to_query_key_value = nn.Linear(width, 3 * width)
        self.to_output = nn.Linear(width, width)

    def forward(self, states: Tensor) -> Tensor:
        batch, length, width = states.shape
        split = self.to_query_key_value(states).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width of a head)
        dropout = self.dropout if self.training else 0.0
        mixed = scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.to_output(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then a network for each place; both see normalised states and add to the plain ones."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads, dropout), nn.Dropout(dropout))
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, states: Tensor) -> Tensor:
        states = states + self.attention(states)
        return states + self.feed_forward(states)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Scores for the next token at every place of a sequence.

    The layer that reads the scores off shares its weights with the token embedding (Press and Wolf 2017).

    Shapes: int64 (batch, length) -> (batch, length, vocabulary), with a length of at most `block_size`.

    Raises:
        ValueError: `width` cannot be divided among the heads; at a call, the sequence is too long.
    """

    def __init__(
        self, vocabulary: int, block_size: int, width: int = 128, layers: int = 4, heads: int = 4, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"model.width must be a multiple of model.heads (got {width} and {heads})")
        self.block_size = block_size
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.place_embedding = nn.Embedding(block_size, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token_embedding.weight
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """As in GPT-2: a standard deviation of 0.02, less where 2 * `layers` branches add up to one stream."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                adds_up = name.endswith(("to_output.weight", "feed_forward.3.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if adds_up else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if length > self.block_size:
            raise ValueError(f"a sequence must have at most {self.block_size} tokens, model.block_size (got {length})")
        places = torch.arange(length, device=tokens.device)
        states = self.dropout(self.token_embedding(tokens) + self.place_embedding(places))
        return self.head(self.norm(self.blocks(states)))  # type: ignore[no-any-return]
