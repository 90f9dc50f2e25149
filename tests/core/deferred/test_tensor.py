"""What is built inside `no_init_parameters` has the values that it has without."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sample_models as models
import shardwright as sw
from core.deferred.initialized import FUNCTIONS, Odd, Seeded, layers, one_parameter
from shardwright.core.deferred import Deferred, deferred_attributes, value_of, values_of


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def check_built_alike(build: Callable[[], nn.Module]) -> None:
    """Values, strides and what is drawn next, with and without the context."""
    torch.manual_seed(0)
    wanted = build()
    next_wanted = torch.rand(3)
    torch.manual_seed(0)
    with sw.no_init_parameters():
        net = build()
    found = tensors(net)
    made = values_of(found, lambda name, whole: whole.clone())
    assert torch.equal(torch.rand(3), next_wanted)
    assert found.keys() == tensors(wanted).keys()
    for name, tensor in tensors(wanted).items():
        got = made.get(name, found[name])
        assert torch.equal(got, tensor), name
        assert (got.dtype, got.stride()) == (tensor.dtype, tensor.stride()), name
        assert found[name].requires_grad == tensor.requires_grad
    assert all(isinstance(parameter, Deferred) for parameter in net.parameters())
    attributes = [value_of(tensor) for tensor in deferred_attributes(net)]
    plain = [wanted.plain] if isinstance(wanted, Odd) else []
    for got, tensor in zip(attributes, plain, strict=True):
        assert torch.equal(got, tensor)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_parameter_is_initialized_alike_by(function: Callable[[Tensor], object]) -> None:
    check_built_alike(lambda: one_parameter(function))


@pytest.mark.parametrize("build", [Odd, Seeded, layers])
def test_a_module_is_initialized_alike(build: Callable[[], nn.Module]) -> None:
    check_built_alike(build)


@pytest.mark.parametrize(
    "build", [models.mlp, models.resnet, models.llama, models.gpt2, models.bert]
)
def test_a_model_is_initialized_alike(build: Callable[[], models.Model]) -> None:
    check_built_alike(lambda: build()[0])


def test_a_model_of_another_default_dtype_is_initialized_alike() -> None:
    def build() -> nn.Module:
        torch.set_default_dtype(torch.float64)
        try:
            return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        finally:
            torch.set_default_dtype(torch.float32)

    check_built_alike(build)


def test_parameters_say_that_they_have_no_values_outside_of_the_context_only() -> None:
    with sw.no_init_parameters():
        net = nn.Linear(4, 4)
        assert net.weight.device.type == "cpu"
    assert net.weight.is_meta
    assert net.weight.device.type == "meta"
    assert isinstance(net.weight, nn.Parameter)
    assert repr(net.weight) == "Deferred((4, 4), dtype=torch.float32, requires_grad=True)"


def test_data_is_real_inside_the_context_and_so_is_what_was_made_before() -> None:
    before = nn.Linear(4, 4)
    with sw.no_init_parameters():
        net = nn.Sequential(before, nn.Linear(4, 4))
        data = torch.tensor([1.0, 2.0])
    assert net[0].weight is before.weight
    assert not net[0].weight.is_meta
    assert not data.is_meta


def test_a_context_inside_another_goes_on_with_its_numbers() -> None:
    def build() -> nn.Module:
        first = nn.Linear(4, 4)
        with sw.no_init_parameters():
            second = nn.Linear(4, 4)
        return nn.Sequential(first, second, nn.Linear(4, 4))

    torch.manual_seed(0)
    wanted = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    torch.manual_seed(0)
    with sw.no_init_parameters():
        net = build()
    for got, parameter in zip(sw.materialize(net).parameters(), wanted.parameters(), strict=True):
        assert torch.equal(got, parameter)


@pytest.mark.filterwarnings("ignore:for 0.weight. copying from a non-meta parameter")
def test_copies_casts_moves_and_writes_after_the_context_are_part_of_it() -> None:
    def change(net: nn.Module) -> nn.Module:
        twin = copy.deepcopy(net).to(torch.float64).cpu()
        nn.init.normal_(twin[0].bias)
        twin.load_state_dict({"0.weight": torch.ones(4, 4)}, strict=False)
        return nn.Sequential(net, twin)

    torch.manual_seed(0)
    wanted = change(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    torch.manual_seed(0)
    with sw.no_init_parameters():
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net = change(net)
    made = values_of(tensors(net), lambda name, whole: whole)
    assert made.keys() == tensors(net).keys()
    for name, tensor in tensors(wanted).items():
        assert torch.equal(made[name], tensor), name
        assert made[name].dtype == tensor.dtype


def test_generators_that_were_used_since_stay_where_they_are() -> None:
    torch.manual_seed(0)
    with sw.no_init_parameters():
        net = nn.Linear(4, 4)
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    sw.materialize(net)
    assert torch.equal(torch.rand(3), wanted)


def test_a_second_context_draws_other_numbers() -> None:
    torch.manual_seed(0)
    with sw.no_init_parameters():
        first = nn.Linear(4, 4)
    with sw.no_init_parameters():
        second = nn.Linear(4, 4)
    sw.materialize(second)
    assert not torch.equal(sw.materialize(first).weight, second.weight)


def test_what_another_context_made_may_be_copied() -> None:
    with sw.no_init_parameters():
        first = nn.Linear(4, 4)
    with sw.no_init_parameters():
        second = nn.Linear(4, 4)
        second.load_state_dict(first.state_dict())
    sw.materialize(second)
    assert torch.equal(sw.materialize(first).weight, second.weight)


def test_running_a_model_without_values_says_what_to_do() -> None:
    with sw.no_init_parameters():
        net = nn.Linear(4, 4)
    with pytest.raises(sw.DeferredError, match=r"is uninitialized\ncall `sw\.parallelize`"):
        net(torch.zeros(1, 4))
    with pytest.raises(sw.DeferredError, match=r"cannot save .*\(4, 4\).*is uninitialized"):
        pickle.dumps(net.weight)


def test_random_numbers_into_a_tensor_with_values_are_refused_inside() -> None:
    before = torch.zeros(3)
    with sw.no_init_parameters(), pytest.raises(sw.DeferredError, match=r"aten\.normal_\.default"):
        before.normal_()


def test_a_parameter_made_from_a_tensor_that_never_had_values_is_named() -> None:
    lost = torch.empty(4, 4, device="meta")
    with sw.no_init_parameters():
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with torch.no_grad():
            net[1].weight.copy_(lost)
    with pytest.raises(sw.DeferredError, match=r"'1\.weight' cannot be initialized"):
        sw.materialize(net)


def test_large_data_that_changes_before_it_is_used_is_refused_and_small_data_is_copied() -> None:
    large, small = torch.zeros(600, 600), torch.ones(3)
    with sw.no_init_parameters():
        net = nn.ParameterList([torch.empty(600, 600), torch.empty(3)])
        with torch.no_grad():
            net[0].copy_(large)
            net[1].copy_(small)
    small.zero_()
    assert torch.equal(value_of(net[1]), torch.ones(3))
    assert not value_of(net[0]).any()
    large.fill_(1)
    with pytest.raises(sw.DeferredError, match=r"shape \(600, 600\).*was modified in place"):
        value_of(net[0])


def test_an_operator_without_a_meta_kernel_computes_with_values_but_may_not_write() -> None:
    with torch.library._scoped_library("deferred_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.define("double_(Tensor(a!) x) -> Tensor(a!)")
        library.impl("twice", lambda x: x * 2, "CPU")
        library.impl("double_", lambda x: x.mul_(2), "CPU")
        operators = torch.ops.deferred_test
        with sw.no_init_parameters():
            assert torch.equal(operators.twice(torch.ones(3)), torch.full((3,), 2.0))
            deferred = torch.ones(3)
            assert torch.equal(operators.twice(deferred), torch.full((3,), 2.0))
            with pytest.raises(sw.DeferredError, match=r"deferred_test\.double_.*no meta kernel"):
                operators.double_(deferred)


def test_an_operator_whose_results_lie_otherwise_than_its_meta_kernel_says_is_refused() -> None:
    with torch.library._scoped_library("deferred_test", "FRAGMENT") as library:
        library.define("turned(Tensor x) -> Tensor")
        library.impl("turned", lambda x: x.clone(), "CPU")
        library.impl("turned", lambda x: x.t().contiguous().t(), "Meta")
        with sw.no_init_parameters():
            turned = torch.ops.deferred_test.turned(torch.ones(2, 3))
        with pytest.raises(sw.DeferredError, match=r"strides.*\(3, 1\).*on the CPU, but.*\(1, 2\)"):
            value_of(turned)
