from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import sample_models as models
from shardwright.core.capture.capture import capture
from shardwright.core.graph.graph import Graph, Value
from shardwright.core.graph.interpreter import interpret
from shardwright.errors import CaptureError

pytestmark = pytest.mark.usefixtures("untried_suggestions")

Outcome = tuple[list[Any], dict[str, Tensor], dict[str, Tensor]]


def in_float64(model: models.Model) -> models.Model:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    net, args, kwargs = model
    args, kwargs = pytree.tree_map_only(Tensor, cast, (args, kwargs))
    return net.double(), args, kwargs


def outcome(net: nn.Module, outputs: Any, updates: dict[str, Tensor]) -> Outcome:
    """Output leaves, gradients of the sum of the differentiable ones, new buffers."""
    leaves = pytree.tree_leaves(outputs)
    scalars = [t for t in leaves if isinstance(t, Tensor) and t.requires_grad and t.ndim == 0]
    many = [t.sum() for t in leaves if isinstance(t, Tensor) and t.requires_grad]
    total = scalars[0] if scalars else sum(many)
    net.zero_grad()
    if isinstance(total, Tensor):
        total.backward()
    gradients = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    return leaves, gradients, updates


def assert_equal(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    """Captures, and compares outputs, gradients and buffers with the module's own."""
    graph = capture(net, args, kwargs)
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    torch.manual_seed(1)
    found = interpret(graph, dict(net.named_parameters()), before, args, kwargs)
    mine = outcome(net, *found)
    torch.manual_seed(1)
    real_args, real_kwargs = pytree.tree_map_only(Tensor, Tensor.clone, (args, kwargs))
    outputs = net(*real_args, **real_kwargs)
    after = {n: b for n, b in net.named_buffers() if not torch.equal(b, before[n])}
    real = outcome(net, outputs, after)
    torch.testing.assert_close(mine, real, rtol=1e-12, atol=1e-12)
    assert set(mine[1]) <= {v.name for v in graph.parameters if v.requires_grad}
    return graph


@pytest.mark.parametrize("name", ["mlp", "network", "resnet", "encoder", "llama", "gpt2", "bert"])
def test_the_graph_gives_the_modules_loss_gradients_and_buffers(name: str) -> None:
    graph = assert_equal(*in_float64(getattr(models, name)()))
    assert graph.loss is not None


def test_a_norm_first_encoder_is_captured() -> None:
    assert_equal(*in_float64(models.encoder(norm_first=True)))


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_dropout_in_training_stays_and_in_evaluation_goes(name: str) -> None:
    net, args, kwargs = getattr(models, name)(dropout=0.1)
    trained = {str(op.target) for op in capture(net, args, kwargs).ops}
    evaluated = {str(op.target) for op in capture(net.eval(), args, kwargs).ops}
    assert "aten.dropout.default" in trained
    assert "aten.dropout.default" not in evaluated


def test_a_model_on_meta_needs_no_memory_and_gives_the_same_graph() -> None:
    net, args, kwargs = models.llama()
    real = capture(net, args, kwargs)
    on_meta = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    assert capture(net.to("meta"), args, on_meta).fingerprint == real.fingerprint


def test_a_graph_runs_on_the_device_of_its_inputs() -> None:
    net, args, kwargs = models.llama()
    graph = capture(net, args, kwargs)
    net.to("meta")
    kwargs = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    outputs, _ = interpret(
        graph, dict(net.named_parameters()), dict(net.named_buffers()), args, kwargs
    )
    assert outputs.loss.is_meta


@pytest.mark.slow
def test_a_70b_llama_is_captured_without_memory_in_seconds() -> None:
    with torch.device("meta"):
        net, args, kwargs = models.llama(
            1, 4096, layers=80, heads=64, kv_heads=8, width=8192, vocabulary=32000
        )
    graph = capture(net, args, kwargs)
    assert sum(value.numel for value in graph.parameters) > 4e10
    assert graph.capture_seconds < 60


def _language_model(config: Any, model: Any) -> models.Model:
    torch.manual_seed(0)
    ids = torch.randint(3, 60, (2, 8))
    return model(config), (), {"input_ids": ids, "labels": ids, "use_cache": False}


def qwen2() -> models.Model:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return _language_model(config, Qwen2ForCausalLM)


def t5() -> models.Model:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return _language_model(config, T5ForConditionalGeneration)


def vit() -> models.Model:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    images = torch.randn(2, 3, 16, 16)
    return (
        ViTForImageClassification(config),
        (),
        {"pixel_values": images, "labels": torch.tensor([0, 1])},
    )


def attention_weights() -> models.Model:
    def forward(net: Any, x: Tensor) -> Tensor:
        y, weights = net.attention(x, x, x)
        return y.sum() + weights.square().sum()

    net = Function(forward)
    net.attention = nn.MultiheadAttention(16, 4)
    return net, (torch.randn(5, 2, 16),), {}


@pytest.mark.parametrize("model", [qwen2, t5, vit, attention_weights])
def test_further_models_give_their_own_loss_and_gradients(model: Any) -> None:
    assert_equal(*in_float64(model()))


def test_capturing_leaves_the_module_as_it_was() -> None:
    net, args, kwargs = models.resnet()
    before = {name: (id(t), t.clone()) for name, t in net.state_dict(keep_vars=True).items()}
    capture(net, args, kwargs)
    for name, tensor in net.state_dict(keep_vars=True).items():
        assert id(tensor) == before[name][0]
        assert torch.equal(tensor, before[name][1])
        assert type(tensor) in (Tensor, nn.Parameter)


def test_the_fingerprint_is_stable_and_tells_models_apart() -> None:
    first, second = capture(*models.gpt2()), capture(*models.gpt2())
    assert first.fingerprint == second.fingerprint
    assert "0x" not in "".join(map(repr, first.ops))
    assert first.fingerprint != capture(*models.gpt2(heads=2)).fingerprint


def test_ambient_modes_do_not_change_the_graph() -> None:
    model = models.mlp()
    plain = capture(*model)
    with torch.no_grad(), torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        assert capture(*model).fingerprint == plain.fingerprint


class Function(nn.Module):
    """A module with a parameter, a buffer and any forward."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.mean = nn.Buffer(torch.zeros(4, dtype=torch.float64))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def x() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(4, 4, dtype=torch.float64)


def column(net: Function, x: Tensor) -> Tensor:
    y = x @ net.weight
    y[:, 0] = 1
    y[y > 0.5] = 2
    return y


def shared(net: Function, x: Tensor) -> Tensor:
    y = x @ net.weight
    z = y
    z += 1
    return y * z


def views(net: Function, x: Tensor) -> tuple[Tensor, ...]:
    y = x @ net.weight
    flat, lower = y.view(-1), y[2:]
    flat.mul_(2)
    y[:2].add_(1)
    y.unsqueeze_(0)
    y.transpose(1, 2)[0, 1].zero_()
    y[0].permute(1, 0)[1].mul_(2)
    y[0].diagonal().add_(1)
    y[0].movedim(0, 1)[2] = 0
    return y, flat, lower


def many_in_place(net: Function, x: Tensor) -> Tensor:
    y = x @ net.weight
    y.div_(3).sub_(0.1).masked_fill_(y > 0.2, 0.0)
    y.scatter_(1, torch.zeros(4, 1, dtype=torch.long), y[:, :1] * 2)
    y.index_fill_(0, torch.tensor([1]), 2.0)
    y.fill_diagonal_(0.5)
    y.pow_(2)
    F.dropout(y, 0.0, True, True)
    return y.relu_()


def row_after_row(net: Function, x: Tensor) -> Tensor:
    out = torch.zeros(4, 4, dtype=x.dtype, device=x.device)
    for i in range(4):
        out[i] = x[i] @ net.weight
    return out


def moving_average(net: Function, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.mean.mul_(0.9).add_((x @ net.weight).mean(0) * 0.1)
    return x @ net.weight + net.mean


def without_gradient(net: Function, x: Tensor) -> Tensor:
    y = x @ net.weight
    with torch.no_grad():
        norm = y.norm() * torch.tensor([1.0, 2, 3, 4], dtype=torch.float64)
    return y * norm + norm


def in_inference_mode(net: Function, x: Tensor) -> Tensor:
    @torch.inference_mode()
    def normalized(y: Tensor) -> Tensor:
        return y / y.norm()

    y = x @ net.weight
    with torch.inference_mode():
        norm = y.norm()
        with torch.inference_mode(False):
            trained = y.relu() @ net.weight
    return trained + norm + normalized(y).clone()


def constants(net: Function, x: Tensor) -> Tensor:
    table = torch.tensor([1.0, 2, 3, 4], device=x.device)
    return x @ net.weight + table + torch.arange(4, device=x.device) + torch.ones(4).double()


def in_lower_precision(net: Function, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x.float(), net.weight.float())
        # Of both dtypes, in place, and of no tensor.
        y = y.relu() @ net.weight.float() * torch.arange(4)
        y = y.add_(x.float()) + x.float().mean()
        return F.softmax(y @ y.T, -1).exp().sum()


def checkpointed(net: Function, x: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    y = x @ net.weight
    y = checkpoint(lambda t: t.relu() @ net.weight, y.clone(), use_reentrant=True)
    return checkpoint(lambda t: t.tanh() @ net.weight, y, use_reentrant=False)


def several_results(net: Function, x: Tensor) -> tuple[Tensor, ...]:
    y = x @ net.weight
    values, indices = y.max(1)
    first, *_ = y.unbind()
    _, last = torch.split(y, [1, 3])
    return values + first, indices, last


def random_in_place(net: Function, x: Tensor) -> Tensor:
    keep = torch.empty_like(x).bernoulli_(0.5)
    return x @ net.weight * keep


@pytest.mark.parametrize(
    "function",
    [
        column,
        shared,
        views,
        many_in_place,
        row_after_row,
        moving_average,
        without_gradient,
        in_inference_mode,
        constants,
        in_lower_precision,
        checkpointed,
        several_results,
        random_in_place,
    ],
)
def test_what_forward_may_do(function: Any) -> None:
    graph = assert_equal(Function(function), (x(),), {})
    for op in graph.ops:
        schema = getattr(op.target, "_schema", None)
        assert schema is None or not schema.is_mutable, op


def test_nested_inputs_and_outputs_keep_their_structure() -> None:
    def forward(net: Function, pair: Any, *, options: Any, flag: bool) -> Any:
        y = pair[0] @ net.weight if flag else pair[1]
        return {"y": [y, 3], "x": (options["scale"], None)}

    scale = torch.ones(4, dtype=torch.float64)
    graph = assert_equal(
        Function(forward), ([x(), x()],), {"options": {"scale": scale}, "flag": True}
    )
    assert [leaf for leaf in graph.inputs if not isinstance(leaf, Value)] == [True]
    names = [value.name for value in graph.input_values]
    assert names == ["args[0][0]", "args[0][1]", "options['scale']"]
    assert graph.outputs[1] == 3


def test_one_tensor_given_twice_is_two_inputs() -> None:
    net, args, kwargs = models.llama()
    assert kwargs["input_ids"] is kwargs["labels"]
    names = [value.name for value in capture(net, args, kwargs).input_values]
    assert names == ["input_ids", "labels"]


def test_an_input_that_is_changed_in_place_is_refused_with_the_line() -> None:
    def forward(net: Function, x: Tensor) -> Tensor:
        x.add_(1)
        return x @ net.weight

    with pytest.raises(CaptureError, match=r"(?s)x\.add_\(1\).*changes an input.*clone"):
        capture(Function(forward), (x(),), {})


def test_a_copy_of_an_input_may_be_changed_in_place() -> None:
    def forward(net: Function, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0] = 1
        return x @ net.weight

    assert assert_equal(Function(forward), (x(),), {}).updates == ()


def test_tied_weights_are_one_value() -> None:
    graph = assert_equal(*in_float64(models.gpt2()))
    assert graph.tied == {"lm_head.weight": "transformer.wte.weight"}
    assert [v.name for v in graph.parameters].count("transformer.wte.weight") == 1
    assert "lm_head.weight" not in {v.name for v in graph.parameters}


def test_a_frozen_parameter_has_no_gradient() -> None:
    net, args, kwargs = in_float64(models.mlp())
    net.layers[0].weight.requires_grad_(False)  # type: ignore[index, union-attr, operator]
    graph = assert_equal(net, args, kwargs)
    frozen = next(v for v in graph.parameters if v.name == "layers.0.weight")
    assert not frozen.requires_grad
    assert not graph.by_name["layers.0"].output.requires_grad
    assert graph.by_name["layers.0.bias"].output.requires_grad


def test_an_input_may_be_called_like_a_python_function_where_buffers_are_updated() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    graph = capture(net, (torch.randn(6, 4),))
    assert [value.name for value in graph.input_values] == ["input"]
    assert len(graph.updates) == 3


def test_actions_that_are_drawn_and_scored_are_captured() -> None:
    def policy_gradient(net: nn.Module, x: Tensor) -> Tensor:
        actions = torch.distributions.Categorical(logits=net.linear(x))  # type: ignore[operator]
        drawn = actions.sample()  # type: ignore[no-untyped-call]
        reward = (drawn == 0).float()
        return -(actions.log_prob(drawn) * (reward - reward.mean())).mean()  # type: ignore[no-untyped-call]

    net = Function(policy_gradient)
    net.linear = nn.Linear(8, 4)
    graph = capture(net, (torch.randn(8, 8),))
    assert "aten.multinomial.default" in [str(op.target) for op in graph.ops]
