"""The trace of a `local_map`: its call becomes one call of the operator `shardwright::local_map`.

The operator reads the tensors of the call, then the parameters and buffers of the module. The
original code is not traced. It is run once on tensors without values, in a thread of its own, which
none of the modes of a capture reaches; where it needs values, the shapes of its results come from
the notation. A rewrite then gives the operator its target, a `LocalCall`.
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
from shardwright.core.graph.local_declaration import Declaration
from shardwright.core.graph.local_map import Body, LocalCall, ModuleBody
from shardwright.core.torch_internals import pytree
from shardwright.errors import CaptureError, StrategyError

ResultTypes = list[tuple[tuple[Any, ...], torch.dtype]]
"""Shape and dtype of each result; sizes may be symbols."""


@dataclass(frozen=True)
class Options:
    """What a user says of a `local_map`.

    Args:
        declaration: its notation, and which results are partial.
        dtypes: of the results, if they are stated.
        random, flops, saved_bytes: as those of `LocalCall`; `random` is None if it is to be seen.
    """

    declaration: Declaration
    dtypes: tuple[torch.dtype, ...] | None
    random: bool | None
    flops: float | None
    saved_bytes: float | None


@dataclass(frozen=True)
class LocalPart:
    """A part of a model that is left as it is, while the model is traced.

    Args:
        where: names it in errors.
        statistics: numbers of buffers that it changes in any case.
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
        """Its results, of one operator.

        Raises:
            StrategyError: if the call does not fit the notation.
        """
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        constants = tuple((n, x) for n, x in enumerate(leaves) if not isinstance(x, Tensor))
        self._check(tensors)
        region = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        dry = DryCall(self.sample, structure, constants, region).run([*tensors, *state])
        results, output = (
            self._as_declared(tensors, [*tensors, *state])
            if dry is None
            else (self._as_seen(dry, tensors), dry.output)
        )
        changed = self._changed_buffers(dry, state)
        options = self.options
        call = LocalCall(
            name=self.body.path if isinstance(self.body, ModuleBody) else self.body.text,
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
        results += [(tuple(state[number].shape), state[number].dtype) for number in changed]
        constant = frozenset[int]() if dry is None else dry.constant
        read = [t.detach() if n in constant else t for n, t in enumerate([*tensors, *state])]
        made = _one_operator(call, read, results)
        with torch.no_grad():
            for number, value in zip(changed, made[len(made) - len(changed) :], strict=True):
                state[number].copy_(value)
        return output(made[: len(made) - len(changed)])

    def _check(self, tensors: Sequence[Tensor]) -> None:
        """
        Raises:
            StrategyError: if the call does not fit the notation.
        """
        entries, text = self.declared.inputs, self.declared.text
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors) or "no tensors"
        if [len(entry) for entry in entries] != [tensor.ndim for tensor in tensors]:
            given = example_entries(tensors)
            raise StrategyError(
                f"local_map {self.where}: called with {shapes}, which `{text}` does not describe\n"
                "write an entry for each tensor, with a name or `_` for each dimension:"
                f' "{given} -> {text.partition("->")[2].strip()}"'
            )
        sizes: dict[str, Any] = {}
        for entry, tensor in zip(entries, tensors, strict=True):
            for name, size in zip(entry, tensor.shape, strict=True):
                if name != "_" and sizes.setdefault(name, size) != size:
                    raise StrategyError(
                        f"local_map {self.where}: called with {shapes}, in which `{name}` of"
                        f" `{text}` is both {sizes[name]} and {size}\n"
                        "give dimensions of different sizes different names"
                    )

    def _as_seen(self, dry: DryResult, tensors: Sequence[Tensor]) -> ResultTypes:
        """Shape and dtype of each result, as it returns them without values.

        Raises:
            StrategyError: if the notation says otherwise.
            CaptureError: if sizes are symbols, and one that depends on them has no name.
        """
        shapes, declared = [shape for shape, _ in dry.results], self.declared
        self._check_results(shapes, tensors)
        sizes = declared.sizes(tensors)
        symbolic = any(isinstance(size, torch.SymInt) for t in tensors for size in t.shape)
        if symbolic and any(token not in sizes for entry in declared.outputs for token in entry):
            raise CaptureError(
                f"local_map {self.where}: which sizes of its results depend on the call is unknown"
            )
        return [
            (declared.shape(number, sizes, shape), dtype)
            for number, (shape, dtype) in enumerate(dry.results)
        ]

    def _as_declared(
        self, tensors: Sequence[Tensor], every: Sequence[Tensor]
    ) -> tuple[ResultTypes, Callable[[Sequence[Tensor]], Any]]:
        """Shape and dtype of each result, as the user declares them, and what the call returns.

        Raises:
            StrategyError: if a size is unknown.
        """
        entries, sizes = self.declared.outputs, self.declared.sizes(tensors)
        for entry in entries:
            unknown = [token for token in entry if token not in sizes and not token.isdigit()]
            if unknown:
                raise StrategyError(
                    f"local_map {self.where}: it needs values to run, so the size of"
                    f" `{unknown[0]}` in `{self.declared.text}` is not known\n"
                    'use the name of an input\'s dimension, such as `_h` in "b _h -> b _h", or a'
                    ' number, as in "b _h -> b 10"'
                )
        shapes = [tuple(sizes[t] if t in sizes else int(t) for t in entry) for entry in entries]
        floating = (tensor.dtype for tensor in every if tensor.is_floating_point())
        dtypes = self.options.dtypes or (next(floating, torch.float32),) * len(entries)
        types: ResultTypes = list(zip(shapes, dtypes, strict=True))
        return types, lambda made: made[0] if len(made) == 1 else tuple(made)

    def _changed_buffers(self, dry: DryResult | None, state: Sequence[Tensor]) -> list[int]:
        """Numbers of the buffers that it changes, such as running statistics.

        Raises:
            StrategyError: if it changes something else.
        """
        changed = sorted({*self.statistics, *(() if dry is None else dry.changed)})
        for number in changed:
            value = state[number]
            if isinstance(value, nn.Parameter) or value.dtype == torch.bool:
                name = self.body.names[number][0] if isinstance(self.body, ModuleBody) else ""
                raise StrategyError(
                    f"local_map {self.where}: it changes {name!r}, and only buffers of numbers may"
                    " be changed\nchange it outside of `forward`, or compute it in a new tensor"
                )
        return changed

    def _check_results(self, shapes: Sequence[tuple[int, ...]], tensors: Sequence[Tensor]) -> None:
        """
        Raises:
            StrategyError: if what it returns without values is not what the notation says.
        """
        entries, text = self.declared.outputs, self.declared.text
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
        names = {size: name for name, size in reversed(sizes.items())}
        example = ", ".join(" ".join(names.get(s, "_") for s in shape) or "()" for shape in shapes)
        found = ", ".join(str(list(shape)) for shape in shapes) or "no tensors"
        raise StrategyError(
            f"local_map {self.where}: returns {found}, which `{text}` does not describe\n"
            f'write an entry for each result: "{text.partition("->")[0].strip()} -> {example}"'
        )


