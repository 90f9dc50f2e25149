"""`local_map`: a part of a model that capture leaves as it is, as one operator of the graph.

While a model is traced, a call of such a part becomes one call of the operator
`shardwright::local_map`, on the tensors of the call, then the parameters and buffers of the module.
The original code is not traced. It is run once on tensors without values, in a thread of its own,
which none of the modes of a capture reaches; where it needs values, the shapes of its results come
from the notation. A rewrite then gives the operator its target, a `LocalCall`.
"""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import update_wrapper
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.overrides import handle_torch_function, has_torch_function

from shardwright.core.capture.annotations import (
    ModulePlace,
    ModuleTag,
    attach,
    tagging,
    tags_of,
)
from shardwright.core.capture.canonicalize import rewrites
from shardwright.core.capture.fx_nodes import replace as fx_replace
from shardwright.core.capture.naming import current_line
from shardwright.core.deferred import copies_of_attributes
from shardwright.core.graph.local_map import (
    Body,
    Declaration,
    FunctionBody,
    LocalCall,
    ModuleBody,
    Partial,
)
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.autograd import functions_applied_by
from shardwright.core.torch_internals.dispatch import TorchDispatchMode
from shardwright.core.torch_internals.tensors import FakeTensorMode
from shardwright.errors import CaptureError, StrategyError

Target = TypeVar("Target", bound=Callable[..., Any])

EXAMPLE = '"b s _h, _h -> b s _h"'


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


def local_map(
    target: Target,
    notation: str,
    *,
    partial: Partial | Sequence[Partial] = None,
    dtypes: torch.dtype | Sequence[torch.dtype] | None = None,
    random: bool | None = None,
    flops: float | None = None,
    saved_bytes: float | None = None,
) -> Target:
    """Leaves a module or a function as it is: it is not captured, and runs eagerly on local shards,
    with its own Python, kernels and data-dependent shapes. Its backward pass is autograd's.

    The whole model may be the target. It is then trained data parallel, with parameters stored as
    the plan says, as by DDP or FSDP2. Like `shard_map` of JAX and `local_map` of DTensor; which
    mesh axes cut which dimension is decided by the plan.

    Args:
        target: a module, which is marked and returned; or a function of tensors, whose marked form
            is returned, to be called in `forward`. Parameters and buffers of a module are gathered
            before a call, and the gradients of shards are summed.
        notation: the dimensions of each tensor that it is called with, in order, and of each
            result: `"b s _h, _h -> b s _h"`. A name is a dimension that may be sharded: shards give
            the same as if they were computed together. `_` is one that may not, `_h` too, with a
            name by which results have its size; `()` is a tensor without dimensions, and a number
            the size of a result.
        partial: of results that lack a name of an input: `"sum"` if they add up over its shards,
            `"mean"` if their mean counts, as of a mean loss; one for all or one for each. Without
            it, such a name is not sharded.
        dtypes: of the results, where the target cannot run on tensors without values and they are
            not that of the first floating-point input.
        random: whether it draws random numbers from `torch`, where that cannot be seen so either.
        flops, saved_bytes: of its forward pass on the whole batch: floating-point operations, and
            bytes that are kept for the backward pass. By default they are counted on tensors
            without values, or else taken from its inputs and results.

    Returns:
        The module itself, or the marked function.

    Raises:
        StrategyError: if the notation is malformed, or a function holds a module or a tensor that
            is trained.

    >>> import torch
    >>> import shardwright as sw
    >>> def clipped(x):
    ...     return x / x.norm() if x.norm().item() > 1 else x
    >>> clip_rows = sw.local_map(clipped, "b _ -> b _")
    >>> clip_rows(torch.ones(2, 8)).norm()
    tensor(1.)
    """
    if isinstance(target, type) or not callable(target):
        raise StrategyError(
            f"local_map takes a module or a function, not {target!r}\n"
            f"write `sw.local_map(net.attention, {EXAMPLE})`"
        )
    options = _options(notation, partial, dtypes, random, flops, saved_bytes)
    if isinstance(target, nn.Module):
        attach(target, LocalMapTag(options))
        return target
    _check_closure(target)
    function: Any = LocalFunction(target, options)
    return function  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class LocalMapTag(ModuleTag):
    """Marks a module as a `local_map`."""

    options: Options

    def trace(self, module: nn.Module, place: ModulePlace) -> None:
        named = _all_names(module)
        names = tuple(named.values())
        sample = _without_values(module)
        text = f"{type(module).__module__}.{type(module).__qualname__} {module!r}"
        body = ModuleBody(weakref.ref(place.root), place.path, names, text)
        sampled = ModuleBody(lambda: sample, "", names, text)
        part = _Part(str(place), self.options, body, sampled)

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Here, as a trace puts others in their place.
            tensors = dict(module.named_parameters()) | dict(module.named_buffers())
            return part.traced(args, kwargs, [tensors[name] for name, *_ in names])

        module.forward = forward


