"""Execution of TorchDynamo's graph while `torch.export` traces it to ATen operators.

Dynamo's graph calls functions of `torch` as the user's code does. Its sub-graphs are inlined:
operators of checkpointed regions get a tag, and custom autograd functions keep the gradients of
their `backward`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import traceback

from shardwright.core.capture.annotations import checkpoint_annotation
from shardwright.core.capture.autograd_functions import traced
from shardwright.core.capture.naming import line_of
from shardwright.core.capture.number_promotion import NumberPromotion
from shardwright.core.graph.host_numbers import numbers_of_body
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.operators import HigherOrderOperator
from shardwright.errors import CaptureError

_ENTERS_TRANSFORM = ("_increment_nesting", "_enter_dual_level")

_INLINED = {"wrap": 1, "wrap_activation_checkpoint": 1, "invoke_subgraph": 2}
"""Higher-order operators that only call a sub-graph: position of the sub-graph's first argument, by
name."""

_INTERPRETED = {**_INLINED, "tag_activation_checkpoint": 1, "autograd_function_apply": 2}
"""The same for all higher-order operators whose sub-graphs are interpreted, with their numbers."""


class GraphReplay(fx.Interpreter):
    """Interpreter that runs Dynamo's graph, so that another tracer can record its operators.

    Args:
        graph_module: Dynamo's graph; metadata of its nodes names modules and lines of user code.
        annotations: tags of all operators.
        replaced: values of nodes, which are used instead of running the nodes.
        numbers: placeholders of a sub-graph that are Python numbers in the user's code, for which
            tensors without dimensions are passed.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        annotations: Mapping[str, Any] | None = None,
        replaced: Mapping[fx.Node, Any] | None = None,
        numbers: Collection[fx.Node] = (),
    ) -> None:
        super().__init__(graph_module, garbage_collect_values=False)
        self.numbers = numbers_of_body(graph_module.graph, numbers)
        self._annotations = dict(annotations or {})
        self._replaced = dict(replaced or {})

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "placeholder":
            value = super().run_node(n)  # Consumes the next argument even if it is replaced.
            return self._replaced.get(n, value)
        if n in self._replaced:
            return self._replaced[n]
        # `torch.fx` copies `custom` to the operators that are traced while the node runs.
        if self._annotations:
            n.meta["custom"] = {**self._annotations, **n.meta.get("custom", {})}
        self._node = n
        # The output passes numbers on without computing with them.
        read = n.all_input_nodes if n.op != "output" else []
        numbers = {id(self.env[i]) for i in read if i in self._replaced or i in self.numbers}
        numbers.discard(id(None))
        # Sub-graphs have numbers as inputs, too.
        if n in self.numbers or _get_function_name(n.target) in _INTERPRETED:
            numbers = set()
        with traceback.set_current_meta(n):
            return self._run_with_numbers(n, numbers) if numbers else super().run_node(n)

    def _run_with_numbers(self, n: fx.Node, numbers: set[int]) -> Any:
        """Run a node that reads tensors where the user's code has Python numbers.

        Args:
            numbers: `id()` of each tensor that replaces a Python number.
        """
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        tensors = [leaf for leaf in leaves if id(leaf) not in numbers]
        promotion = NumberPromotion(tensors, n.meta.get("example_value"))
        args, kwargs = pytree.tree_map(
            lambda leaf: promotion.argument(leaf) if id(leaf) in numbers else leaf, (args, kwargs)
        )
        return promotion.result(getattr(self, n.op)(n.target, args, kwargs))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        # Tensors of integers would be divided in single precision.
        if target is operator.truediv and self._node in self.numbers:
            args = tuple(each.double() if isinstance(each, Tensor) else each for each in args)
        name = _get_function_name(target)
        if name.endswith(_ENTERS_TRANSFORM):
            # Within transforms, Dynamo omits the `backward` of custom autograd functions.
            raise CaptureError(
                "`forward` calls a function transform (`torch.vmap`, `torch.func.grad`) and has "
                "side effects\nremove the side effects, or write the function without a transform"
            )
        # Dynamo's function for a read of `tensor.data`.
        if name == "_get_data_attr":
            return args[0].detach()
        if name == "set_" and len(args) == 2:  # An assignment to `tensor.data`.
            # `RecordedEffects` traces the assignment as a copy.
            if args[1] is not args[0]:
                args[0].data = args[1]
            return args[0]
        # Undoes the version count of `set_`, which is not called here.
        if name.startswith("_lower_version_count"):
            return args[0]
        # Under a function mode Dynamo's function only records a node, whereas `traced_autocast`
        # replaces methods of `torch.autocast`.
        if name == "_enter_autocast":
            device, dtype, enabled, cache = args
            region = torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)
            region.__enter__()  # type: ignore[no-untyped-call]
            return region
        if name == "_enter_inference_mode":
            # During capture it only disables gradients (`fake_copy.py`), unlike Dynamo's function.
            inference = torch.inference_mode(*args)
            inference.__enter__()
            return inference
        if name in ("_exit_autocast", "_exit_inference_mode"):
            args[0].__exit__(None, None, None)
            return None
        if isinstance(target, HigherOrderOperator):
            return self._call_higher_order_operator(name, target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target == "item" and self._node in self.numbers:
            return args[0]  # The tensor stands for its number.
        if target == "to" and _is_no_op_conversion(*args, **kwargs):
            # Tracing the call would record the parameter as the result of a detached operator.
            return args[0]
        return super().call_method(target, args, kwargs)

    def _call_higher_order_operator(self, name: str, target: Any, args: Any, kwargs: Any) -> Any:
        if name == "tag_activation_checkpoint":
            if kwargs.get("use_reentrant"):
                # Reentrant checkpointing trains nothing unless an input requires a gradient. Dynamo
                # lists parameters as inputs too, so this cannot be checked.
                raise CaptureError(
                    "cannot capture reentrant activation checkpointing "
                    "(`checkpoint(…, use_reentrant=True)`)\npass `use_reentrant=False`"
                )
            annotations = {**self._annotations, **checkpoint_annotation()}
            numbers = self._numbers_passed_to(args[0], 1)
            return GraphReplay(args[0], annotations, numbers=numbers).run(*args[1:])
        if name in _INLINED:
            numbers = self._numbers_passed_to(args[0], _INLINED[name])
            replay = GraphReplay(args[0], self._annotations, numbers=numbers)
            return replay.run(*args[_INLINED[name] :])
        if name == "autograd_function_apply":
            body, backward, *tensors = args
            numbers = self._numbers_passed_to(body, 2)
            return _call_autograd_function(body, backward, tensors, numbers, line_of(self._node))
        return super().call_function(target, args, kwargs)

    def _numbers_passed_to(self, body: fx.GraphModule, first: int) -> list[fx.Node]:
        """Return the placeholders of a sub-graph for which the current node passes numbers.

        Args:
            body: the sub-graph.
            first: position of its first argument in those of the node.
        """
        placeholders = (node for node in body.graph.nodes if node.op == "placeholder")
        passed = zip(placeholders, self._node.args[first:], strict=True)
        return [p for p, node in passed if node in self._replaced or node in self.numbers]


def _is_no_op_conversion(tensor: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Whether `tensor.to(*args, **kwargs)` returns `tensor`; devices are ignored in a trace."""
    given = (*args, *kwargs.values())
    dtypes = [each.dtype if isinstance(each, Tensor) else each for each in given]
    flags = [each for each in args if isinstance(each, bool)]  # `non_blocking`, then `copy`.
    copies = kwargs.get("copy", False) or flags[1:] == [True]
    others = any(isinstance(each, torch.memory_format) for each in given)
    return not (copies or others) and all(
        each == tensor.dtype for each in dtypes if isinstance(each, torch.dtype)
    )


def drop_assertions(graph_module: fx.GraphModule) -> None:
    """Remove assertions on values, and symbolic sizes that only assertions read.

    A captured model does not check values.
    """
    for graph in graph_module.modules():
        # In reverse: erasing an assertion leaves the sizes that it read without a user.
        for node in reversed(graph.graph.nodes) if isinstance(graph, fx.GraphModule) else ():
            if node.users or node.op not in ("call_function", "call_method"):
                continue
            is_check = "_assert" in _get_function_name(node.target)
            symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
            if is_check or isinstance(node.meta.get("example_value"), symbols):
                node.graph.erase_node(node)


def _get_function_name(target: Any) -> str:
    if isinstance(target, HigherOrderOperator):
        return str(target.name())  # type: ignore[no-untyped-call]
    return str(getattr(target, "__name__", target))


def _call_autograd_function(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    tensors: Sequence[Any],
    numbers: Collection[fx.Node],
    line: str,
) -> Any:
    """Call a custom autograd function whose forward and backward graphs Dynamo has traced.

    Args:
        forward, backward: Dynamo's graphs.
        tensors: inputs of the forward graph.
        numbers: placeholders of the forward graph that are Python numbers in the user's code.
        line: the user's line that calls the function, for errors, as Dynamo does not record the
            class.
    """

    output = next(node for node in reversed(forward.graph.nodes) if node.op == "output")
    all_numbers = numbers_of_body(forward.graph, numbers)
    placeholders = [node for node in backward.graph.nodes if node.op == "placeholder"]
    # The backward graph's last inputs are what the forward graph returns for it.
    saved = zip(reversed(placeholders), reversed(output.args[0][1]), strict=False)
    saved_numbers = [placeholder for placeholder, node in saved if node in all_numbers]

    class Traced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            result, ctx.saved_for_graph = GraphReplay(forward, numbers=numbers).run(*inputs)
            return result[0] if isinstance(result, (tuple, list)) and len(result) == 1 else result

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            replay = GraphReplay(backward, numbers=saved_numbers)
            return replay.run(*gradients, *ctx.saved_for_graph)

    Traced.__qualname__ = line
    differentiable = any(isinstance(each, Tensor) and each.requires_grad for each in tensors)
    if not (torch.is_grad_enabled() and differentiable):
        with torch.no_grad():
            # The forward graph returns (results, tensors for the backward graph).
            result = GraphReplay(forward, numbers=numbers).run(*tensors)[0]
        return result if isinstance(result, (tuple, list)) else (result,)
    result = traced(Traced, tensors, {})
    return result if isinstance(result, tuple) else (result,)


def name_modules(graph_module: fx.GraphModule, models: Sequence[nn.Module]) -> None:
    """Rewrite the module stacks of Dynamo's nodes in place, with paths as in `torch.export`.

    Args:
        graph_module: Dynamo's graph.
        models: the model and its copy; submodules of either may have been called.
    """
    paths = {str(id(inner)): path for model in models for path, inner in model.named_modules()}
    # `torch.export` begins each stack with the model itself.
    root = {"": ("", type(models[0]))}
    for inner in graph_module.modules():
        for node in inner.graph.nodes if isinstance(inner, fx.GraphModule) else ():
            if node.op in ("placeholder", "output"):
                continue
            stack: dict[str, tuple[str, Any]] = dict(root)
            for key, (_, cls) in (node.meta.get("nn_module_stack") or {}).items():
                # Dynamo's keys are the `id()` of a module, followed by `@1` in its second call.
                identity, at, repeated = key.partition("@")
                if paths.get(identity):
                    stack[key] = paths[identity] + at + repeated, cls
            node.meta["nn_module_stack"] = stack
