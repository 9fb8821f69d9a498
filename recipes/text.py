"""English text that ships with every CPython: the language reference in `pydoc_data.topics`, read as characters.

Nothing is downloaded. The text differs a little between versions of Python, and so do figures measured on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""The characters that are told apart, the newline and printable ASCII: 96; the few others become a question mark."""


class Windows(Dataset[list[Tensor]]):
    """Pieces of one length cut from a text, the first of them at its start; a sample is a list of one tensor.

    Args:
        tokens: the text as numbers, one dimension.
        length: tokens in a piece.
        stride: tokens from the start of one piece to the start of the next.
    """

    random_transforms = False

    def __init__(self, tokens: Tensor, length: int, stride: int) -> None:
        self.pieces = tokens.unfold(0, length, stride)  # a view: overlapping pieces share their memory

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> list[Tensor]:
        return [self.pieces[index]]


def python_docs(
    block_size: int = 64, stride: int = 64, val_share: float = 0.05, test_share: float = 0.05
) -> dict[str, Any]:
    """Pieces of Python's reference as int64 tensors of `block_size` + 1 characters, for predicting the next one.

    The end of every topic is held out, so that each part speaks of all topics.

    Args:
        block_size: characters that the network sees at once.
        stride: characters from one training piece to the next; below `block_size` they overlap.
        val_share: share of each topic that selects between models.
        test_share: share of each topic that is only for the last word.

    Raises:
        ValueError: a number out of range.
    """
    if block_size < 1 or stride < 1:
        raise ValueError(f"data.block_size and data.stride must be at least 1 (got {block_size} and {stride})")
    if min(val_share, test_share) < 0 or val_share + test_share >= 1:
        raise ValueError(
            "data.val_share and data.test_share must not be negative and must leave a part to train on "
            f"(got {val_share} and {test_share})"
        )
    texts = {"train": "", "val": "", "test": ""}
    for topic in _topics():
        train_end, val_end = (round(len(topic) * (1 - share)) for share in (val_share + test_share, test_share))
        texts["train"] += topic[:train_end]
        texts["val"] += topic[train_end:val_end]
        texts["test"] += topic[val_end:]
    return {
        part: Windows(encode(text), block_size + 1, stride if part == "train" else block_size)
        for part, text in texts.items()
        if len(text) > block_size
    }


def encode(text: str) -> Tensor:
    """Characters as numbers below 96: int64, (len(text),)."""
    numbers = {character: number for number, character in enumerate(ALPHABET)}
    unknown = numbers["?"]
    return torch.tensor([numbers.get(character, unknown) for character in text])


def decode(tokens: Tensor) -> str:
    """The inverse of `encode`."""
    return "".join(ALPHABET[number] for number in tokens.tolist())


def _topics() -> list[str]:
    """The texts of all topics in the order of their names, without the paragraphs that an earlier one has already.

    A fifth of the text stands under several topics: what is held out of one would be in the training part of another.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    texts = []
    for name in sorted(topics):
        paragraphs = [text for text in dict.fromkeys(topics[name].split("\n\n")) if text.strip() not in seen]
        seen.update(text.strip() for text in paragraphs)
        texts.append("\n\n".join([*paragraphs, ""]))
    return texts