def is_local_map(module: nn.Module) -> bool:
    """Whether a module is marked as a `local_map`."""
    return any(isinstance(tag, LocalMapTag) for tag in vars(module).get("shardwright", {}).values())


class LocalFunction:
    """A function that is marked as a `local_map`; called as the function."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        self.function, self.options = function, options
        update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call_locally(self, args, kwargs)

    def traced(self, args: Any, kwargs: Any) -> Any:
        """The call while a model is traced."""
        body = FunctionBody(self.function)
        where = f"{body.text} at {current_line()}"
        return _Part(where, self.options, body, body).traced(args, kwargs, [])


def call_locally(function: LocalFunction, args: Any, kwargs: Any) -> Any:
    """Calls a marked function; a capture takes the call for one operator."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    # Modes are asked only here, so that they surround the function everywhere else.
    if torch.compiler.is_exporting() and has_torch_function(tensors):
        return handle_torch_function(call_locally, tensors, function, args, kwargs)
    return function.function(*args, **kwargs)


@dataclass(frozen=True)
class _Part:
    """A part of a model that is left as it is, while the model is traced.

    Args:
        where: names it in errors.
    """

    where: str
    options: Options
    body: Body
    sample: Body

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
        seen = _Trial(self.sample, structure, constants, region).run([*tensors, *state])
        results, output = self._results(seen, tensors, [*tensors, *state])
        call = LocalCall(
            name=self.body.path if isinstance(self.body, ModuleBody) else self.body.text,
            declaration=self.declared,
            body=self.body,
            sample=None if seen is None else self.sample,
            structure=structure,
            constants=constants,
            results=(),
            autocast=region,
            random=bool(
                seen and seen.random if self.options.random is None else self.options.random
            ),
            flops=self.options.flops,
            saved_bytes=self.options.saved_bytes,
        )
        shapes = [shape for shape, _ in results]
        with tagging(_CallTag(call)):
            made = torch.ops.shardwright.local_map(
                [*tensors, *state],
                [size for shape in shapes for size in shape],
                [len(shape) for shape in shapes],
                " ".join(str(dtype) for _, dtype in results),
            )
        return output(made)

    def _check(self, tensors: Sequence[Tensor]) -> None:
        entries, text = self.declared.inputs, self.declared.text
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors) or "no tensors"
        example = ", ".join(
            " ".join(("b", *"_" * (t.ndim - 1))) if t.ndim else "()" for t in tensors
        )
        example = f"{example} -> {text.partition('->')[2].strip()}"
        fits = [len(entry) for entry in entries] == [tensor.ndim for tensor in tensors]
        if not fits:
            raise StrategyError(
                f"local_map {self.where}: called with {shapes}, which `{text}` does not describe\n"
                f'write an entry for each tensor, with a name or `_` for each dimension: "{example}"'
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

    def _results(
        self, seen: _Seen | None, tensors: Sequence[Tensor], every: Sequence[Tensor]
    ) -> tuple[list[tuple[tuple[Any, ...], torch.dtype]], Callable[[Sequence[Tensor]], Any]]:
        """Shape and dtype of each result, and what the call returns of these."""
        declared, entries = self.declared, self.declared.outputs
        sizes = declared.sizes(tensors)
        if seen is not None:
            found = [(shape, dtype) for shape, dtype in seen.results]
            self._check_results([shape for shape, _ in found], tensors)
            symbolic = any(isinstance(s, torch.SymInt) for t in tensors for s in t.shape)
            if symbolic and any(token not in sizes for entry in entries for token in entry):
                raise CaptureError(f"local_map {self.where}: sizes of results may vary")
            shapes = [declared.shape(n, sizes, shape) for n, (shape, _) in enumerate(found)]
            dtypes = [dtype for _, dtype in found]
            return list(zip(shapes, dtypes, strict=True)), seen.output
        for entry in entries:
            unknown = [token for token in entry if token not in sizes and not token.isdigit()]
            if unknown:
                raise StrategyError(
                    f"local_map {self.where}: it needs values to run, so that the size of"
                    f" `{unknown[0]}` in the result `{' '.join(entry)}` of `{self.declared.text}` is"
                    f' not known\ngive it the name of an input\'s dimension, such as `_h` in "b _h -> b _h", or a number'
                )
        shapes = [tuple(sizes[t] if t in sizes else int(t) for t in entry) for entry in entries]
        floating = (t.dtype for t in every if t.is_floating_point())
        dtypes = [next(floating, torch.float32)] * len(entries)
        if self.options.dtypes is not None:
            dtypes = [*self.options.dtypes * (len(entries) if len(self.options.dtypes) == 1 else 1)]
        return list(
            zip(shapes, dtypes, strict=True)
        ), lambda made: made[0] if len(made) == 1 else tuple(made)

    def _check_results(self, shapes: Sequence[tuple[int, ...]], tensors: Sequence[Tensor]) -> None:
        """
        Raises:
            StrategyError: if what it returns without values is not what the notation says.
        """
        entries, text = self.declared.outputs, self.declared.text
        sizes = {n: _number(s) for n, s in self.declared.sizes(tensors).items()}
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
            fx_replace(user, new)
    return new


@dataclass(frozen=True)
class _Seen:
    """What a part returns on tensors without values.

    Args:
        output: makes what the call returns of the tensors in it.
    """

    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    output: Callable[[Sequence[Tensor]], Any]
    random: bool


@dataclass(frozen=True)
class _Trial:
    """A run of a part on tensors without values."""

    sample: Body
    structure: pytree.TreeSpec
    constants: tuple[tuple[int, Any], ...]
    autocast: torch.dtype | None

    def run(self, tensors: Sequence[Tensor]) -> _Seen | None:
        """What it returns; None if it needs values."""
        like = [
            (tuple(_number(size) for size in t.shape), t.dtype, t.requires_grad) for t in tensors
        ]
        before = random.getstate(), np.random.get_state()
        with ThreadPoolExecutor(1) as thread:
            seen = thread.submit(self._seen, like).result()
        random.setstate(before[0])
        np.random.set_state(before[1])
        return seen

    def _seen(self, like: Sequence[tuple[tuple[int, ...], torch.dtype, bool]]) -> _Seen | None:
        given = self.structure.num_leaves - len(self.constants)
        try:
            with (
                functions_applied_by(lambda _, args, kwargs, original: original()),
                _Draws() as draws,  # type: ignore[no-untyped-call]
                FakeTensorMode(),
                torch.autocast("cpu", self.autocast, enabled=self.autocast is not None),
            ):
                tensors = [
                    torch.empty(shape, dtype=dtype).requires_grad_(trained)
                    for shape, dtype, trained in like
                ]
                leaves: list[Any] = tensors[:given]
                for position, constant in self.constants:
                    leaves.insert(position, _number(constant))
                args, kwargs = pytree.tree_unflatten(leaves, self.structure)
                result = self.sample.run(args, kwargs, tensors[given:])
        except Exception:  # The user's code, which may need values.
            return None
        parts, spec = pytree.tree_flatten(result)
        found = [part for part in parts if isinstance(part, Tensor)]
        shapes = [tuple(part.shape) for part in found]
        if any(not isinstance(size, int) for shape in shapes for size in shape):
            return None  # A size that depends on values.

        def output(made: Sequence[Tensor]) -> Any:
            left = iter(made)
            filled = [next(left) if isinstance(part, Tensor) else part for part in parts]
            return pytree.tree_unflatten(filled, spec)

        dtypes = [part.dtype for part in found]
        return _Seen(tuple(zip(shapes, dtypes, strict=True)), output, draws.any)


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees whether random numbers are drawn."""

    any = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.any |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _number(size: Any) -> Any:
    """The size that a symbol stands for in this call."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _all_names(module: nn.Module) -> dict[int, tuple[str, ...]]:
    """All names of each parameter and buffer, the parameters first."""
    names: dict[int, tuple[str, ...]] = {}
    for named in (
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    ):
        for name, tensor in named:
            names[id(tensor)] = (*names.get(id(tensor), ()), name)
    return names


def _without_values(module: nn.Module) -> nn.Module:
    """A copy on the meta device."""
    memo: dict[int, Any] = copies_of_attributes(module)
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"),
            requires_grad=parameter.requires_grad,
        )
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    return copy.deepcopy(module, memo)


