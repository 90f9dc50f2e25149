"""What a plan of a model depends on, as lines that are equal in processes that would plan alike."""

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
_OF_PROCESS = ("_original_object_hash",)
"""Attributes of configurations of `transformers` that differ between processes."""

Seen = dict[int, tuple[int, Any]]
"""What was described before, by `id`: its number, and itself, so that the `id` stays its own."""


def description(value: Any, seen: Seen | None = None) -> Iterator[str]:
    """Classes, code, attributes and shapes, and the contents of tensors that are neither parameters
    nor buffers."""
    seen = {} if seen is None else seen
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, torch.device):
        yield value.type  # The index is each rank's own.
    elif id(value) in seen:
        yield f"number {seen[id(value)][0]}"
    else:
        seen[id(value)] = len(seen), value
        yield _name(value)
        if isinstance(value, nn.Module):
            yield from _module(value, seen)
        for part in _parts(value):
            yield from description(part, seen)


def _name(value: Any) -> str:
    kind = value if isinstance(value, (type, FunctionType)) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _parts(value: Any) -> Iterator[Any]:
    """What a value consists of; nothing of what cannot be looked into."""
    if isinstance(value, (Tensor, np.ndarray)):
        yield from _of_tensor(torch.as_tensor(value))
    elif isinstance(value, Graph):
        yield from (value.fingerprint, value.compute_dtype, value.attributes)
        yield from (*value.constants.values(), value.module_tags, value.call_tags)
    elif isinstance(value, FunctionType):
        yield from (hash_of_code(value.__code__), value.__defaults__, value.__kwdefaults__)
        yield from map(_of_cell, value.__closure__ or ())
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, dict):
        yield from (item for item in value.items() if item[0] not in _OF_PROCESS)
    elif isinstance(value, (set, frozenset)):
        yield from sorted("\n".join(description(part)) for part in value)
    elif isinstance(value, (list, tuple)):
        yield from value
    elif isinstance(value, ModuleType):
        yield value.__name__
    elif not isinstance(value, (type, nn.Module)):
        # The code of others; locks and process groups raise, and have no parts.
        with suppress(Exception):
            yield value.__reduce_ex__(2)


def _of_tensor(tensor: Tensor) -> Iterator[Any]:
    yield from (tensor.dtype, tensor.shape, tensor.requires_grad, tensor.is_meta)
    if not (isinstance(tensor, (Deferred, FakeTensor, nn.Parameter)) or tensor.is_meta):
        yield int(content_hash(tensor))


def _of_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # A name that is not bound yet.
        return None


def _module(module: nn.Module, seen: Seen) -> Iterator[str]:
    """The code that `forward` calls, the global variables that it reads, the attributes of all
    modules inside, and their parameters and buffers without values."""
    for inner in module.modules():
        seen.setdefault(id(inner), (len(seen), inner))
    codes: dict[CodeType, None] = {}
    for place, name in globals_read(module, codes):
        yield f"{place}: {name}"
        yield from description(globals_of(place)[name], seen)
    yield from map(hash_of_code, codes)
    for path, inner in module.named_modules():
        yield f"module {path}: {_name(inner)}"
        for name, attribute in vars(inner).items():
            if name not in ("_parameters", "_buffers"):
                yield name
                yield from description(attribute, seen)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield f"{name} {tensor.dtype} {list(tensor.shape)} {tensor.requires_grad}"


def hash_of_code(code: CodeType) -> str:
    """The same for the same instructions, wherever their file is."""
    digest = blake2b(code.co_code, digest_size=8)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            digest.update(hash_of_code(constant).encode())
        else:
            digest.update("\n".join(description(constant)).encode())
    digest.update(repr((code.co_names, code.co_varnames, code.co_freevars)).encode())
    return digest.hexdigest()
