"""Signature of the traced graph: its placeholders, its results, and the paths of gradients."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from shardwright.core.capture.fx_nodes import replace
from shardwright.core.capture.naming import line_of
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.operators import OpOverload, schema_of
from shardwright.core.torch_internals.tensors import FakeTensor
from shardwright.errors import CaptureError


@dataclass
class Signature:
    """Names of the placeholders of a traced graph, and the structure of its result.

    Args:
        out_spec: structure of the result.
        parameters, buffers: name of the placeholder of each parameter or buffer, by name in the
            module; tied names have equal placeholders.
        inputs: name of the placeholder of each leaf of the arguments.
        constants: tensors that the code of the model creates, by placeholder name.
    """

    out_spec: pytree.TreeSpec
    parameters: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, str] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, exported: ExportedProgram) -> Signature:
        """Read the signature of an exported program.

        Raises:
            CaptureError: if an operator reads an object that is neither tensor nor number, or a
                constant tensor on the meta device.
        """
        signature = cls(exported.call_spec.out_spec)
        nodes = placeholders(exported.graph)
        for spec in exported.graph_signature.input_specs:
            name, target = spec.arg.name, str(spec.target)
            if spec.kind is InputKind.PARAMETER:
                signature.parameters[target] = name
            elif spec.kind is InputKind.BUFFER:
                signature.buffers[target] = name
            elif spec.kind is InputKind.USER_INPUT:
                signature.inputs.append(name)
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                signature.constants[name] = _require_initialized_tensor(
                    nodes[name], exported.constants[target]
                )
            else:
                raise CaptureError(
                    _format_unsupported_object(nodes[name], exported.constants.get(target, target))
                )
        return signature

    def copy(self) -> Signature:
        """Copy the signature; `parameters` and `buffers` of the copy may be modified."""
        parameters, buffers = dict(self.parameters), dict(self.buffers)
        return Signature(self.out_spec, parameters, buffers, self.inputs, self.constants)


def _format_unsupported_object(node: fx.Node, value: object) -> str:
    reader = next(iter(node.users), node)
    if isinstance(value, torch.Generator):
        return (
            f"{line_of(reader)}: this draws from a `torch.Generator`, whose state a captured model "
            "would not advance\ndraw without a generator, after `torch.manual_seed`"
        )
    return (
        f"{line_of(reader)}: an operator reads an object of class {type(value).__name__}, which a "
        "captured program cannot\npass tensors and numbers"
    )


def _require_initialized_tensor(node: fx.Node, constant: Any) -> torch.Tensor:
    if constant.is_meta or isinstance(constant, FakeTensor):
        reader = next(iter(node.users), node)
        raise CaptureError(
            f"{line_of(reader)}: this reads an uninitialized tensor that is not a parameter, "
            f"buffer or input (`.data` of a parameter, or a plain attribute on the meta device)\n"
            f"use the parameter itself, or `register_buffer`"
        )
    return torch.Tensor.detach(constant)


def placeholders(graph: fx.Graph) -> dict[str, fx.Node]:
    """Return the placeholder nodes of a graph by name."""
    return {node.name: node for node in graph.nodes if node.op == "placeholder"}


def output_node(graph: fx.Graph) -> fx.Node:
    """Return the output node of a graph."""
    node: fx.Node = next(node for node in reversed(graph.nodes) if node.op == "output")
    return node


def results(graph: fx.Graph) -> tuple[list[Any], dict[str, fx.Node]]:
    """Return the leaves of the result, and the new value of each placeholder changed in place."""
    returned, updates = output_node(graph).args
    return list(returned), dict(updates)  # type: ignore[arg-type]


def merge_tied(module: nn.Module, graph: fx.Graph, signature: Signature) -> dict[str, str]:
    """Map all names of a tied parameter or buffer to one placeholder, in place.

    Returns:
        The first name of each tied tensor, by its other names.
    """
    tied: dict[str, str] = {}
    nodes = placeholders(graph)
    for placeholder_names, named in (
        (signature.parameters, module.named_parameters(remove_duplicate=False)),
        (signature.buffers, module.named_buffers(remove_duplicate=False)),
    ):
        first: dict[int, str] = {}
        for name, tensor in named:
            # The first name is that of `named_parameters()`, which lists a tied tensor once.
            original = first.setdefault(id(tensor), name)
            if original == name:
                continue
            tied[name] = original
            if name in placeholder_names:
                duplicate = placeholder_names.pop(name)
                if original in placeholder_names:
                    nodes[duplicate].replace_all_uses_with(nodes[placeholder_names[original]])
                else:
                    # `forward` reads the tensor by its other name only.
                    placeholder_names[original] = duplicate
    return tied


def add_updates(graph: fx.Graph, changed: Mapping[fx.Node, fx.Node]) -> None:
    """Add the new values of placeholders that are changed in place to the results of a graph."""
    output = output_node(graph)
    output.args = (output.args[0], {node.name: new for node, new in changed.items()})


def check_inputs_unchanged(signature: Signature, changed: Mapping[fx.Node, fx.Node]) -> None:
    """Check that `forward` changes no input in place, since ranks compute on shards of copies.

    Raises:
        CaptureError: if `forward` changes an input in place.
    """
    inputs = set(signature.inputs)
    for node, new in changed.items():
        if node.name in inputs:
            raise CaptureError(
                f"{line_of(new)}: this changes an input of the model in place, which the caller "
                f"would not see\nuse the operator that returns a new tensor, or `clone()` the "
                f"input first"
            )


def check_constants_unchanged(signature: Signature, changed: Mapping[fx.Node, fx.Node]) -> None:
    """Check that `forward` changes no constant in place, because the program has a copy of each
    constant.

    Raises:
        CaptureError: if `forward` changes a tensor in place that is not a parameter or buffer.
    """
    for node, new in changed.items():
        if node.name in signature.constants:
            raise CaptureError(
                f"{line_of(new)}: this changes a tensor in place that is not a parameter or buffer"
                " of the model\nregister it (`register_buffer`), or assign a new tensor"
            )


def take_as_buffers(
    module: nn.Module,
    signature: Signature,
    changed: Mapping[fx.Node, fx.Node],
    trained: Iterable[fx.Node],
) -> None:
    """Turn frozen parameters that `forward` updates into buffers, in place.

    An example is the moving average of parameters in a teacher model.

    Args:
        changed: node of the new value of each placeholder that is updated in place.
        trained: placeholders that need a gradient.

    Raises:
        CaptureError: if the storage dtype of a changed parameter is not the compute dtype.
    """
    dtypes = {name: p.dtype for name, p in module.named_parameters(remove_duplicate=False)}
    sources = {node.name for node in trained}
    new = {node.name: value for node, value in changed.items()}
    for name, node in list(signature.parameters.items()):
        if node not in new:
            continue
        dtype = new[node].meta["val"].dtype
        # Mixed precision casts the stored parameter before `forward` reads it.
        if dtype != dtypes[name]:
            raise CaptureError(
                f"{line_of(new[node])}: this changes parameter {name!r}, which is stored in "
                f"{dtypes[name]} but computed in {dtype}, so the change would be rounded\nmake it "
                f"a buffer, or plan without a compute dtype"
            )
        # A trained one stays a parameter, whose new value the call writes back at its end.
        if node not in sources:
            signature.buffers[name] = signature.parameters.pop(name)


def gradient_sources(
    module: nn.Module, leaves: list[Any], signature: Signature, graph: fx.Graph
) -> list[fx.Node]:
    """Return the placeholders of trainable parameters and of inputs that require a gradient.

    Args:
        leaves: leaves of the arguments of the call.
    """
    nodes = placeholders(graph)
    # Of a tied parameter the first name, which `merge_tied` leaves in the signature.
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    names = [node for name, node in signature.parameters.items() if name in trained]
    for node, leaf in zip(signature.inputs, leaves, strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            names.append(node)
    return [nodes[name] for name in names]


aten = torch.ops.aten

_WITHOUT_GRADIENT = frozenset(
    {
        "detach",
        "ones_like",
        "zeros_like",
        "full_like",
        "empty_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_ones",
        "new_zeros",
        "new_full",
        "new_empty",
        "normal_functional",
        "uniform",
        "exponential",
    }
)
"""Operators with a floating-point result but without a gradient with respect to their inputs."""

_STATISTICS_RESULTS, _PERMUTATION = frozenset({1, 2, 3}), frozenset({0})
_RESULTS_WITHOUT_GRADIENT = {
    "batch_norm_train": _STATISTICS_RESULTS,
    "instance_norm_train": _STATISTICS_RESULTS,
    "native_batch_norm": _STATISTICS_RESULTS,
    "_native_batch_norm_legit": _STATISTICS_RESULTS,
    "native_layer_norm": _STATISTICS_RESULTS,
    "nll_loss_forward": _STATISTICS_RESULTS,
    "nll_loss2d_forward": _STATISTICS_RESULTS,
    "linalg_lu": _PERMUTATION,
    "lu_unpack": _PERMUTATION,
}
"""Indices of floating-point results without a gradient, by operator; other results have one."""

_STATISTICS = {"mean", "rstd", "save_mean", "save_invstd", "total_weight"}
"""Arguments of backward operators that are statistics of the forward pass, without a gradient."""

_ARGUMENTS_WITHOUT_GRADIENT = {"hinge_embedding_loss": {"target"}}
"""Floating-point arguments without a gradient, by operator."""


def nodes_with_gradients(
    graph: fx.Graph, sources: Iterable[fx.Node], outputs: Iterable[fx.Node]
) -> frozenset[fx.Node]:
    """Return the floating-point nodes on a differentiable path from `sources` to `outputs`."""
    return differentiable_from(graph, sources) & _find_differentiable_ancestors(graph, outputs)


def drop_redundant_detach(graph: fx.Graph, sources: Iterable[fx.Node]) -> None:
    """Remove each `aten.detach` whose input has no gradient, in place."""
    # In a no-grad region, which is inlined, a `detach` is what keeps the gradient out.
    differentiable = differentiable_from(graph, sources, no_grad=True)
    for node in list(graph.nodes):
        if node.target is aten.detach.default and node.args[0] not in differentiable:
            replace(node, node.args[0])


def differentiable_from(
    graph: fx.Graph,
    sources: Iterable[fx.Node],
    no_grad: bool = False,
    without: fx.Node | None = None,
) -> frozenset[fx.Node]:
    """Return the floating-point nodes that depend differentiably on one of the `sources`.

    Args:
        no_grad: whether paths may go through nodes of no-grad regions, which become differentiable
            when the regions are inlined.
        without: node through which paths must not go.
    """
    # Nodes are in topological order, so that one pass suffices.
    dependent = set(sources) - {without}
    for node in graph.nodes:
        if node is without:
            continue
        inputs = (n for n in node.all_input_nodes if n in dependent)
        if node.op == "call_function" and any(_passes_gradient(node, n, no_grad) for n in inputs):
            dependent.add(node)
    return frozenset(dependent)


def _find_differentiable_ancestors(
    graph: fx.Graph, outputs: Iterable[fx.Node]
) -> frozenset[fx.Node]:
    reaching = set(outputs)
    for node in reversed(graph.nodes):
        if node in reaching and node.op == "call_function":
            reaching.update(n for n in node.all_input_nodes if _passes_gradient(node, n))
    return frozenset(reaching)


def _passes_gradient(node: fx.Node, source: fx.Node, no_grad: bool = False) -> bool:
    """Whether a gradient flows from a node to `source`, one of its inputs."""
    return (
        _get_operator_name(node) not in _WITHOUT_GRADIENT
        and (no_grad or not node.meta.get("no_grad"))
        and is_floating_point(node)
        and is_floating_point(source)
        and not _is_result_without_gradient(node)
        and not _is_argument_without_gradient(node, source)
    )


def _get_operator_name(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload):
        return schema_of(node.target).name.split("::")[-1]
    return str(getattr(node.target, "__name__", node.target))


def _is_result_without_gradient(node: fx.Node) -> bool:
    if node.target is not operator.getitem:
        return False
    result, index = node.args
    assert isinstance(result, fx.Node)
    # Of other operators, each result has a gradient. A list of results has results of its own.
    return index in _RESULTS_WITHOUT_GRADIENT.get(_get_operator_name(result), ())


def _is_argument_without_gradient(node: fx.Node, source: fx.Node) -> bool:
    """Whether an operator reads `source` only as arguments without a gradient, such as forward
    statistics that a backward operator reads."""
    name = _get_operator_name(node)
    without = _STATISTICS if "backward" in name else _ARGUMENTS_WITHOUT_GRADIENT.get(name, set())
    if not without or not isinstance(node.target, OpOverload):
        return False
    names = [argument.name for argument in schema_of(node.target).arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    read_as = {name for name, value in given.items() if value is source}
    # One node may be passed as two arguments, of which one has a gradient.
    return bool(read_as) and read_as <= without


def is_floating_point(node: fx.Node) -> bool:
    """Return whether a node has real or complex floating-point values, which may have gradients."""
    value: Any = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else (value,)
    return any(
        isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex()) for v in values
    )
