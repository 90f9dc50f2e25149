"""Trace of a `local_map`: each call becomes one call of the operator `shardwright::local_map`.

The operator reads the tensor arguments of the call, then the parameters and buffers of the module.
The code of the target is not traced. It runs once on fake tensors, in a new thread, where the modes
of the capture are not active; if the code cannot run on fake tensors, the notation determines the
shapes of its results. Canonicalization then replaces the operator by a `LocalCall`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardwright.core.capture.annotations import tagging, tags_of
from shardwright.core.capture.canonicalize import rewrites
from shardwright.core.capture.fx_nodes import replace as replace_node
from shardwright.core.capture.local_dry_call import DryCall, DryResult, size_of
from shardwright.core.graph.local_body import Body, ModuleBody
from shardwright.core.graph.local_declaration import Declaration
from shardwright.core.graph.local_map import LocalCall
from shardwright.core.torch_internals import pytree
from shardwright.errors import CaptureError, StrategyError

ResultTypes = list[tuple[tuple[Any, ...], torch.dtype]]
"""Shape and dtype of each result; sizes may be symbolic."""


@dataclass(frozen=True)
class Options:
    """Options that a user passes to `local_map`.

    Args:
        declaration: the notation, and which results are partial.
        dtypes: dtypes of the results; None to infer them.
        random, flops, saved_bytes: whether the target draws random numbers, FLOPs of its forward
            pass on the global batch, and bytes saved for its backward pass; None to infer each.
    """

    declaration: Declaration
    dtypes: tuple[torch.dtype, ...] | None
    random: bool | None
    flops: float | None
    saved_bytes: float | None


@dataclass(frozen=True)
class LocalPart:
    """A `local_map` target during the trace of a model.

    Args:
        where: name of the target in error messages.
        body: the module or function that runs.
        sample: the module or function for dry calls on fake tensors.
        statistics: indices, among parameters and buffers, of the buffers that every call of the
            target changes.
    """

    where: str
    options: Options
    body: Body
    sample: Body
    statistics: tuple[int, ...] = ()

    @property
    def declared(self) -> Declaration:
        return self.options.declaration

    def traced(self, args: Any, kwargs: Any, state: list[Tensor]) -> Any:
        """Trace a call of the target as one operator and return its results.

        Args:
            args, kwargs: arguments of the call.
            state: parameters and buffers of the target.

        Raises:
            StrategyError: if the arguments or results do not match the notation.
            CaptureError: if a symbolic size of a result has no name.
        """
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        constants = tuple((n, x) for n, x in enumerate(leaves) if not isinstance(x, Tensor))
        self._check_arguments(tensors)
        # The operator enters this region again when it runs, outside of the trace.
        region = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        dry = DryCall(self.sample, structure, constants, region).run([*tensors, *state])
        results, output = (
            self._parse_result_types(tensors, [*tensors, *state])
            if dry is None
            else (self._infer_result_types(dry, tensors), dry.output)
        )
        changed = self._find_changed_buffers(dry, state)
        options = self.options
        call = LocalCall(
            name=self.body.path if isinstance(self.body, ModuleBody) else self.body.description,
            declaration=self.declared,
            body=self.body,
            sample=None if dry is None else self.sample,
            structure=structure,
            constants=constants,
            results=(),
            changed=tuple(changed),
            autocast=region,
            random=bool(dry and dry.random) if options.random is None else options.random,
            flops=options.flops,
            saved_bytes=options.saved_bytes,
        )
        # New values of changed buffers are further results, which are copied into the buffers
        # below.
        results += [(tuple(state[number].shape), state[number].dtype) for number in changed]
        constant = frozenset[int]() if dry is None else dry.constant
        # An input without gradient must have none, rather than zeros: an optimizer would decay it.
        read = [t.detach() if n in constant else t for n, t in enumerate([*tensors, *state])]
        made = _call_traced_operator(call, read, results)
        # Without autograd, as for running statistics.
        with torch.no_grad():
            for number, value in zip(changed, made[len(made) - len(changed) :], strict=True):
                state[number].copy_(value)
        return output(made[: len(made) - len(changed)])

    def _check_arguments(self, tensors: Sequence[Tensor]) -> None:
        """Check the shapes of tensor arguments.

        Raises:
            StrategyError: if the arguments do not match the notation.
        """
        entries, notation = self.declared.inputs, self.declared.notation
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors) or "no tensors"
        if [len(entry) for entry in entries] != [tensor.ndim for tensor in tensors]:
            given = example_entries(tensors)
            raise StrategyError(
                f"local_map {self.where}: called with {shapes}, which `{notation}` does not "
                "describe\nwrite an entry for each tensor, with a name or `_` for each dimension:"
                f' "{given} -> {notation.partition("->")[2].strip()}"'
            )
        sizes: dict[str, Any] = {}
        for entry, tensor in zip(entries, tensors, strict=True):
            for name, size in zip(entry, tensor.shape, strict=True):
                if name != "_" and sizes.setdefault(name, size) != size:
                    raise StrategyError(
                        f"local_map {self.where}: called with {shapes}, in which `{name}` of"
                        f" `{notation}` is both {sizes[name]} and {size}\n"
                        "give dimensions of different sizes different names"
                    )

    def _infer_result_types(self, dry: DryResult, tensors: Sequence[Tensor]) -> ResultTypes:
        """Return the shape and dtype of each result of a dry call.

        Raises:
            StrategyError: if the results do not match the notation.
            CaptureError: if arguments have symbolic sizes and a size of a result has no name.
        """
        shapes, declared = [shape for shape, _ in dry.results], self.declared
        self._check_results(shapes, tensors)
        sizes = declared.sizes(tensors)
        symbolic = any(isinstance(size, torch.SymInt) for t in tensors for size in t.shape)
        # The dry call gives the size for this call only, which may depend on a symbol.
        if symbolic and any(token not in sizes for entry in declared.outputs for token in entry):
            raise CaptureError(
                f"local_map {self.where}: a result size that depends on an argument has no name\n"
                'name dimensions of results after those of arguments: "b _h -> b _h"'
            )
        return [
            (declared.shape(number, sizes, shape), dtype)
            for number, (shape, dtype) in enumerate(dry.results)
        ]

    def _parse_result_types(
        self, tensors: Sequence[Tensor], every: Sequence[Tensor]
    ) -> tuple[ResultTypes, Callable[[Sequence[Tensor]], Any]]:
        """Return the shape and dtype of each result, determined by the notation, without a dry
        call.

        Also returns a function that builds the return value of the call from the results.

        Raises:
            StrategyError: if the notation does not determine a size.
        """
        entries, sizes = self.declared.outputs, self.declared.sizes(tensors)
        for entry in entries:
            unknown = [token for token in entry if token not in sizes and not token.isdigit()]
            if unknown:
                raise StrategyError(
                    f"local_map {self.where}: the size of `{unknown[0]}` in"
                    f" `{self.declared.notation}` depends on the values of tensors\n"
                    'name the dimension after a dimension of an argument, as in "b _h -> b _h", '
                    "or write a"
                    ' number, as in "b _h -> b 10"'
                )
        shapes = [tuple(sizes[t] if t in sizes else int(t) for t in entry) for entry in entries]
        floating = (tensor.dtype for tensor in every if tensor.is_floating_point())
        dtypes = self.options.dtypes or (next(floating, torch.float32),) * len(entries)
        types: ResultTypes = list(zip(shapes, dtypes, strict=True))
        return types, lambda made: made[0] if len(made) == 1 else tuple(made)

    def _find_changed_buffers(self, dry: DryResult | None, state: Sequence[Tensor]) -> list[int]:
        """Return the indices of the buffers that the target changes, such as running statistics.

        Raises:
            StrategyError: if the target changes a parameter or a boolean buffer.
        """
        changed = sorted({*self.statistics, *(() if dry is None else dry.changed)})
        for number in changed:
            value = state[number]
            if isinstance(value, nn.Parameter) or value.dtype == torch.bool:
                name = self.body.names[number][0] if isinstance(self.body, ModuleBody) else ""
                raise StrategyError(
                    f"local_map {self.where}: it changes {name!r} in place, but may change only"
                    " numeric buffers\nchange it outside of `forward`, or compute a new tensor"
                )
        return changed

    def _check_results(self, shapes: Sequence[tuple[int, ...]], tensors: Sequence[Tensor]) -> None:
        """Check the shapes of the results of a dry call.

        Raises:
            StrategyError: if the results do not match the notation.
        """
        entries, notation = self.declared.outputs, self.declared.notation
        sizes = {n: size_of(s) for n, s in self.declared.sizes(tensors).items()}
        fits = len(shapes) == len(entries) and all(
            len(shape) == len(entry)
            and all(
                size == (int(token) if token.isdigit() else sizes.get(token, size))
                for token, size in zip(entry, shape, strict=True)
            )
            for shape, entry in zip(shapes, entries, strict=True)
        )
        if fits:
            return
        # For the example: of several dimensions with one size, the first.
        names = {size: name for name, size in reversed(sizes.items())}
        example = ", ".join(" ".join(names.get(s, "_") for s in shape) or "()" for shape in shapes)
        returned = ", ".join(str(list(shape)) for shape in shapes) or "no tensors"
        raise StrategyError(
            f"local_map {self.where}: returns {returned}, which `{notation}` does not describe\n"
            f'write an entry for each result: "{notation.partition("->")[0].strip()} -> {example}"'
        )


def example_entries(tensors: Sequence[Tensor]) -> str:
    """Return the notation of tensor arguments, for the example in an error message.

    `b` is the first dimension of the first tensor and of all tensors with the same first size;
    other dimensions are `_`.
    """
    # Sizes that depend on values are symbols, which cannot be compared.
    sizes = [t.shape[0] for t in tensors if t.ndim and isinstance(t.shape[0], int)]

    def entry(tensor: Tensor) -> str:
        if not tensor.ndim:
            return "()"
        size = tensor.shape[0]
        first = "b" if isinstance(size, int) and size == sizes[0] else "_"
        return " ".join((first, *"_" * (tensor.ndim - 1)))

    return ", ".join(map(entry, tensors))


def _call_traced_operator(
    call: LocalCall, tensors: Sequence[Tensor], results: ResultTypes
) -> Sequence[Tensor]:
    shapes = [shape for shape, _ in results]
    with tagging(_LocalCallTag(call)):
        made: Sequence[Tensor] = torch.ops.shardwright.local_map(
            list(tensors),
            # A schema has no lists of lists: all sizes in one list, and the rank of each result.
            [size for shape in shapes for size in shape],
            [len(shape) for shape in shapes],
            " ".join(str(dtype) for _, dtype in results),
        )
    return made


@dataclass(frozen=True, eq=False)
class _LocalCallTag:
    """Tag of a traced `local_map` node with the `LocalCall` that will replace it."""

    call: LocalCall


@torch.library.custom_op("shardwright::local_map", mutates_args=())
def _local_map_operator(
    tensors: Sequence[Tensor], sizes: Sequence[int], ranks: Sequence[int], dtypes: str
) -> list[Tensor]:
    """Placeholder operator of a `local_map` during the trace, with results of the given sizes."""
    raise NotImplementedError


@_local_map_operator.register_fake
def _(
    tensors: Sequence[Tensor], sizes: Sequence[int], ranks: Sequence[int], dtypes: str
) -> list[Tensor]:
    remaining_sizes, results = list(sizes), []
    for rank, dtype in zip(ranks, dtypes.split(), strict=True):
        shape, remaining_sizes = remaining_sizes[:rank], remaining_sizes[rank:]
        torch_dtype = getattr(torch, dtype.removeprefix("torch."))
        results.append(torch.empty(shape, dtype=torch_dtype, device="cpu"))
    return results


@rewrites(torch.ops.shardwright.local_map.default)
def _replace_by_local_call(node: fx.Node) -> fx.Node:
    call = next(tag.call for tag in tags_of(node) if isinstance(tag, _LocalCallTag))
    made = node.meta["val"]
    call = replace(call, results=tuple((tuple(t.shape), t.dtype) for t in made))
    tensors: Any = node.args[0]
    with node.graph.inserting_before(node):
        new = node.graph.call_function(call, tuple(tensors))
    new.meta.update(node.meta)
    # The placeholder returns a list, a `LocalCall` with one result the tensor itself.
    if len(made) == 1:
        new.meta["val"] = made[0]
        for user in list(node.users):
            replace_node(user, new)
    return new
