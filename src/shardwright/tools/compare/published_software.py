"""Select the framework variant of a cluster, the kernel figures and the memory of a published run.

The selection depends on names in the run's row of the data file, not on its measured throughput:
the row names the kernel, and the row or its publication names the framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardwright.core.cost.cluster import Cluster
from shardwright.core.cost.clusters import built_in_clusters, load_cluster
from shardwright.errors import ConfigError
from shardwright.tools.compare.published_rows import PublishedRun


@dataclass(frozen=True)
class Software:
    """Memory of a training framework on a device, where it differs from Shardwright's.

    Args:
        parameter_dtype: dtype in which parameters and optimizer state are stored, `float32` or
            `bfloat16`.
        gradient_bytes: bytes per element of gradients of float32 parameters.
        master_bytes: bytes per element of parameters that the optimizer keeps beside those in the
            dtype of computation.
        moment_bytes: bytes per element of each of Adam's two moments.
        logit_bytes: bytes per local logit that are alive in the backward pass of the loss; None if
            equal to Shardwright's.
        fuses_activations: whether a kernel computes an activation function and the product with its
            result, and saves the inputs of both.
        gathers_again: whether only the shard of an all-gathered input of a linear layer is saved,
            and gathered again in the backward pass.
        frees_outputs: whether a pipeline stage frees the outputs that it has sent, which its
            backward pass does not read.
        defers_gradients: whether FSDP keeps gathered parameters and full gradients of mixtures of
            experts over the micro-batches of a step, as ZeRO-1 does.
        gathers_blocks: whether a block is the unit in which sharded parameters are gathered, as in
            FSDP; else each parameter is gathered by itself, as in DeepSpeed's ZeRO-3.
    """

    parameter_dtype: str = "float32"
    gradient_bytes: int = 4
    master_bytes: int = 4
    moment_bytes: int = 4
    logit_bytes: int | None = None
    fuses_activations: bool = False
    gathers_again: bool = False
    frees_outputs: bool = False
    defers_gradients: bool = False
    gathers_blocks: bool = True


MEGATRON_CORE = Software(
    gradient_bytes=2,
    logit_bytes=6,
    fuses_activations=True,
    gathers_again=True,
    frees_outputs=True,
)
"""Memory settings of NeMo and Megatron-Bridge in their performance recipes.

Gradients are in bfloat16 (`grad_reduce_in_fp32=False`, `grad_sync_dtype: bf16`). The vocabulary-
parallel cross entropy overwrites one float32 copy of the logits with the softmax
(megatron/core/tensor_parallel/cross_entropy.py); their gradient is in bfloat16. Sent outputs are
freed (`deallocate_output_tensor`, megatron/core/pipeline_parallel/schedules.py)."""

MEGATRON_LM = replace(MEGATRON_CORE, gradient_bytes=4, logit_bytes=10)
"""Memory settings of Megatron-LM and MindSpeed-LLM by default.

Gradients of models in bfloat16 are in float32 (`accumulate_allreduce_grads_in_fp32` in
megatron/training/arguments.py). The cross entropy without fusion has two float32 copies beside the
logits in bfloat16."""

INTERN_EVO = Software(gradient_bytes=2, fuses_activations=True)
"""Memory settings of InternEvo: gradients in the dtype of computation
(internlm/solver/optimizer/hybrid_zero_optim.py)."""

NEMOTRON_340B = replace(MEGATRON_CORE, master_bytes=0, moment_bytes=2)
"""Memory settings of NeMo 1 for Nemotron-4 340B: Apex keeps Adam's state in bfloat16
(`optim.dtype: bf16` in nemotron/nemotron4-340b-synth.yaml of NVIDIA/dgxc-benchmarking)."""

MEGATRON_DEEPSPEED = Software(gradient_bytes=6, frees_outputs=True)
"""Memory settings of Megatron-DeepSpeed with pipeline stages.

