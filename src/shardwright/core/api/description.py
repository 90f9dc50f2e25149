"""Describe all inputs of a plan as lines of text that ranks can compare."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardwright.core.agreement.content_hash import content_hash
from shardwright.core.capture.global_variables import globals_of, globals_read
from shardwright.core.deferred import Deferred
from shardwright.core.graph.graph import Graph
from shardwright.core.torch_internals.tensors import FakeTensor

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)
_PROCESS_ATTRIBUTES = ("_original_object_hash",)
"""Attributes of `transformers` configurations that differ between processes."""

Seen = dict[int, tuple[int, Any]]
"""(index, object) of each described object, by `id()`. The reference to the object keeps Python
from reusing the `id()`."""


def description_lines(value: Any, seen: Seen | None = None) -> Iterator[str]:
    """Yield lines that describe an object and all objects that it refers to.

    Lines contain classes, code, attributes and shapes, and content hashes of tensors that are not
    parameters.

    Args:
        value: any object.
        seen: objects that are described already; extended in place.
    """
    seen = {} if seen is None else seen
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, torch.device):
        yield value.type  # The index is each rank's own.
    elif id(value) in seen:
        yield f"number {seen[id(value)][0]}"
    else:
        # Before its components, which may refer back to it.
        seen[id(value)] = len(seen), value
        yield _get_type_name(value)
        if isinstance(value, nn.Module):
            yield from _describe_module_and_code(value, seen)
        for component in _iterate_referenced_objects(value):
            yield from description_lines(component, seen)


def _get_type_name(value: Any) -> str:
    described_type = value if isinstance(value, (type, FunctionType)) else type(value)
    return f"{described_type.__module__}.{described_type.__qualname__}"


def _iterate_referenced_objects(value: Any) -> Iterator[Any]:
    """Yield the items or attributes that `value` refers to; nothing for an opaque object."""
    if isinstance(value, (Tensor, np.ndarray)):
        yield from _iterate_tensor_properties(torch.as_tensor(value))
    elif isinstance(value, Graph):
        yield from (value.fingerprint, value.compute_dtype, value.attributes)
        yield from (*value.constants.values(), value.module_tags, value.call_tags)
    elif isinstance(value, FunctionType):
        yield from (hash_of_code(value.__code__), value.__defaults__, value.__kwdefaults__)
        yield from map(_get_closure_cell_contents, value.__closure__ or ())
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, dict):
        yield from (item for item in value.items() if item[0] not in _PROCESS_ATTRIBUTES)
    elif isinstance(value, (set, frozenset)):
        # The order of a set of strings differs between processes, whose string hashes differ.
        yield from sorted("\n".join(description_lines(component)) for component in value)
    elif isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, ModuleType):
        yield value.__name__
    # Classes are described by their names, and modules by `_describe_module_and_code`.
    elif not isinstance(value, (type, nn.Module)):
        # Objects of other classes; some, such as locks and process groups, raise, and are opaque.
        with suppress(Exception):
            yield value.__reduce_ex__(2)


def _iterate_tensor_properties(tensor: Tensor) -> Iterator[Any]:
    yield from (tensor.dtype, tensor.shape, tensor.requires_grad, tensor.is_meta)
    # Parameters may differ between ranks until `parallelize` sends those of rank 0.
    if not (isinstance(tensor, (Deferred, FakeTensor, nn.Parameter)) or tensor.is_meta):
        yield int(content_hash(tensor))


def _get_closure_cell_contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # The variable is not assigned yet.
        return None


def _describe_module_and_code(module: nn.Module, seen: Seen) -> Iterator[str]:
    """Yield lines that describe the code called by `forward`, global variables read by `forward`,
    attributes of all submodules, and shapes and dtypes of parameters and buffers."""
    # Submodules are described by path below, and not again where attributes refer to them.
    for submodule in module.modules():
        seen.setdefault(id(submodule), (len(seen), submodule))
    codes: dict[CodeType, None] = {}
    for namespace, name in globals_read(module, codes):
        yield f"{namespace}: {name}"
        yield from description_lines(globals_of(namespace)[name], seen)
    yield from map(hash_of_code, codes)
    for path, submodule in module.named_modules():
        yield f"module {path}: {_get_type_name(submodule)}"
        for name, attribute in vars(submodule).items():
            # Parameters and buffers follow below, by shape and dtype.
            if name not in ("_parameters", "_buffers"):
                yield name
                yield from description_lines(attribute, seen)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        is_lazy = nn.parameter.is_lazy(tensor)  # without a shape, which the capture refuses
        shape = "lazy" if is_lazy else list(tensor.shape)
        yield f"{name} {tensor.dtype} {shape} {tensor.requires_grad}"


def hash_of_code(code: CodeType) -> str:
    """Return a hash of a code object's bytecode, names and constants, but not of file and line."""
    digest = blake2b(code.co_code, digest_size=8)
    for constant in code.co_consts:
        # The `repr` of a nested function's code contains its address, file and line.
        if isinstance(constant, CodeType):
            digest.update(hash_of_code(constant).encode())
        else:
            digest.update("\n".join(description_lines(constant)).encode())
    digest.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    return digest.hexdigest()
