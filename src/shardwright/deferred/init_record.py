"""What initializes tensors that have no values yet, as data.

A tensor is a *piece* of a storage, so views need no record: they are other pieces of the same
storage. An operation reads, updates or fills storages, or makes new ones. An operation that draws
random numbers also reads the state of a generator and leaves another, which is a dependency like
any other: a draw begins where an earlier draw ended, or at a state that the user has set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import DeferredError
from shardwright.torch_internals import pytree
from shardwright.torch_internals.operators import OpOverload, schema_of
from shardwright.torch_internals.tensors import (
    conjugated,
    device_below,
    negated,
    storage_id,
    version,
)

SMALL = 1 << 20
"""Bytes up to which data that an operation reads is copied, so that it may change afterwards."""


@dataclass(frozen=True)
class StorageView:
    """A tensor as a part of a storage; sizes count elements."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugated: bool = False
    negated: bool = False

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor that this is in `storage`."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.shape, self.stride)
        if self.conjugated:
            tensor = conjugated(tensor)
        return negated(tensor) if self.negated else tensor


@dataclass(frozen=True)
class TensorVersion:
    """A tensor with values that an operation reads, as it was at `version`."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> TensorVersion:
        kept = tensor.clone() if tensor.nbytes <= SMALL else tensor
        return cls(kept, version(kept))


@dataclass(frozen=True)
class Draw:
    """The generator that an operation draws from.

    Args:
        start: the operation after whose draw this one goes on, or the generator's state.
    """

    generator: torch.Generator
    start: int | Tensor


@dataclass(frozen=True)
class Operation:
    """One operator on pieces of storages.

    Args:
        function: the operator.
        args, kwargs: its arguments, with a `StorageView` or `TensorVersion` for every tensor.
        results: its results that lie in storages that it makes.
        reads: storages that it only reads.
        updates: storages that it writes in part, or where it reads what was there.
        fills: storages that it overwrites as a whole, or makes.
        draw: where its random numbers come from; None if it draws none.
        default_dtype: of Python's numbers at the time.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[StorageView | None, ...]
    reads: frozenset[int]
    updates: frozenset[int]
    fills: frozenset[int]
    draw: Draw | None
    default_dtype: torch.dtype

    @property
    def storages(self) -> frozenset[int]:
        return self.reads | self.updates | self.fills

    @property
    def writes(self) -> frozenset[int]:
        return self.updates | self.fills