Gradients in bfloat16 are kept beside their sums in float32 (deepspeed/runtime/bf16_optimizer.py).
Data of sent outputs is freed (deepspeed/runtime/pipe/engine.py, `_exec_forward_pass`)."""

AUTOMODEL = Software(
    parameter_dtype="bfloat16", logit_bytes=6, fuses_activations=True, defers_gradients=True
)
"""Memory settings of NeMo Automodel.

`from_config` builds models in bfloat16; parameters and Adam's state stay in bfloat16. In the loss
of its benchmarks logits, log-probabilities and gradient are in bfloat16 (`fp32_upcast: false`).
FSDP reduces the gradients of mixtures of experts only after the last micro-batch
(`defer_fsdp_grad_sync`), and keeps gathered parameters until then (`reshard_after_forward: false`).
"""

LLM_FOUNDRY = Software(logit_bytes=4)
"""Memory settings of llm-foundry: FlashAttention's cross entropy (`fused_crossentropy`) needs at
most two copies of the bfloat16 logits, and writes their gradient into one of them."""

ALEPH_ALPHA = Software(gradient_bytes=2)
"""Memory settings of Hagemann et al. (arXiv:2311.05610): bfloat16 gradients, inferred from their
runs with 15 billion parameters on a device of 80 GB, which would not fit with float32 gradients."""

# `automodel` comes before `nemo`, a word that names of NeMo Automodel contain too.
SOFTWARE: Mapping[str, Software] = {
    "automodel": AUTOMODEL,
    "megatron-bridge": MEGATRON_CORE,
    "nemotron/readme_340b": NEMOTRON_340B,
    "dgxc-benchmarking": MEGATRON_CORE,
    "nemo": MEGATRON_CORE,
    "bigscience": MEGATRON_DEEPSPEED,
    "megatron-deepspeed": MEGATRON_DEEPSPEED,
    "megatron-lm": MEGATRON_LM,
    "2205.05198": MEGATRON_LM,
    "mindspeed": MEGATRON_LM,
    "modellink": MEGATRON_LM,
    "internevo": INTERN_EVO,
    "llm-foundry": LLM_FOUNDRY,
    "aleph-alpha": ALEPH_ALPHA,
    "2311.05610": ALEPH_ALPHA,
}
"""Memory settings of frameworks, by a word in the row's `framework` or `source`."""

FRAMEWORKS = {
    "automodel": "automodel",
    "megatron-bridge": "nemo",
    "dgxc-benchmarking": "nemo",
    "megatron-core": "nemo",
    "megatron core": "nemo",
    "transformer engine": "nemo",
    "nemo": "nemo",
    "2104.04473 table 2 zero-3": "zero3",
    "2104.04473": "megatron",
    "2205.05198": "megatron",
    # Its own tables (README.md of NVIDIA/Megatron-LM) are with all overlap, others by default not.
    "nvidia/megatron-lm": "nemo",
    "megatron-lm": "megatron_core",
    "mindspeed": "mindspeed",
    "modellink": "mindspeed",
    "llm-foundry": "llm_foundry",
    "torchtitan": "torchtitan",
    "fms-fsdp": "compiled",
    "megatron-deepspeed": "omni_path",
}
"""Suffix of cluster names by framework; the key occurs in the row's `framework` or `source`."""

MACHINES = {
    "pytorch/torchtitan": "grand_teton",
    "2410.06511": "grand_teton",
    "bigscience": "omni_path",
    "aleph-alpha": "hdr",
    "2311.05610": "hdr",
}
"""Suffix of cluster names by the machines of a publication; the key occurs in its `source`."""

MODEL_HARDWARE = "h100"
"""Hardware whose cluster files provide a framework's figures for hardware without such a file."""

FRAMEWORK_FIGURES = (
    *("pointwise_traffic", "overlaps_parameters", "overlaps_products", "overlap_slowdown"),
    *("sends_routed_tokens", "sends_tokens_once", "dispatch_efficiency", "routing_traffic"),
    *("reduction_traffic", "divides_sends", "exchanges_in_turn", "part_overhead"),
    *("gathers_to_recompute", "accumulation_traffic"),
)
"""Device parameters of the framework, independent of the hardware: traffic of fused kernels, and
overlap with communication."""

