"""The position in the data, stored once for all ranks and exact for any number of them."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from .._errors import InvalidInput, Mismatch


class ResumableSampler(Sampler[int]):
    """Samples in one global order that only the seed decides, and remembers how far all ranks have come together.

    The samples of all epochs form one endless order: epoch after epoch, each shuffled anew. Ranks take turns in it, so after any
    number of steps what was consumed is a stretch without gaps, whatever the number of ranks and the batch size; a run that resumes on
    other ranks goes on right behind it. A pass ends where fewer samples than ranks are left of its epoch; those come first in the next
    pass, so that all ranks have equally many.

    ::

        sampler = rt.ResumableSampler(dataset, seed=0)
        loader = sampler.follow(DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=4))
        ckpt = rt.Checkpointer("run", model=model, optimizer=optimizer, loader=loader)

    Workers of a ``DataLoader`` ask for samples ahead of time; :meth:`follow` counts those that the training has got.
    """

    def __init__(
        self,
        data: Sized | int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """
        Args:
            data: the dataset, or how many samples it has.
            seed: decides the order, with the epoch.
            shuffle: shuffle every epoch; otherwise the dataset's own order.
            rank, world_size: this rank and how many share the data; those of ``torch.distributed`` by default.
        """
        self.length = data if isinstance(data, int) else len(data)
        if self.length < 1:
            raise InvalidInput("the dataset is empty")
        self.seed = seed
        self.shuffle = shuffle
        self._rank = rank
        self._world_size = world_size
        #: Samples that all ranks together have consumed, over all epochs.
        self.position = 0
        self._followed = False

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank if self._rank is not None else dist.get_rank() if _distributed() else 0

    @property
    def world_size(self) -> int:
        """How many ranks share the data."""
        return self._world_size if self._world_size is not None else dist.get_world_size() if _distributed() else 1

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self.position // self.length

    def __len__(self) -> int:
        """How many samples this rank takes in the rest of the pass."""
        return self._turns(self.position)

    def _turns(self, start: int) -> int:
        """How often every rank takes one before the pass ends."""
        left = (start // self.length + 1) * self.length - start
        turns = left // self.world_size
        # What is left of an epoch is less than one for each rank: the pass is the next epoch's, with the rest before it.
        return turns or (left + self.length) // self.world_size

    def __iter__(self) -> Iterator[int]:
        start, size, rank = self.position, self.world_size, self.rank
        turns = self._turns(start)
        if turns == 0:
            raise InvalidInput(f"{self.length} samples are too few for {size} ranks to take one each")
        orders: dict[int, list[int]] = {}
        for turn in range(turns):
            epoch, place = divmod(start + turn * size + rank, self.length)
            if epoch not in orders:
                orders[epoch] = self._order(epoch)
            if not self._followed:
                self.position = start + (turn + 1) * size
            yield orders[epoch][place]

    def _order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(self.length))
        generator = torch.Generator()
        # Neighbouring seeds and epochs shall not share orders.
        generator.manual_seed((self.seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 1) % (1 << 63))
        order: list[int] = torch.randperm(self.length, generator=generator).tolist()
        return order

    def follow(self, loader: Any) -> FollowedLoader:
        """A loader that counts the batches which the training has got, and not those that its workers have prepared."""
        self._followed = True
        return FollowedLoader(self, loader)

    def state_dict(self) -> dict[str, Any]:
        """The position: the same on all ranks."""
        return {"position": self.position, "length": self.length, "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a position."""
        if state["length"] != self.length:
            raise Mismatch(f"the position is one among {state['length']} samples, and the dataset has {self.length}")
        self.position, self.seed, self.shuffle = state["position"], state["seed"], state["shuffle"]


class FollowedLoader:
    """A data loader whose sampler knows which batches the training has got."""

    def __init__(self, sampler: ResumableSampler, loader: Any) -> None:
        self.sampler = sampler
        self.loader = loader
        size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        if size is None:
            raise InvalidInput("the loader does not say how many samples its batches have")
        self.batch_size = int(size)

    def __iter__(self) -> Iterator[Any]:
        sampler = self.sampler
        start, size = sampler.position, sampler.world_size
        turns = sampler._turns(start)
        for number, batch in enumerate(self.loader, 1):
            # What the training has got counts, whenever it saves.
            sampler.position = start + min(number * self.batch_size, turns) * size
            yield batch
        # A last batch that is too small may have been dropped; it counts, as the pass is over.
        sampler.position = start + turns * size

    def __len__(self) -> int:
        """How many batches are left in the pass."""
        return -(-len(self.sampler) // self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """The sampler's position."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a position."""
        self.sampler.load_state_dict(state)


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
