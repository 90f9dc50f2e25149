"""The record of the operations that initialize deferred tensors.

Tensors are views of storages. An operation reads, updates, overwrites or creates storages; an
operation that only creates a view needs no record.

A random draw also depends on the state of a generator, which it advances: the draw starts where an
earlier draw ended, or at a state that the user has set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.operators import OpOverload, schema_of
from shardwright.core.torch_internals.tensors import (
    conjugated,
    negated,
    storage_id,
    underlying_device,
    version,
)
from shardwright.errors import DeferredError

COPY_LIMIT = 1 << 20
"""Maximum size in bytes of an ordinary tensor that is copied when an operation reads it.

The user may modify a copied tensor afterwards. The replay checks that larger tensors are
unmodified.
"""


@dataclass(frozen=True)
class StorageView:
    """A tensor as a view of a numbered storage of a record; stride and offset count elements."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugated: bool = False
    negated: bool = False

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """Return this view of `storage` as a tensor."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.shape, self.stride)
        if self.conjugated:
            tensor = conjugated(tensor)
        return negated(tensor) if self.negated else tensor


@dataclass(frozen=True)
class TensorVersion:
    """An ordinary tensor that an operation reads, with its version counter when it was recorded."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> TensorVersion:
        """Return a reference to `tensor`, or to a copy if it has at most `COPY_LIMIT` bytes."""
        snapshot = tensor.clone() if tensor.nbytes <= COPY_LIMIT else tensor
        return cls(snapshot, version(snapshot))


@dataclass(frozen=True)
class Draw:
    """The random draw of an operation.

    Args:
        generator: the generator from which the operation draws.
        start: index of the operation whose draw precedes this draw, or the generator's state before
            this draw.
    """

    generator: torch.Generator
    start: int | Tensor


@dataclass(frozen=True)
class Operation:
    """One recorded operator call.

    Args:
        function: the operator.
        args, kwargs: arguments of the call, with a `StorageView` or `TensorVersion` in place of
            each tensor.
        results: for each result, its view if it has a new storage, or None.
        reads: ids of the storages that are only read.
        updates: ids of the storages that are written partially, or read and written.
        fills: ids of the storages that are created or overwritten completely.
        draw: the random draw of the call; None if the call draws no random numbers.
        default_dtype: PyTorch's default dtype at the time of the call.
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
    """All operations on the tensors of one `no_init_parameters` context, in order.

    Args:
        recording: whether the context is still open.
        operations: the recorded operations.
        states_after: generator states after replayed draws, by index of the drawing operation.
    """

    recording: bool = True
    operations: list[Operation] = field(default_factory=list)
    states_after: dict[int, Tensor] = field(default_factory=dict)
    _storages: list[torch.UntypedStorage] = field(default_factory=list)
    _storage_numbers: dict[int, int] = field(default_factory=dict)
    _draws_by_state: dict[torch.Generator, dict[bytes, int]] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        """Return this record, which a deferred tensor and its deep copies share."""
        return self

    def storage_view(self, tensor: Tensor) -> StorageView:
        """Return the `StorageView` of a meta tensor; assign a number to its storage if needed."""
        # The id of the storage, not of the tensor, so that views have the number of their base.
        number = self._storage_numbers.setdefault(storage_id(tensor), len(self._storages))
        if number == len(self._storages):
            # The reference keeps the storage alive, so that no other storage gets the same id.
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

    def has_storage_of(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self._storage_numbers

    def nbytes(self, storage: int) -> int:
        return self._storages[storage].nbytes()

    def add(
        self,
        function: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: Any,
    ) -> None:
        """Append an operator call on the meta device, unless it only creates views."""
        reads, updates, fills = self._find_accessed_storages(function, args, kwargs)
        # After the storages of the arguments are numbered: a result with a numbered storage is a
        # view.
        new_views = tuple(
            self.storage_view(result)
            if isinstance(result, Tensor) and not self.has_storage_of(result)
            else None
            for result in pytree.tree_leaves(results)
        )
        fills.update(view.storage for view in new_views if view is not None)
        draw = self._record_random_draw(args, kwargs) if draws_random_numbers(function) else None
        # A view has the storage of its base, so it neither fills nor updates one.
        if not fills and not updates and draw is None:
            return
        recorded_args, recorded_kwargs = pytree.tree_map(self._record_argument, (args, kwargs))
        self.operations.append(
            Operation(
                function,
                recorded_args,
                recorded_kwargs,
                new_views,
                frozenset(reads),
                frozenset(updates),
                frozenset(fills),
                draw,
                torch.get_default_dtype(),
            )
        )

    def _find_accessed_storages(
        self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[set[int], set[int], set[int]]:
        """Return the ids of the storages that a call reads, updates, and overwrites completely."""
        reads, updates, fills = set[int](), set[int](), set[int]()
        for argument, value in bind_arguments(function, args, kwargs):
            written = argument.alias_info is not None and argument.alias_info.is_write
            # Only then are earlier values irrelevant to a replay; schemas mark `out=` arguments
            # only.
            overwritten = argument.is_out or function.overloadpacket in OVERWRITING
            for tensor in pytree.tree_leaves(value):
                if isinstance(tensor, Tensor) and on_meta(tensor):
                    # A complete overwrite of a part of a storage is an update of the storage.
                    written_storages = (
                        fills if overwritten and _covers_full_storage(tensor) else updates
                    )
                    (written_storages if written else reads).add(self.storage_view(tensor).storage)
        return reads, updates, fills

    def last_draw(self, generator: torch.Generator) -> int | None:
        """Return the index of the operation whose draw left `generator` in its current state.

        Returns None if no recorded draw did. Each recorded draw advances the real generator by one
        random number, so that the generator's state identifies the draw.
        """
        # By a digest of the state, which has 5 KB for the CPU.
        return self._draws_by_state.get(generator, {}).get(
            _hash_generator_state(generator.get_state())
        )

    def generators(self) -> Iterator[torch.Generator]:
        yield from self._draws_by_state

    def add_generator_state(self, generator: torch.Generator, draw: int) -> None:
        """Record the current state of `generator` as the state after operation `draw`."""
        states = self._draws_by_state.setdefault(generator, {})
        states[_hash_generator_state(generator.get_state())] = draw

    def forget_generator_states(self) -> None:
        """Forget the generator states after draws; a replay then does not advance generators."""
        # The keys stay, as a replay restores the states of these generators at its end.
        self._draws_by_state = {generator: {} for generator in self._draws_by_state}

    def _record_random_draw(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw:
        generators = [
            x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Generator)
        ]
        # Operators without a generator draw from the CPU's default generator, as replays run there.
        generator = generators[0] if generators else torch.default_generator
        number = self.last_draw(generator)
        start = generator.get_state() if number is None else number
        # The state must change, to identify this draw. One number is enough: drawing all numbers of
        # the operation would take as long as initializing the model.
        torch.empty(1, device="cpu").uniform_(generator=generator)
        # The index that `add` gives to this operation next.
        self.add_generator_state(generator, len(self.operations))
        return Draw(generator, start)

    def _record_argument(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self.storage_view(leaf) if on_meta(leaf) else TensorVersion.of(leaf)
        # Replays run on the CPU, whatever device the call named.
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


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
"""In-place operators that overwrite a tensor without reading its values.