ATTENTION_FIGURES = ("attention_efficiency", "attention_half", "attention_head_half")
"""Device parameters of attention kernels, valid for all hardware with the same peak rates."""

COMPOSED_NORMS = 14.0
"""`norm_traffic` of norms without a fused kernel: memory traffic relative to the fused kernel.

For each bfloat16 element, float32 operators (cast, square, mean, product, cast, product with the
weight) move 34 bytes in the forward pass and 106 in the backward pass; a fused kernel, 4 and 6."""

EAGER_FIGURES = {"pointwise_traffic": 1.0, "norm_traffic": COMPOSED_NORMS}
"""Device parameters of a framework that compiles by default and ran eagerly, as its row says: the
operators of PyTorch one by one, whose RMSNorm was composed until 2.8."""

EAGER_FRAMEWORKS = ("eager", "transformers", "atorch")
"""Words in a row's `framework` of runs whose operators are those of PyTorch one by one: rows that
say so, and models of Hugging Face `transformers`, whose RMSNorm is composed of operators."""

NODE_DISPATCHERS = ("deepep", "hybridep")
"""Words in a row's `framework` of kernels that send tokens once to a node, which forwards them."""

NODE_DISPATCH_FIGURES = {
    "sends_tokens_once": True,
    "sends_routed_tokens": True,
    "dispatch_efficiency": 0.765,
}
"""Device parameters of such kernels, as in the cluster `h100_automodel`."""

BIAS_BYTES, CLAMP_BYTES, ROUTING_BYTES = 64, 36, 32
"""Bytes that kernels move for each copy of a token, forward and backward.

Bias, for an element of an expert's output: Megatron Core and Automodel multiply the bias by the
weight of the token in float32, add, concatenate the experts and cast, forward 28 (`_apply_bias` in
megatron/core/transformer/moe/experts.py and nemo_automodel/components/moe/layers.py). Clamp, for an
element of the inner width: gate and up are clamped and concatenated by separate kernels, forward 8
for each (megatron/core/fusions/fused_bias_geglu.py). Routing, for an element of the token: what
`routing_traffic` is relative to, 7 reads and writes forward and 9 backward in bfloat16."""

H100_FLASH2 = {
    "attention_efficiency": 0.365,
    "attention_half": 256.0,
    "attention_head_half": 22.0,
}
"""Device parameters for FlashAttention 2 on an H100, as in the cluster `h100_flash2`."""

KERNELS: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "torch": {"a100": {"norm_traffic": COMPOSED_NORMS}},
    "fused": {"a100": {"norm_traffic": COMPOSED_NORMS}},
    "fa1": {
        "a100": {
            "norm_traffic": COMPOSED_NORMS,
            "attention_efficiency": 0.302,
            "attention_half": 0.0,
        },
        "h100": {"attention_efficiency": 0.171, "attention_half": 0.0, "attention_head_half": 0.0},
    },
    "fa2": {"a100": {"norm_traffic": COMPOSED_NORMS}, "h100": H100_FLASH2},
    "fa2rms": {"h100": H100_FLASH2},
}
"""Device parameters that replace the cluster's, by `kernel` or `attention` and by hardware, valid
for all hardware with the same peak rates.

Kernels: attention of PyTorch (`torch`) and with Megatron-LM's softmax (`fused`), FlashAttention 1
and 2, and 2 with a fused RMSNorm (`fa2rms`), as Hagemann et al. (arXiv:2311.05610) name them."""


