"""Data sets of a size that trains in seconds or minutes: digits, Fashion-MNIST and Python's documentation."""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_FASHION_MNIST = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
TEXT_LENGTH = 64  # characters that a model of text sees at once


@dataclass(frozen=True, eq=False)
class Data:
    """Images and labels, or texts and the characters that follow; all in memory.

    Attributes:
        train_x: Images: float32 (N, inputs), 0 to 1. Texts: int64 (N, inputs), numbers of characters.
        train_y: int64: (N,), the classes; of texts (N, inputs), the next character of each.
        test_x: As ``train_x``, for M others.
        test_y: As ``train_y``.
        shape: Height and width of an image; None for texts.
    """

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor
    shape: tuple[int, int] | None = None

    @property
    def inputs(self) -> int:
        """Values an image, or characters a text."""
        return self.train_x.shape[1]

    @property
    def classes(self) -> int:
        """Number of classes, or of different characters."""
        return 1 + max(int(y.max()) for y in (self.train_y, self.test_y))


def parse_data(spec: str) -> tuple[str, Path | None]:
    """The data set's name and directory, checked without reading it.

    Raises:
        ValueError: no such data set, or its directory or a file in it is missing.

    Example:
        >>> parse_data("digits")
        ('digits', None)
    """
    name, _, directory = spec.partition(":")
    if spec in ("digits", "pydoc"):
        return name, None
    if name != "fashion-mnist" or not directory:
        raise ValueError(f"unknown data {spec!r}; choose digits, pydoc or fashion-mnist:DIRECTORY")
    path = Path(directory)
    if not path.is_dir():
        raise ValueError(
            f"data directory {directory} does not exist; it must hold {', '.join(_FASHION_MNIST)}"
        )
    missing = [file for file in _FASHION_MNIST if not _present(path / file).is_file()]
    if missing:
        raise ValueError(
            f"data directory {directory} lacks {', '.join(missing)}; put the missing files there"
        )
    return name, path


def load_data(spec: str) -> Data:
    """A data set, split into a training and a test set.

    Args:
        spec: ``"digits"``: scikit-learn's 1797 images of 8 x 8, of which 360 are the test set, always the
            same ones. ``"fashion-mnist:DIRECTORY"``: the four .gz files as they are published, or unpacked.
            ``"pydoc"``: the documentation that this Python's ``help()`` shows, in texts of 64 characters, the
            last tenth the test set; another Python has another text.

    Returns:
        The data.

    Raises:
        ValueError: unknown data, a missing directory or file, or a damaged file.

    Example:
        >>> data = load_data("digits")
        >>> data.train_x.shape, data.test_y.shape
        (torch.Size([1437, 64]), torch.Size([360]))
    """
    name, directory = parse_data(spec)
    if directory is None:
        return _digits() if name == "digits" else _pydoc()
    arrays = [_read_idx(_present(directory / file)) for file in _FASHION_MNIST]
    for images, labels in (arrays[:2], arrays[2:]):
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            raise ValueError(
                f"{directory}: images of shape {images.shape} do not go with labels of shape {labels.shape}; "
                "each image file needs the label file of its own set"
            )
    if arrays[0].shape[1:] != arrays[2].shape[1:]:
        raise ValueError(
            f"{directory}: training images of shape {arrays[0].shape[1:]} do not go with test images of "
            f"shape {arrays[2].shape[1:]}; all four files must be of one data set"
        )
    height, width = arrays[0].shape[1:]
    train_x, train_y, test_x, test_y = (_scaled(a, 255) if a.ndim == 3 else _classes(a) for a in arrays)
    return Data(train_x, train_y, test_x, test_y, (height, width))


def _present(path: Path) -> Path:
    """The file, or its unpacked form where that is there instead."""
    return path if path.is_file() else path.with_suffix("")


def _digits() -> Data:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(x, y, test_size=0.2, stratify=y, random_state=0)
    return Data(_scaled(train_x, 16), _classes(train_y), _scaled(test_x, 16), _classes(test_y), (8, 8))


def _pydoc() -> Data:
    from pydoc_data.topics import topics

    text = "\n".join(content for _, content in sorted(topics.items()))
    # In the order in which they come: so the text's first character, which follows no other, is number 0.
    number = {character: i for i, character in enumerate(dict.fromkeys(text))}
    tokens = torch.tensor([number[character] for character in text])
    count = (len(tokens) - 1) // TEXT_LENGTH
    x, y = (tokens[i : i + count * TEXT_LENGTH].reshape(count, TEXT_LENGTH) for i in (0, 1))
    training = count - count // 10
    return Data(x[:training], y[:training], x[training:], y[training:])


def _scaled(images: npt.NDArray[Any], largest: int) -> torch.Tensor:
    return torch.tensor(images.reshape(len(images), -1), dtype=torch.float32) / largest


def _classes(labels: npt.NDArray[Any]) -> torch.Tensor:
    return torch.tensor(labels, dtype=torch.int64)


def _read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The array in an idx file, gzipped or not: two zero bytes, type, rank, big-endian shape, values."""
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"cannot read {path}: {error}; fetch the file again") from None
    if content[:3] != b"\0\0\x08" or len(content) < 4:
        raise ValueError(
            f"{path} is no idx file of bytes: it starts with {content[:4].hex()!r}, wanted '000008'"
        )
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise ValueError(f"{path} ends within its header of {start} bytes; fetch it again")
    shape = tuple(np.frombuffer(content[4:start], ">u4").tolist())
    if len(content) - start != math.prod(shape):
        raise ValueError(
            f"{path} holds {len(content) - start} values, but its shape is {shape}; fetch it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
