"""Train the user's module and a planned program for a few steps, and compare the results."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.api.eager_batch_norms import RecordedBatchNorms, SplitBatchNorms
from shardwright.core.capture.fake_copy import caching_configs
from shardwright.core.capture.outer_references import OuterReferences
from shardwright.core.capture.reachable_state import ReachableState
from shardwright.core.capture.traced_call import result_leaves
from shardwright.core.capture.undone_effects import undone_effects
from shardwright.core.graph.float64 import CastsToFloat64, EverythingInFloat64
from shardwright.core.graph.graph import Graph, Value, WholeBatch
from shardwright.core.graph.interpreter import interpret
from shardwright.core.micro_batches.buffer_updates import BufferUpdates
from shardwright.core.parallel.simulate_ranks import Outcome
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dispatch import TorchDispatchMode
from shardwright.core.torch_internals.operators import schema_of
from shardwright.errors import PlanError

TOLERANCE = 1e-9
"""Default relative tolerance for values in float64."""

STEPS = 2
"""Number of training steps. The second step detects errors in updates of buffers, parameters and
momentum."""


@dataclass(frozen=True)
class TrainedSteps:
    """Results of a few training steps by SGD with momentum.

    Args:
        outputs: output tensors of each step; with several micro-batches only the loss.
        gradients: gradients of each step, by parameter name; parameters without a gradient are
            missing.
        state: parameters and buffers after the last step, by name.
    """

    outputs: list[list[Tensor]]
    gradients: list[dict[str, Tensor]]
    state: dict[str, Tensor]


@dataclass(frozen=True)
class Differences:
    """Largest differences between two training runs.

    Each difference is relative to the largest element of the tensor if that exceeds 1.

    Args:
        output: largest difference of an output.
        gradient, worst_parameter: largest difference of a gradient, and name of its parameter.
        state, worst_state: largest difference of a parameter or buffer after the last step, and its
            name.
    """

    output: float
    gradient: float
    worst_parameter: str
    state: float
    worst_state: str

    @classmethod
    def between(
        cls, steps: TrainedSteps, expected: TrainedSteps, *, zeros: Collection[str] = ()
    ) -> Differences:
        """Compare two training runs.

        Args:
            steps: the run to compare.
            expected: the reference.
            zeros: names of parameters whose missing gradients count as zeros.
        """
        outputs = [
            difference(a, b)
            for each, others in zip(steps.outputs, expected.outputs, strict=True)
            for a, b in zip(each, others, strict=True)
        ]
        gradients: dict[str, float] = {}
        for each, others in zip(steps.gradients, expected.gradients, strict=True):
            # The names of both, as a gradient may be missing in either.
            for name in {**each, **others}:
                gap = _compute_gradient_difference(
                    each.get(name), others.get(name), is_zero=name in zeros
                )
                gradients[name] = max(gap, gradients.get(name, 0.0))
        state = {name: difference(steps.state[name], t) for name, t in expected.state.items()}
        parameter = max(gradients, key=gradients.__getitem__, default="")
        name = max(state, key=state.__getitem__, default="")
        gradient, changed = gradients.get(parameter, 0.0), state.get(name, 0.0)
        return cls(max(outputs, default=0.0), gradient, parameter, changed, name)

    @property
    def largest(self) -> float:
        return max(self.output, self.gradient, self.state)


class Rounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that randomly perturbs the last digit of every operator's results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # A generator of its own: the perturbation must not change the model's random numbers.
        self._generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        # Views and in-place results share memory with a tensor that is perturbed already.
        if any(each.alias_info is not None for each in schema_of(func).returns):
            return results
        return pytree.tree_map_only(Tensor, self._perturb_tensor, results)

    def _perturb_tensor(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        # By -1, 0 or 1 in the last digit, at random for each element.
        signs = torch.randint(-1, 2, tensor.shape, generator=self._generator)
        return tensor * (1 + torch.finfo(tensor.dtype).eps * signs.to(tensor.device))


def _compute_gradient_difference(
    got: Tensor | None, expected: Tensor | None, *, is_zero: bool
) -> float:
    """Return the relative difference of two gradients, of which one may be None.

    Args:
        got: the gradient to compare.
        expected: the reference gradient.
        is_zero: whether a missing gradient counts as zeros; otherwise the difference is infinite.
    """
    if got is not None and expected is not None:
        return difference(got, expected)
    present = got if expected is None else expected
    if present is None or not is_zero:
        return math.inf
    return difference(present, torch.zeros_like(present))


def difference(got: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference of elements, relative to the largest element of
    `expected` if that exceeds 1.

    Infinite if shapes differ, or if an element is NaN in one tensor only.

    Args:
        got: the tensor to compare.
        expected: the reference.
    """
    if got.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    # Integers and booleans must be equal. In float64 even booleans can be subtracted.
    exact = not (expected.is_floating_point() or expected.is_complex())
    got, expected = (t.detach().double() if exact else t.detach() for t in (got, expected))
    # Also equal infinities, whose difference is NaN.
    equal = (got == expected) | (got.isnan() & expected.isnan())
    gap = torch.where(equal, 0.0, (got - expected).abs()).max().item()
    # Infinite elements are compared exactly above; as the scale they would hide all other
    # differences.
    scale = 1.0 if exact else max(1.0, expected.abs().nan_to_num(0.0, 0.0).max().item())
    return math.inf if math.isnan(gap) else gap / scale