def cluster_of_run(run: PublishedRun) -> Cluster:
    """Load the cluster of a published run, with the figures of the run's training framework and
    attention kernel.

    Raises:
        ConfigError: if the row's `hardware` is not the name of a cluster.
    """
    try:
        cluster = _load_cluster_with_framework(run)
    except ConfigError as error:
        raise ConfigError(
            f"row {run.id}: cannot load the cluster `hardware`: {error}\n"
            "set `hardware` to the name of a built-in cluster, such as h100"
        ) from None
    framework = (run.framework or "").lower()
    if any(word in framework for word in EAGER_FRAMEWORKS):
        cluster = _with_figures(cluster, EAGER_FIGURES)
    if any(word in framework for word in NODE_DISPATCHERS):
        cluster = _with_figures(cluster, NODE_DISPATCH_FIGURES)
    if run.has_expert_biases:
        moved = BIAS_BYTES * run.hidden + CLAMP_BYTES * run.ffn
        traffic = cluster.device.routing_traffic + moved / (ROUTING_BYTES * run.hidden)
        cluster = _with_figures(cluster, {"routing_traffic": traffic})
    # Rows name the kernel under either key.
    for name in (run.kernel, run.attention):
        cluster = _with_figures(cluster, _kernel_figures(name or "", cluster))
    return cluster


def _kernel_figures(kernel: str, cluster: Cluster) -> Mapping[str, float]:
    """Return the device parameters of `kernel`, measured on hardware with the same peak rates."""
    for hardware, figures in KERNELS.get(kernel, {}).items():
        if load_cluster(hardware).device.rates == cluster.device.rates:
            return figures
    return {}


def _with_figures(cluster: Cluster, figures: Mapping[str, float]) -> Cluster:
    return replace(cluster, device=replace(cluster.device, **figures))  # type: ignore[arg-type]


def software_of_run(run: PublishedRun) -> Software:
    """Return the memory settings of the framework that trained a published run."""
    # The framework that the row names wins over words in its source.
    labels = [label.lower() for label in (run.framework, run.source) if label]
    named = (each for label in labels for word, each in SOFTWARE.items() if word in label)
    gathers_blocks = not any(word in run.source.lower() for word in ("zero-3", "deepspeed"))
    software = next(named, Software(gathers_blocks=gathers_blocks))
    # Models in float16 have gradients in float16, with a scaled loss. Sharded parameters and their
    # gradients are in float32.
    is_half = run.dtype == "fp16" and run.sharded != "parameters"
    return replace(software, gradient_bytes=2) if is_half else software


def _load_cluster_with_framework(run: PublishedRun) -> Cluster:
    variants = built_in_clusters()
    for word, suffix in MACHINES.items():
        # Some frameworks have another optimizer for each dtype.
        for name in (f"{run.hardware}_{suffix}_{run.dtype}", f"{run.hardware}_{suffix}"):
            if word in run.source.lower() and name in variants:
                return load_cluster(name)
    for label in filter(None, (run.framework, run.source)):
        for suffix in (suffix for word, suffix in FRAMEWORKS.items() if word in label.lower()):
            if f"{run.hardware}_{suffix}" in variants:
                return load_cluster(f"{run.hardware}_{suffix}")
            if f"{MODEL_HARDWARE}_{suffix}" in variants:
                return _copy_framework_figures(
                    load_cluster(f"{MODEL_HARDWARE}_{suffix}"), run.hardware
                )
    return load_cluster(run.hardware)


def _copy_framework_figures(variant: Cluster, hardware: str) -> Cluster:
    """Return the cluster of `hardware` with the figures of a training framework.

    `variant` is the cluster of `MODEL_HARDWARE` with this framework. The figures in which it
    differs from the cluster `MODEL_HARDWARE` are copied.
    """
    cluster, plain = load_cluster(hardware), load_cluster(MODEL_HARDWARE).device
    has_equal_rates = cluster.device.rates == plain.rates
    names = (*FRAMEWORK_FIGURES, *(ATTENTION_FIGURES if has_equal_rates else ()))
    figures = {name: getattr(variant.device, name) for name in names}
    changed = {name: value for name, value in figures.items() if value != getattr(plain, name)}
    return replace(cluster, device=replace(cluster.device, **changed), software=variant.software)
