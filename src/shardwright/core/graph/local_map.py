"""`LocalCall`: a `local_map` as an opaque operator of a graph.

A `local_map` marks a function or module that is not traced, for example because it has its own
kernels or data-dependent shapes. Its inputs are the tensors of the call, then the *state*: the
parameters and buffers of the module. Each rank runs the original code eagerly on local shards, and
autograd records its operators. Plans depend only on its `Declaration`. State may be stored sharded:
it is gathered before the call, and gradients of parameters are summed over the ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.graph.float64 import double_dtype, everything_in_float64
from shardwright.core.graph.graph import Graph
from shardwright.core.graph.local_body import Body, ForkGenerators, ModuleBody
from shardwright.core.graph.local_declaration import Declaration
from shardwright.core.graph.local_gradients import empty_results, on_each_rank
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.local_tensors import tensors_by_rank
from shardwright.core.torch_internals.tensors import FakeTensor, version
from shardwright.errors import CaptureError

log = logging.getLogger("shardwright.cost")


def _format_container(result: Any) -> str:
    if isinstance(result, (tuple, list)):
        return f"a {type(result).__name__} of {', '.join(type(each).__name__ for each in result)}"
    return f"a {type(result).__name__}"


@dataclass(frozen=True, eq=False)
class LocalCall:
    """Operator target of one call of a `local_map`; a function of tensors only.

    Args:
        name: path of the module, or name of the function.
        declaration: the user's declaration of the tensors of the call.
        body: the user's function or module, for tensors with data.
        sample: a copy of `body` for meta and fake tensors; None if it runs only on tensors with
            data.
        structure: pytree structure of the arguments of the call.
        constants: (index, value) of each leaf of the arguments that is not a tensor.
        results: global shape and dtype of each result, then of each changed buffer.
        changed: indices of the changed buffers among the parameters and buffers.
        autocast: dtype of the autocast region around the call; None outside of autocast regions.
        random: whether the call draws random numbers.
        flops: floating-point operations of a forward pass of the full batch, declared by the user;
            None to count them on `sample`.
        saved_bytes: bytes saved for the backward pass of the full batch, declared by the user; None
            to count them on `sample`.
        in_float64: whether all floating-point tensors are float64, for exact comparisons.
    """

    name: str
    declaration: Declaration
    body: Body
    sample: Body | None
    structure: pytree.TreeSpec
    constants: tuple[tuple[int, Any], ...]
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    changed: tuple[int, ...] = ()
    autocast: torch.dtype | None = None
    random: bool = False
    flops: float | None = None
    saved_bytes: float | None = None
    in_float64: bool = False

    def __post_init__(self) -> None:
        # Graphs, programs and fingerprints name their targets by these attributes of functions.
        object.__setattr__(self, "__name__", "local_map")
        object.__setattr__(self, "__qualname__", repr(self))

    @property
    def _equality_key(self) -> tuple[Any, ...]:
        """Fields by which calls are compared; calls of two layers with equal code are equal."""
        dtypes = tuple(dtype for _, dtype in self.results)
        # By `repr`, as constants may have neither a hash nor an equality by contents.
        constants = repr(self.constants)
        return (self.declaration, self.body.description, constants, dtypes, self.autocast)

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, LocalCall) and self._equality_key == other._equality_key
        )

    def __hash__(self) -> int:
        return hash((self.declaration, self.body.description))

    def __repr__(self) -> str:
        return f"local_map({self.name!r}, {self.declaration.notation!r})"

    def as_float64(self) -> LocalCall:
        """Return a copy of the call for float64 tensors."""
        results = tuple((shape, double_dtype(dtype)) for shape, dtype in self.results)
        return replace(self, results=results, in_float64=True)

    def with_seeded_backward(self, fork: ForkGenerators) -> LocalCall:
        """Return a copy of the call whose backward pass is seeded by its forward pass."""
        return replace(self, body=self.body.with_seeded_backward(fork))

    @property
    def is_opaque(self) -> bool:
        """Whether capture cannot determine the call's saved tensors and input gradients."""
        return self.sample is None or self.saved_bytes is not None

    def is_mean(self, output: int) -> bool:
        """Whether result `output` is the mean of the local results of all ranks.

        New values of changed buffers follow the results, and are means.
        """
        partial = self.declaration.partial
        return output >= len(partial) or partial[output] == "mean"

    def __call__(self, *tensors: Tensor) -> Any:
        """Run the user's function or module on local shards.

        Args:
            tensors: local shards of the tensor arguments, then the parameters and buffers.

        Returns:
            The results, then the new values of changed buffers, as a tuple or a single tensor.

        Raises:
            CaptureError: if a result is not as declared, or an input is changed in place.
        """
        results = self.run(tensors)
        return results[0] if len(results) == 1 else results

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the user's function or module on local shards; return a tuple even for a single
        result."""
        # First, so that the checks below apply to the tensors of each rank.
        if any(tensors_by_rank(tensor) is not None for tensor in tensors):
            return on_each_rank(self.run, tensors)
        if all(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors):
            return self._run_sample_on_meta_tensors(tensors)
        versions = list(map(version, tensors))
        with self._make_dtype_context(tensors):
            results = self._run_body(self.body, tensors)
        for index, before in enumerate(versions):
            if version(tensors[index]) != before:
                raise CaptureError(self._describe_changed_input(index))
        return results

    def _run_body(self, body: Body, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run `body` and return its results, then the new values of changed buffers.

        Raises:
            CaptureError: if a result is not as declared, or other state is changed.
        """
        num_arguments = len(self.declaration.inputs)
        leaves: list[Any] = list(tensors[:num_arguments])
        for leaf_index, constant in self.constants:
            # In ascending order, so that each index is the index in the call.
            leaves.insert(leaf_index, constant)
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        state = list(tensors[num_arguments:])
        for index in self.changed:
            # A copy: the new value is a result, combined over all shards before it is assigned.
            state[index] = state[index].clone()
        result, after = body.run(args, kwargs, state)
        for index in after:
            if index not in self.changed:
                raise CaptureError(self._describe_changed_input(num_arguments + index))
        # Leaves such as None and numbers are not declared.
        results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        if self.sample is None:
            self._check_result_container(result, len(results))
        # A buffer that this call did not change keeps its value.
        buffers = [after.get(index, state[index]).detach() for index in self.changed]
        return self._require_declared_results([*results, *buffers], tensors)

    def _check_result_container(self, result: Any, count: int) -> None:
        """Check the type of the return value of a function that capture could not run.

        Capture assumes that a function that needs tensors with data returns a tensor or a tuple of
        `count` tensors.

        Raises:
            CaptureError: if the function returns another container.
        """
        is_full_model = isinstance(self.body, ModuleBody) and not self.body.path
        if isinstance(result, (tuple, list)):
            is_assumed = count > 1 and all(isinstance(element, Tensor) for element in result)
        else:
            is_assumed = isinstance(result, Tensor) or count > 1 or is_full_model
        if not is_assumed:
            expected = "a tensor" if count == 1 else f"a tuple of {count} tensors"
            raise CaptureError(
                f"local_map {self._title} returns {_format_container(result)}, but capture assumed"
                f" {expected}, as it could not run the code\n"
                f"return {expected} from the `local_map`"
            )

    def _make_dtype_context(self, tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Return the context in which the call runs: float64, autocast, or none."""
        if self.in_float64:
            return everything_in_float64()
        if self.autocast is None:
            return nullcontext()
        device_type = tensors[0].device.type
        # PyTorch has no autocast for the meta device.
        return torch.autocast("cpu" if device_type == "meta" else device_type, self.autocast)

    def _infer_local_result_types(
        self, tensors: Sequence[Tensor]
    ) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Return the declared local shape and dtype of each result, for local inputs `tensors`."""
        sizes, num_outputs = self.declaration.sizes(tensors), len(self.declaration.outputs)
        return [
            # A changed buffer is not declared: each rank has all of it.
            (self.declaration.shape(index, sizes, shape) if index < num_outputs else shape, dtype)
            for index, (shape, dtype) in enumerate(self.results)
        ]

    def _require_declared_results(
        self, results: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Return `results`, after checking them against the declaration.

        Raises:
            CaptureError: unless number, shapes and dtypes of the results are as declared.
        """
        expected, num_changed = self._infer_local_result_types(tensors), len(self.changed)
        if len(results) != len(expected):
            raise CaptureError(
                f"local_map {self._title} returns {len(results) - num_changed} tensors, but"
                f" `{self.declaration.notation}` declares {len(expected) - num_changed}\n"
                "declare each result, separated by commas as in `b s -> b s, b`"
            )
        for index, (tensor, (shape, dtype)) in enumerate(zip(results, expected, strict=True)):
            # In float64, a kernel may still return another floating-point dtype.
            allows_dtype = self.in_float64 and tensor.is_floating_point()
            if tuple(tensor.shape) != shape or not (tensor.dtype == dtype or allows_dtype):
                raise CaptureError(self._describe_result_mismatch(index, tensor, shape, dtype))
        return tuple(results)

    def _describe_result_mismatch(
        self, index: int, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype
    ) -> str:
        returned, declared = f"{list(tensor.shape)}", f"{list(shape)}"
        # With the declared shape, the dtype is what differs.
        if tuple(tensor.shape) == shape:
            remedy = f"declare the dtype of each result: `dtypes=({tensor.dtype},)`"
            returned, declared = str(tensor.dtype), str(dtype)
        else:
            entry = " ".join("_" * tensor.ndim) or "()"
            remedy = (
                f"in `{self.declaration.notation}`, write another name, or as a number a size that "
                f"no input has, such as `{entry}`"
            )
        return (
            f"local_map {self._title}: result {index} is {returned} on this rank, but declared as "
            f"{declared}\n{remedy}"
        )

    @property
    def _title(self) -> str:
        # The path of the whole model is empty.
        return repr(self.name) if self.name else "of the model"

    def _describe_changed_input(self, index: int) -> str:
        num_arguments = len(self.declaration.inputs)
        tensor_name = f"input {index}"
        if index >= num_arguments and isinstance(self.body, ModuleBody):
            name = self.body.names[index - num_arguments][0]
            if index - num_arguments >= self.body.parameters:
                return (
                    f"local_map {self._title} changes its buffer {name!r} in place, which"
                    " other ranks would not see\n"
                    "declare the buffer if the mean of its new values over shards is right, as of"
                    f" running statistics: `buffers=({name!r},)`; else update it outside of the"
                    " `local_map`"
                )
            tensor_name = f"its {name!r}"
        return (
            f"local_map {self._title} changes {tensor_name} in place, which other ranks would not"
            " see\nchange a copy (`x = x.clone()`), or call the layer that changes it outside the"
            " `local_map`"
        )

    def _run_sample_on_meta_tensors(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run `sample` on meta or fake tensors; if that fails, return empty tensors of the declared
        shapes.

        The declared `saved_bytes`, if any, replace a run of `sample`.
        """
        # If `saved_bytes` is declared, what the sample saves must not be counted.
        if self.sample is not None and self.saved_bytes is None:
            try:
                with self._make_dtype_context(tensors):
                    return self._run_body(self.sample, tensors)
            except Exception as error:
                # The user's code may raise any error: it may need values on shards even if capture
                # ran it without values on the full batch.
                log.info(
                    "local_map %r: memory saved for the backward pass is not counted, as the code"
                    " does not run without values on shards (%s)\n"
                    "pass `saved_bytes`",
                    *(self.name, error),
                )
        return empty_results(
            self._infer_local_result_types(tensors),
            tensors,
            self._estimate_local_saved_bytes(tensors),
        )

    def _estimate_local_saved_bytes(self, tensors: Sequence[Tensor]) -> int | None:
        """Return the bytes that one rank saves, `saved_bytes` times its share of the results'
        elements.

        Returns None if `saved_bytes` is None.
        """
        if self.saved_bytes is None:
            return None
        global_numel = sum(math.prod(shape) for shape, _ in self.results)
        local_numel = sum(math.prod(shape) for shape, _ in self._infer_local_result_types(tensors))
        # The results may have no elements.
        return int(self.saved_bytes * local_numel / max(global_numel, 1))


def bind_modules(graph: Graph, root: nn.Module) -> Graph:
    """Return `graph` with `local_map` calls that run the modules of `root`."""
    if not any(is_module_call(op.target) for op in graph.ops):
        return graph

    def bind(target: Any) -> Any:
        if not is_module_call(target):
            return target
        body = target.body
        # A new cache: that of `body` refers to modules of another model.
        return replace(target, body=replace(body, root=lambda: root, _bound={}))

    return replace(graph, ops=tuple(replace(op, target=bind(op.target)) for op in graph.ops))


def is_opaque(target: object) -> bool:
    """Whether an operator is a `local_map` call whose gradients and saved tensors are unknown."""
    return isinstance(target, LocalCall) and target.is_opaque


def is_module_call(target: object) -> bool:
    """Whether an operator is a `local_map` call of a module, rather than of a function."""
    return isinstance(target, LocalCall) and isinstance(target.body, ModuleBody)