def _make_optimizer(parameters: Sequence[Tensor]) -> torch.optim.Optimizer | None:
    # Momentum carries errors of the first step's gradients into the second step. Not Adam, which
    # normalizes tiny gradients that differ by rounding only.
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9) if parameters else None


@dataclass
class EagerTraining:
    """Eager training of the user's module.

    Args:
        module: a copy of the module in float64.
        graph: the captured graph, whose outputs are trained.
        calls: leaves of the arguments of each call: one call with the global batch, or one per
            micro-batch if the plan sums the losses of micro-batches.
        trains_loss: whether the backward pass starts from the loss only, instead of every output.
        batch_norm_calls: leaves of the arguments of each micro-batch, if batch norms compute
            statistics per micro-batch.
        shards: number of local batches, each of which is split into micro-batches.
    """

    module: nn.Module
    graph: Graph
    calls: Sequence[Sequence[Any]]
    trains_loss: bool
    batch_norm_calls: Sequence[Sequence[Any]] = ()
    shards: int = 1

    def run(self) -> tuple[TrainedSteps, list[Tensor | None]]:
        """Train for `STEPS` steps.

        Returns:
            The results, and the root gradient of each output: 1 for the loss, and distinct numbers
            for other outputs, so that errors cannot cancel; None if the output requires no
            gradient.
        """
        root_gradients: list[Tensor | None] = []
        outputs, gradients = [], []
        parameters = dict(self.module.named_parameters())
        optimizer = _make_optimizer([p for p in self.module.parameters() if p.requires_grad])
        for _ in range(STEPS):
            self.module.zero_grad()
            with self._with_planned_batch_norms():
                roots = (
                    self._compute_loss_roots()
                    if self.trains_loss
                    else self._select_output_tensors(self.calls[0])
                )
                # The gradients of the first step serve in all steps and for the program.
                root_gradients = root_gradients or _make_root_gradients(self.graph, roots)
                backward(roots, root_gradients)
            # Copies, as an output may be a parameter, which the optimizer changes.
            outputs.append([end.detach().clone() for end in roots])
            gradients_by_name = {
                name: p.grad for name, p in parameters.items() if p.grad is not None
            }
            gradients.append(
                {name: gradient.clone() for name, gradient in gradients_by_name.items()}
            )
            if optimizer is not None:
                optimizer.step()
        state = {**parameters, **dict(self.module.named_buffers())}
        return TrainedSteps(outputs, gradients, state), root_gradients

    @contextmanager
    def _with_planned_batch_norms(self) -> Iterator[None]:
        """Context manager in which batch norms compute statistics per micro-batch, as planned.

        On exit, running statistics have been updated once by each of `batch_norm_calls`.
        """
        if not self.batch_norm_calls:
            yield
            return
        buffers = dict(self.module.named_buffers())
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        with RecordedBatchNorms() as recorded:
            for leaves in self.batch_norm_calls:
                self._select_output_tensors(leaves)
        # The recorded calls have updated the buffers once per micro-batch, as the program does with
        # running statistics only.
        of_batch = self.graph.whole_batch
        once = dict(of_batch.updates).keys() if isinstance(of_batch, WholeBatch) else ()
        statistics = {name: buffer.clone() for name, buffer in buffers.items() if name not in once}
        for name in once:
            buffers[name].copy_(before[name])
        with SplitBatchNorms(len(self.batch_norm_calls), self.shards, recorded.shapes):
            yield
        # The call with the global batch has updated the buffers too.
        for name, updated in statistics.items():
            buffers[name].copy_(updated)

    def _select_output_tensors(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Call the module, and return the tensors among the results.

        Args:
            leaves: leaves of the arguments.

        Raises:
            PlanError: if the number or shapes of the tensors differ from the outputs of the graph.
        """
        args, kwargs = pytree.tree_unflatten(leaves, self.graph.in_spec)
        with EverythingInFloat64(), CastsToFloat64():  # type: ignore[no-untyped-call]
            results = self._call_and_flatten_results(args, kwargs)
        tensors = [leaf for leaf in results if isinstance(leaf, Tensor)]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        captured = [value.shape for value in self.graph.output_values]
        # With micro-batches the graph has the shapes of a micro-batch, but the call may pass the
        # global batch.
        same = len(shapes) == len(captured) if self.trains_loss else shapes == captured
        if not same:
            raise PlanError(
                f"the module returns tensors of shapes {shapes}, but returned tensors of shapes"
                f" {captured} when it was captured\nplan the model with arguments of these shapes"
            )
        return tensors

    def _call_and_flatten_results(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        python = self.graph.python
        if python is None:
            leaves: list[Any] = pytree.tree_leaves(_call_forward(self.module, args, kwargs))
            return leaves
        # Every call starts from the captured Python state.
        tensors = (*self.module.parameters(), *self.module.buffers())
        # A copy of the module with the same tensors, whose attributes the call may change.
        module = copy.deepcopy(self.module, {id(tensor): tensor for tensor in tensors})
        for config in caching_configs(module):
            config.use_cache = False  # As in the captured copy.
        # The module's own copy may be referenced by closures, such as hooks that store features.
        references = OuterReferences(self.module, module, ReachableState(module), follow_ids=True)
        with references.leading_to_copy(), undone_effects(python.capture.changes):
            results = result_leaves(_call_forward(module, args, kwargs))[0]
            self._assign_replaced_buffers(module)
        return results

    def _assign_replaced_buffers(self, module_copy: nn.Module) -> None:
        """Assign the updated buffers of `module_copy`, after a call of the copy, to the module."""
        updated = {buffer.name for buffer, _ in self.graph.updates}
        for name, buffer in module_copy.named_buffers():
            if name in updated:
                owner, _, attribute = name.rpartition(".")
                # Not copied in place: the backward pass may read the former values.
                setattr(self.module.get_submodule(owner), attribute, buffer.detach())

    def _compute_loss_roots(self) -> list[Tensor]:
        loss_index = self.graph.output_values.index(self.graph.loss)
        # One call for each micro-batch whose loss is summed, or a single one.
        return [
            torch.stack(
                [self._select_output_tensors(leaves)[loss_index] for leaves in self.calls]
            ).sum()
        ]


def _call_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # A plan is of `forward`; a `__call__` of the model may pass it other arguments.
    return nn.Module.__call__(module, *args, **kwargs)


def _make_root_gradients(graph: Graph, roots: Sequence[Tensor]) -> list[Tensor | None]:
    root_gradients: list[Tensor | None] = []
    loss = graph.loss
    # With micro-batches the only root is the loss.
    values = list(graph.output_values) if len(roots) == len(graph.output_values) else [loss]
    for value, tensor in zip(values, roots, strict=True):
        start = torch.ones_like(tensor) if value is loss else _make_deterministic_gradient(tensor)
        root_gradients.append(start.detach() if tensor.requires_grad else None)
    return root_gradients


def _make_deterministic_gradient(like: Tensor) -> Tensor:
    """Return sin(1), sin(2), … in the shape and dtype of `like`; exp(i), exp(2i), … if complex."""
    # In float64 whatever the dtype, so that all dtypes get the same angles.
    angles = 1 + torch.arange(like.numel(), dtype=torch.float64).reshape(like.shape)
    circle = torch.polar(torch.ones_like(angles), angles)
    return (circle if like.is_complex() else circle.imag).to(like.dtype)


def backward(roots: Sequence[Tensor], root_gradients: Sequence[Tensor | None]) -> None:
    """Run a backward pass from all roots that require a gradient.

    Args:
        roots: outputs of a forward pass.
        root_gradients: the gradient of each root; None to skip the root.
    """
    pairs = [
        (root, gradient)
        for root, gradient in zip(roots, root_gradients, strict=True)
        if gradient is not None and root.requires_grad
    ]
    if pairs:
        torch.autograd.backward([end for end, _ in pairs], [start for _, start in pairs])


StepFunction = Callable[[Mapping[str, Tensor]], Outcome]
"""Function that runs one step of a program, given parameters and buffers by name."""


def train_program(run: StepFunction, graph: Graph, state: Mapping[str, Tensor]) -> TrainedSteps:
    """Train for `STEPS` steps with the gradients and buffer updates of a program.

    Args:
        run: runs one step of the program.
        graph: the graph of the program.
        state: initial parameters and buffers by name.
    """
    trained = {v.name for v in graph.parameters if v.differentiable}
    trained_state = {
        name: t.detach().clone().requires_grad_(name in trained) for name, t in state.items()
    }
    # Sorted, as the order of a set of names differs between processes.
    optimizer = _make_optimizer([trained_state[name] for name in sorted(trained)])
    outputs, gradients = [], []
    for _ in range(STEPS):
        outcome = run(trained_state)
        outputs.append([leaf.detach() for leaf in outcome.outputs if isinstance(leaf, Tensor)])
        gradients.append(outcome.gradients)
        # An updated parameter is a leaf that requires a gradient, which autograd refuses to change.
        with torch.no_grad():
            for name, value in outcome.updates.items():
                trained_state[name].copy_(value)
        for name in trained:
            trained_state[name].grad = outcome.gradients.get(name)
        if optimizer is not None:
            optimizer.step()
    return TrainedSteps(outputs, gradients, trained_state)


def interpreted(
    graph: Graph,
    micro_batches: Sequence[Sequence[Any]],
    whole_batch_values: Sequence[Mapping[str, Tensor]],
    weight: float,
    root_gradients: Sequence[Tensor | None],
) -> StepFunction:
    """Return a function that runs the graph on one device, operator by operator.

    Args:
        graph: the graph of one micro-batch.
        micro_batches: leaves of the arguments of each micro-batch.
        whole_batch_values: values computed for the global batch that each micro-batch reads, by
            buffer name.
        weight: weight of each micro-batch's loss in the loss of the global batch.
        root_gradients: gradient of each output from which the backward pass starts, or None.
    """

    def run(state: Mapping[str, Tensor]) -> Outcome:
        # Leaves of this step, in which the gradients of its micro-batches accumulate.
        leaves = {name: t.detach().requires_grad_(t.requires_grad) for name, t in state.items()}
        buffers, losses, roots = BufferUpdates(graph, leaves), [], list[Tensor]()
        for leaves_of_micro_batch, values in zip(micro_batches, whole_batch_values, strict=True):
            args, kwargs = pytree.tree_unflatten(list(leaves_of_micro_batch), graph.in_spec)
            current = buffers.values
            results, changed = interpret(graph, current, {**current, **values}, args, kwargs)
            buffers.add(changed.items())
            outputs = zip(graph.outputs, pytree.tree_leaves(results), strict=True)
            roots = [tensor for value, tensor in outputs if isinstance(value, Value)]
            if len(micro_batches) > 1:
                losses.append(roots[graph.output_values.index(graph.loss)] * weight)
        if losses:
            roots = [torch.stack(losses).sum()]
        backward(roots, root_gradients)
        gradients = {name: t.grad for name, t in leaves.items() if t.grad is not None}
        return Outcome(list(roots), gradients, buffers.end_step(), 0.0, ())

    return run