@dataclass(eq=False)
class Record:
    """All operations on the tensors of one `no_init_parameters`, in their order.

    Args:
        recording: whether the context is still open.
        after: states of generators after operations that were run once; a later run starts there.
    """

    recording: bool = True
    operations: list[Operation] = field(default_factory=list)
    after: dict[int, Tensor] = field(default_factory=dict)
    _storages: list[torch.UntypedStorage] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)
    _standing: dict[torch.Generator, dict[bytes, int]] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        """Copies of tensors are further operations in the same record."""
        return self

    def piece(self, tensor: Tensor) -> StorageView:
        """`tensor`, on the meta device, as a part of its storage."""
        number = self._numbers.setdefault(storage_id(tensor), len(self._storages))
        if number == len(self._storages):
            # Kept, so that no other storage gets its identity.
            self._storages.append(tensor.untyped_storage())
        return StorageView(
            number,
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def knows(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self._numbers

    def nbytes(self, storage: int) -> int:
        return self._storages[storage].nbytes()

    def add(
        self,
        function: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: Any,
    ) -> None:
        """Appends one operator that was called on the meta device, unless it only makes views."""
        roles = _Roles(self)
        for argument, given in bound(function, args, kwargs):
            roles.add(function, argument, given)
        made = tuple(
            self.piece(result) if isinstance(result, Tensor) and not self.knows(result) else None
            for result in pytree.tree_leaves(results)
        )
        roles.fills.update(piece.storage for piece in made if piece is not None)
        draw = self._draw(args, kwargs) if draws_random_numbers(function) else None
        if not roles.fills and not roles.updates and draw is None:
            return
        held_args, held_kwargs = pytree.tree_map(self._held, (args, kwargs))
        self.operations.append(
            Operation(
                function,
                held_args,
                held_kwargs,
                made,
                frozenset(roles.reads),
                frozenset(roles.updates),
                frozenset(roles.fills),
                draw,
                torch.get_default_dtype(),
            )
        )

    def standing(self, generator: torch.Generator) -> int | None:
        """The draw that `generator` stands after, in its present state; None if at none of these.

        A recorded draw takes one number from the real generator, so that its state says which.
        """
        return self._standing.get(generator, {}).get(_digest(generator.get_state()))

    def generators(self) -> Iterator[torch.Generator]:
        yield from self._standing

    def stand(self, generator: torch.Generator, after: int) -> None:
        """From here on the present state of `generator` means: after this draw."""
        states = self._standing.setdefault(generator, {})
        states[_digest(generator.get_state())] = after

    def _draw(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw:
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Generator)]
        generator = given[0] if given else torch.default_generator
        number = self.standing(generator)
        start = generator.get_state() if number is None else number
        torch.empty(1, device="cpu").uniform_(generator=generator)
        self.stand(generator, len(self.operations))
        return Draw(generator, start)

    def _held(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self.piece(leaf) if on_meta(leaf) else TensorVersion.of(leaf)
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


@dataclass
class _Roles:
    """What an operator does to the storages of its arguments."""

    record: Record
    reads: set[int] = field(default_factory=set)
    updates: set[int] = field(default_factory=set)
    fills: set[int] = field(default_factory=set)

    def add(self, function: OpOverload, argument: Any, given: Any) -> None:
        written = argument.alias_info is not None and argument.alias_info.is_write
        overwritten = argument.is_out or function.overloadpacket in OVERWRITING
        for tensor in pytree.tree_leaves(given):
            if not isinstance(tensor, Tensor) or not on_meta(tensor):
                continue
            piece = self.record.piece(tensor)
            if not written:
                self.reads.add(piece.storage)
            elif overwritten and _covers(tensor):
                self.fills.add(piece.storage)
            else:
                self.updates.add(piece.storage)


aten = torch.ops.aten
OVERWRITING = frozenset(
    {
        aten.bernoulli_,
        aten.cauchy_,
        aten.copy_,
        aten.exponential_,
        aten.fill_,
        aten.geometric_,
        aten.log_normal_,
        aten.normal_,
        aten.random_,
        aten.uniform_,
        aten.zero_,
    }
)
"""Operators in place that do not read what they write over."""


def bound(
    function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Every argument in the schema of `function` that a call gives, and what it gives."""
    for place, argument in enumerate(schema_of(function).arguments):
        if place < len(args):
            yield argument, args[place]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def mutated_tensors(
    function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """The tensors whose values a call changes."""
    if torch.Tag.inplace_view in function.tags:
        return []
    return [
        leaf
        for argument, given in bound(function, args, kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in pytree.tree_leaves(given)
        if isinstance(leaf, Tensor)
    ]


def draws_random_numbers(function: OpOverload) -> bool:
    """Whether an operator takes random numbers from a generator."""
    return torch.Tag.nondeterministic_seeded in function.tags


def on_meta(tensor: Tensor) -> bool:
    """Whether a tensor has no values, whatever it says of itself."""
    return device_below(tensor).type == "meta"


def _covers(tensor: Tensor) -> bool:
    """Whether a tensor is the whole of its storage."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def _digest(state: Tensor) -> bytes:
    return blake2b(state.numpy().tobytes(), digest_size=16).digest()


def unchanged(data: TensorVersion) -> Tensor:
    """The tensor of `data`.

    Raises:
        DeferredError: if it was changed in place since it was read.
    """
    if version(data.tensor) != data.version:
        raise DeferredError(
            f"a tensor of shape {tuple(data.tensor.shape)} from which parameters are initialized "
            "was changed in place after it was read inside no_init_parameters: give a copy"
        )
    return data.tensor
