"""Data without replacement: every sample once an epoch, in an order that nothing has to keep.

Samples of a run are numbered in the order in which they are taken, whatever step, replica or micro-batch takes them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from lading.errors import StorageError

#: Second word of the keys under which the rounds' keys are drawn.
_ORDER = 4
#: Rounds of the network: four make it a permutation that cannot be told from a random one (Luby and Rackoff).
_ROUNDS = 6


def permuted(numbers: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Give the values that a permutation of 0 to ``count - 1`` has at some places.

    A Feistel network permutes the numbers of twice as many bits as each of its halves has; where that leads out of the
    range it is applied again, until it leads back (cycle walking). So one value costs no more than a few, and the
    permutation is nowhere kept.

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002.

    Args:
        numbers: Places, int64 [n], from 0 to below ``count``.

    Returns:
        int64 [n].
    """
    half = np.uint64(max(1, -(-(count - 1).bit_length() // 2)))
    mask = np.uint64((1 << int(half)) - 1)
    keys = np.random.Philox(counter=[0, 0, 0, epoch], key=[seed, _ORDER]).random_raw(_ROUNDS)
    values = numbers.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        values[outside] = (left << half) | right
        outside = values >= np.uint64(count)
    return values.astype(np.int64)


def _mixed(words: np.ndarray) -> np.ndarray:
    """Mix the bits of 64-bit words.

    Source: the finalizer of splitmix64, Steele, Lea and Flood, OOPSLA 2014.
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@dataclass(frozen=True)
class DataPosition:
    """Samples that a run has taken before each of its steps.

    Attributes:
        step: Step from which this holds: where the run began, or went on.
        samples: Samples that had been taken before it.
        step_samples: Samples of a step, of all replicas together.
    """

    step: int
    samples: int
    step_samples: int

    def samples_before(self, step: int) -> int:
        """Samples that are taken before a step from ``self.step`` on."""
        return self.samples + (step - self.step) * self.step_samples

    def going_on(self, step: int, step_samples: int) -> DataPosition:
        """Position of a run that goes on after ``step`` steps, with steps of another size."""
        return DataPosition(step, self.samples_before(step), step_samples)

    def to_dict(self) -> dict[str, int]:
        """Write it as what a checkpoint keeps."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: Any, where: str) -> DataPosition:
        """Read what a checkpoint has.

        Args:
            where: Name of the checkpoint, for the error.

        Raises:
            StorageError: it is no position.
        """
        names = [field.name for field in dataclasses.fields(DataPosition)]
        is_one = isinstance(data, dict) and sorted(data) == sorted(names)
        if not is_one or any(type(number) is not int or number < 0 for number in data.values()):
            raise StorageError(
                f"{where}: expected how far its run had read the data ({', '.join(names)}), found {data!r}; use "
                "another checkpoint, or start the run again"
            )
        return DataPosition(**data)


@dataclass(frozen=True)
class Epochs:
    """Order of the samples of a run that takes each once before it takes any again.

    Args:
        count: Samples of the data.
    """

    count: int
    seed: int
    position: DataPosition

    def samples(self, step: int, micro: int, batch_size: int) -> np.ndarray:
        """Samples of micro-batch ``micro`` of a step, of those of all replicas: int64 [batch_size]."""
        first = self.position.samples_before(step) + micro * batch_size
        numbers = np.arange(first, first + batch_size, dtype=np.int64)
        epochs, sample_ids = numbers // self.count, np.empty_like(numbers)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            sample_ids[in_epoch] = permuted(numbers[in_epoch] % self.count, self.count, self.seed, int(epoch))
        return sample_ids