def example_entries(tensors: Sequence[Tensor]) -> str:
    """A notation of the tensors of a call in which the first dimension of the first tensor may be
    sharded, and that of others of its size."""
    sizes = [t.shape[0] for t in tensors if t.ndim]

    def entry(tensor: Tensor) -> str:
        if not tensor.ndim:
            return "()"
        first = "b" if tensor.shape[0] == sizes[0] else "_"
        return " ".join((first, *"_" * (tensor.ndim - 1)))

    return ", ".join(map(entry, tensors))


def _one_operator(
    call: LocalCall, tensors: Sequence[Tensor], results: ResultTypes
) -> Sequence[Tensor]:
    shapes = [shape for shape, _ in results]
    with tagging(_CallTag(call)):
        made: Sequence[Tensor] = torch.ops.shardwright.local_map(
            list(tensors),
            [size for shape in shapes for size in shape],
            [len(shape) for shape in shapes],
            " ".join(str(dtype) for _, dtype in results),
        )
    return made


@dataclass(frozen=True, eq=False)
class _CallTag:
    """What a call of the operator stands for; its results follow from the node."""

    call: LocalCall


@torch.library.custom_op("shardwright::local_map", mutates_args=())
def _local_map(
    tensors: Sequence[Tensor], sizes: Sequence[int], ranks: Sequence[int], dtypes: str
) -> list[Tensor]:
    """What stands for a `local_map` while a model is traced: its results have these shapes."""
    raise NotImplementedError


@_local_map.register_fake
def _(
    tensors: Sequence[Tensor], sizes: Sequence[int], ranks: Sequence[int], dtypes: str
) -> list[Tensor]:
    left, results = list(sizes), []
    for rank, dtype in zip(ranks, dtypes.split(), strict=True):
        shape, left = left[:rank], left[rank:]
        kind = getattr(torch, dtype.removeprefix("torch."))
        results.append(torch.empty(shape, dtype=kind, device="cpu"))
    return results


@rewrites(torch.ops.shardwright.local_map.default)
def _local_call(node: fx.Node) -> fx.Node:
    call = next(tag.call for tag in tags_of(node) if isinstance(tag, _CallTag))
    made = node.meta["val"]
    call = replace(call, results=tuple((tuple(t.shape), t.dtype) for t in made))
    tensors: Any = node.args[0]
    with node.graph.inserting_before(node):
        new = node.graph.call_function(call, tuple(tensors))
    new.meta.update(node.meta)
    if len(made) == 1:
        new.meta["val"] = made[0]
        for user in list(node.users):
            replace_node(user, new)
    return new