def _options(
    notation: str,
    partial: Any,
    dtypes: Any,
    random: bool | None,
    flops: float | None,
    saved_bytes: float | None,
) -> Options:
    """
    Raises:
        StrategyError: if they are malformed.
    """
    left, arrow, right = notation.partition("->") if isinstance(notation, str) else ("", "", "")
    inputs, outputs = _entries(left), _entries(right)
    tokens = [token for entry in (*inputs, *outputs) for token in entry]
    digits = [token for entry in inputs for token in entry if token.isdigit()]
    bad = [t for t in tokens if not (t.isidentifier() or t.isdigit())] + digits
    if not arrow or not outputs or bad:
        what = f"{bad[0]!r} is no name" if bad else "it has no inputs and results around an arrow"
        raise StrategyError(
            f"local_map: {notation!r} is not a notation: {what}\nwrite a name of a dimension that "
            f"may be sharded, `_` for another, `()` for a number, such as {EXAMPLE}"
        )
    partials = tuple(partial) if isinstance(partial, (tuple, list)) else (partial,) * len(outputs)
    if len(partials) != len(outputs) or not {None, "sum", "mean"}.issuperset(partials):
        raise StrategyError(
            f"local_map {notation!r}: partial={partial!r} does not fit its {len(outputs)} results\n"
            'give `"sum"`, `"mean"` or None for all, or one for each: '
            f"partial={('mean', *(None,) * (len(outputs) - 1))}"
        )
    if isinstance(dtypes, torch.dtype):
        dtypes = (dtypes,) * len(outputs)
    if dtypes is not None and len(dtypes) != len(outputs):
        raise StrategyError(
            f"local_map {notation!r}: {len(dtypes)} dtypes for {len(outputs)} results\n"
            f"give one for each: dtypes=({'torch.float32, ' * len(outputs)})"
        )
    kinds = None if dtypes is None else tuple(dtypes)
    declaration = Declaration(inputs, outputs, partials, notation)
    return Options(declaration, kinds, random, flops, saved_bytes)


def _entries(side: str) -> tuple[tuple[str, ...], ...]:
    texts = [text.strip() for text in side.split(",")] if side.strip() else []
    return tuple(() if text == "()" else tuple(text.split()) for text in texts)


def _check_closure(function: Any) -> None:
    """
    Raises:
        StrategyError: if a function reads what is trained other than by its arguments.
    """
    held = [getattr(function, "__self__", None)]
    with _inspectable():
        held += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    for thing in held:
        if isinstance(thing, nn.Module) or (isinstance(thing, Tensor) and thing.requires_grad):
            raise StrategyError(
                f"local_map: {getattr(function, '__qualname__', function)!r} reads a"
                f" {type(thing).__name__} that is not among its arguments, and would get no"
                " gradient of other shards\n"
                "give the module itself (`sw.local_map(net.attention, …)`), or pass the tensor"
            )


@contextmanager
def _inspectable() -> Iterator[None]:
    """A context in which a variable of an enclosing function may have no value yet."""
    try:
        yield
    except ValueError:
        return
