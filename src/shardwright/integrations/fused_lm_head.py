"""Replace trl's fused language model head with operators that can be captured."""

from __future__ import annotations

from functools import wraps
from inspect import getclosurevars
from types import MethodType
from typing import Any

from torch import Tensor, nn

from shardwright.errors import PlanError

SUPPORTED_OUTPUTS = {"log_probs", "entropy", "is_top1"}
"""Outputs of trl's fused head that the replacement computes, each with one value per token."""


def replace_fused_lm_heads(model: nn.Module) -> None:
    """Replace the `forward` that trl patches into models with one that computes full logits.

    trl's fused head is an autograd function with its own backward pass, which cannot be captured.

    Raises:
        PlanError: if a fused head computes outputs that the replacement does not support.
    """
    for module in model.modules():
        forward: Any = vars(module).get("forward")
        # trl patches the instance; its function has an argument of this name, and its options are
        # nonlocal variables.
        if "fused_lm_head" in getattr(getattr(forward, "__code__", None), "co_varnames", ()):
            options = getclosurevars(forward.__func__).nonlocals
            unsupported = sorted(set(options["outputs"]) - SUPPORTED_OUTPUTS)
            if unsupported or options["cast_lm_head_to_fp32"]:
                raise PlanError(
                    f"the fused language model head of `trl` in {type(module).__name__} computes"
                    f" {', '.join(unsupported) or 'in float32'}, which Shardwright cannot replace\n"
                    "use a trainer of `trl` whose loss needs only the outputs of `SFTTrainer`"
                )
            module.forward = _make_forward_with_logits(module, options["temperature"])


def _make_forward_with_logits(model: nn.Module, temperature: float) -> MethodType:
    from trl.trainer.utils import FusedCausalLMOutput

    original = type(model).forward

    @wraps(original)
    def forward(self: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return original(self, *args, **kwargs)
        # The original computes no loss without these arguments; it is computed below.
        labels, shift_labels = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
        kwargs.pop("num_items_in_batch", None)
        outputs = original(self, *args, **kwargs)
        logits = outputs.logits.float() / temperature
        # Without shifted labels, the logits of position i predict label i + 1.
        if shift_labels is None:
            logits, shift_labels = logits[:, :-1], labels[:, 1:]
        mask = shift_labels != -100

        def mask_out(values: Tensor) -> Tensor:
            return values.masked_fill(~mask, 0)

        all_log_probs = logits.log_softmax(-1)
        # The label -100 is not a valid index; its log probability is masked out.
        label_index = shift_labels.clamp(min=0).unsqueeze(-1)
        log_probs = mask_out(all_log_probs.gather(-1, label_index).squeeze(-1))
        return FusedCausalLMOutput(
            # At least 1, so that a batch without labels has a loss of 0 instead of NaN.
            loss=-log_probs.sum() / mask.sum().clamp(min=1),
            log_probs=log_probs,
            entropy=mask_out(-(all_log_probs.exp() * all_log_probs).sum(-1)),
            is_top1=mask_out(logits.argmax(-1) == shift_labels),
            label_mask=mask,
            aux_loss=getattr(outputs, "aux_loss", None),
        )

    return MethodType(forward, model)
