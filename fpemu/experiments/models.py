"""Networks to train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .normalization import BatchNorm2d

IMAGE_MODELS, TEXT_MODELS = ("mlp", "resnet8"), ("gru", "transformer")
MODELS = (*IMAGE_MODELS, *TEXT_MODELS)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def mlp(inputs: int, classes: int, hidden: int = 128, *, seed: int = 0) -> nn.Sequential:
    """Three linear layers with ReLU between: ``inputs - hidden - hidden - classes``.

    Args:
        inputs: Values an image.
        classes: Number of classes.
        hidden: Width of the two hidden layers.
        seed: Same seed, same initial weights; torch's own generator is left as it was.

    Returns:
        The model, its weights drawn as ``torch.nn.Linear`` does.

    Example:
        >>> sum(p.numel() for p in mlp(64, 10).parameters())
        26122
    """
    with _seeded(seed):
        return nn.Sequential(
            nn.Linear(inputs, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around which a shortcut leads: a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), BatchNorm2d(outputs)
            )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """float32 (images, inputs, height, width) to (images, outputs, height / stride, width / stride)."""
        y: Tensor = self.relu(self.convolutions(x) + self.shortcut(x))
        return y


def resnet8(in_channels: int = 1, classes: int = 10, *, seed: int = 0) -> nn.Sequential:
    """A ResNet for small images: three basic blocks of 16, 32 and 64 channels, with batch normalization.

    Args:
        in_channels: Channels of the images: float32 (images, in_channels, height, width), 28x28 or 32x32 say.
        classes: Number of classes.
        seed: Same seed, same initial weights; torch's own generator is left as it was.

    Returns:
        The model, its weights drawn as torch does; 77754 parameters for one channel and 10 classes.

    Example:
        >>> resnet8()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    with _seeded(seed):
        return nn.Sequential(
            nn.Conv2d(in_channels, 16, 3, padding=1, bias=False),
            BatchNorm2d(16),
            nn.ReLU(),
            BasicBlock(16, 16),
            BasicBlock(16, 32, stride=2),
            BasicBlock(32, 64, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, classes),
        )


class CausalAttention(nn.Module):
    """Self-attention in which a position sees itself and those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """float32 (texts, positions, width) to the same shape."""
        # (texts, positions, 3 * width) -> three of (texts, heads, positions, width / heads)
        parts = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return y


class TransformerBlock(nn.Module):
    """Attention, then a GELU network of two layers, each normalized before and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), CausalAttention(width, heads))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """float32 (texts, positions, width) to the same shape."""
        x = x + self.attention(x)
        y: Tensor = x + self.mlp(x)
        return y


class Transformer(nn.Module):
    """What `transformer` returns."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight
        for embedding in (self.token, self.position):
            # torch's deviation of 1 would start the logits near sqrt(width), as the head is the embedding.
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 (texts, positions) to logits of each next token, float32 (texts, positions, vocabulary)."""
        length, context = tokens.shape[1], self.position.num_embeddings
        if length > context:
            raise ValueError(f"texts must have at most context={context} tokens, got {length}")
        x = self.token(tokens) + self.position(torch.arange(length, device=tokens.device))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def transformer(
    vocabulary: int,
    width: int = 128,
    layers: int = 2,
    heads: int = 4,
    context: int = 64,
    *,
    seed: int = 0,
) -> Transformer:
    """A causal language model of characters: pre-norm blocks, learned positions, its head the embedding.

    Args:
        vocabulary: Number of characters.
        width: Length of the vector of a position.
        layers: Number of blocks.
        heads: Heads of each attention; they divide ``width``.
        context: Most characters of a text.
        seed: Same seed, same initial weights; torch's own generator is left as it was.

    Returns:
        The model; 404992 parameters and ``width`` more for each character.

    Raises:
        ValueError: ``heads`` does not divide ``width``; in a forward, texts are longer than ``context``.

    Example:
        >>> transformer(65)(torch.zeros(2, 64, dtype=torch.int64)).shape
        torch.Size([2, 64, 65])
    """
    if width % heads:
        raise ValueError(f"heads must divide width, got heads={heads} and width={width}")
    with _seeded(seed):
        return Transformer(vocabulary, width, layers, heads, context)


class CharGRU(nn.Module):
    """What `gru` returns."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 (texts, positions) to logits of each next token, float32 (texts, positions, vocabulary)."""
        logits: Tensor = self.head(self.gru(self.token(tokens))[0])
        return logits


def gru(vocabulary: int, width: int = 128, *, seed: int = 0) -> CharGRU:
    """A language model of characters: an embedding, one GRU layer and a linear head.

    Args:
        vocabulary: Number of characters.
        width: Length of the embedding and of the hidden state.
        seed: Same seed, same initial weights; torch's own generator is left as it was.

    Returns:
        The model, its weights drawn as torch does.

    Example:
        >>> gru(65)(torch.zeros(2, 64, dtype=torch.int64)).shape
        torch.Size([2, 64, 65])
    """
    with _seeded(seed):
        return CharGRU(vocabulary, width)


def build(
    name: str, inputs: int, classes: int, shape: tuple[int, int] | None = None, *, seed: int = 0
) -> nn.Module:
    """A model of `MODELS` that fits the data.

    Args:
        name: Its name.
        inputs: Values an image, or characters a text.
        classes: Number of classes, or of different characters.
        shape: Height and width of an image. All models take images as rows of ``inputs`` values.
        seed: Same seed, same initial weights.

    Returns:
        The model.

    Example:
        >>> build("resnet8", 64, 10, (8, 8))(torch.zeros(2, 64)).shape
        torch.Size([2, 10])
    """
    if name == "mlp":
        return mlp(inputs, classes, seed=seed)
    if name == "resnet8":
        return nn.Sequential(nn.Unflatten(1, (1, *(shape or ()))), *resnet8(1, classes, seed=seed))
    if name == "gru":
        return gru(classes, seed=seed)
    return transformer(classes, context=inputs, seed=seed)