Listed by hand, since operator schemas do not distinguish overwriting from updating.
"""


def bind_arguments(
    function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Yield the schema argument and the value of every argument of a call."""
    for index, argument in enumerate(schema_of(function).arguments):
        if index < len(args):
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def mutated_tensors(
    function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Return the tensors whose values a call of `function` mutates."""
    # In-place views (`t_`, `squeeze_`) change sizes and strides, not values.
    if torch.Tag.inplace_view in function.tags:
        return []
    return [
        leaf
        for argument, value in bind_arguments(function, args, kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, Tensor)
    ]


def draws_random_numbers(function: OpOverload) -> bool:
    """Whether an operator draws random numbers from a generator."""
    return torch.Tag.nondeterministic_seeded in function.tags


def on_meta(tensor: Tensor) -> bool:
    """Whether a tensor's memory is on the meta device, even if its `device` property differs."""
    return underlying_device(tensor).type == "meta"


def _covers_full_storage(tensor: Tensor) -> bool:
    """Whether a write to `tensor` overwrites its complete storage."""
    # A contiguous view may still be smaller than its storage.
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def _hash_generator_state(state: Tensor) -> bytes:
    return blake2b(state.numpy().tobytes(), digest_size=16).digest()


def check_unchanged(data: TensorVersion) -> Tensor:
    """Return the tensor of `data`, unmodified since it was recorded.

    Raises:
        DeferredError: if the tensor was modified in place.
    """
    # In-place operators increase the version; writes through NumPy or `data` do not.
    if version(data.tensor) != data.version:
        raise DeferredError(
            f"a tensor of shape {tuple(data.tensor.shape)} from which parameters are initialized "
            "was modified in place after it was read inside `no_init_parameters`\n"
            "read a copy of the tensor instead: `tensor.clone()`"
        )
    return data.tensor
