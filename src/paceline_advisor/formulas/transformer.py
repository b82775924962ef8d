"""Costs of a transformer: activations by Korthikanti et al., FLOPs and their utilisation by the papers' counts.

``t`` is the size of tensor parallelism, ``recompute`` what is computed again in the backward pass instead of kept.
"""

from __future__ import annotations

from typing import Literal

Recompute = Literal["none", "selective", "full"]


def attention_factor(heads: int, sequence: int, hidden: int) -> float:
    """5 a s / h: the part of a layer's activations that softmax, its dropout and the product with it keep.

    Source:
        Korthikanti et al., Reducing activation recomputation in large transformer models, arXiv:2205.05198, equation 1.
    """
    return 5 * heads * sequence / hidden


def layer_activation_bytes(
    sequence: int,
    micro_batch: int,
    hidden: int,
    heads: int,
    tensor_parallel: int = 1,
    *,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> float:
    """Bytes of activations that one layer keeps on a device in 16-bit training.

    Source:
        Korthikanti et al., arXiv:2205.05198, table 2.
    """
    unit = sequence * micro_batch * hidden
    if recompute == "full":
        return 2 * unit / (tensor_parallel if sequence_parallel else 1)
    attention = 0.0 if recompute == "selective" else attention_factor(heads, sequence, hidden)
    if sequence_parallel:
        return unit * (34 + attention) / tensor_parallel
    return unit * (10 + (24 + attention) / tensor_parallel)


def activation_bytes(
    sequence: int,
    micro_batch: int,
    hidden: int,
    heads: int,
    layers: int,
    tensor_parallel: int = 1,
    *,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> float:
    """Bytes of activations that all layers keep on the first of the pipeline's devices.

    As many micro-batches are under way there as the pipeline has stages, so that it holds for any number of them.

    Source:
        Korthikanti et al., arXiv:2205.05198, equation 5.
    """
    return layers * layer_activation_bytes(
        *(sequence, micro_batch, hidden, heads, tensor_parallel),
        sequence_parallel=sequence_parallel,
        recompute=recompute,
    )


def selective_recompute_saving(heads: int, sequence: int, hidden: int) -> float:
    """Share of a layer's activations that need not be kept if attention is computed again, in [0, 1).

    Source:
        Korthikanti et al., arXiv:2205.05198, section 5 (GPT-3: 70 %).
    """
    attention = attention_factor(heads, sequence, hidden)
    return attention / (34 + attention)


def selective_recompute_overhead(sequence: int, hidden: int, layers: int = 96, vocabulary: int = 51200) -> float:
    """Share by which computing attention again adds to a step's FLOPs.

    Source:
        Korthikanti et al., arXiv:2205.05198, section 5 and appendix A (GPT-3: 2.7 %).
    """
    one = iteration_flops(1, sequence, hidden, layers, vocabulary)
    return hardware_flops(1, sequence, hidden, layers, vocabulary) / one - 1


def iteration_flops(batch: int, sequence: int, hidden: int, layers: int, vocabulary: int) -> float:
    """FLOPs of the model itself in one iteration of a GPT: forward and backward pass.

    Source:
        Korthikanti et al., arXiv:2205.05198, appendix A.
    """
    return _flops(batch, sequence, hidden, layers, vocabulary, attention=1)


def hardware_flops(batch: int, sequence: int, hidden: int, layers: int, vocabulary: int) -> float:
    """FLOPs that are carried out in one iteration of a GPT with selective recomputation.

    Source:
        Korthikanti et al., arXiv:2205.05198, appendix A.
    """
    return _flops(batch, sequence, hidden, layers, vocabulary, attention=2)


def _flops(batch: int, sequence: int, hidden: int, layers: int, vocabulary: int, *, attention: int) -> float:
    rest = attention * sequence / (6 * hidden) + vocabulary / (12 * hidden * layers)
    return 72 * batch * layers * sequence * hidden**2 * (1 + rest)


def full_recompute_flops(batch: int, sequence: int, hidden: int, layers: int, vocabulary: int) -> float:
    """FLOPs that are carried out in one iteration of a GPT if every layer's forward pass is computed again.

    Source:
        Narayanan et al., Efficient large-scale language model training on GPU clusters, arXiv:2104.04473, equation 3.
    """
    rest = sequence / (6 * hidden) + vocabulary / (16 * layers * hidden)
    return 96 * batch * sequence * layers * hidden**2 * (1 + rest)


def gpt_parameters(hidden: int, layers: int, vocabulary: int = 51200, sequence: int = 2048) -> float:
    """Parameters of a GPT.

    Source:
        Narayanan et al., arXiv:2104.04473, equation 2.
    """
    return 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (vocabulary + sequence) / (12 * layers * hidden))


def flops_per_token(
    parameters: float,
    layers: int = 0,
    heads: int = 0,
    head_size: int = 0,
    sequence: int = 0,
    embedding_parameters: float = 0,
) -> float:
    """FLOPs of training on one token: 6 for each parameter, and attention's 12 · layers · heads · head_size · sequence.

    Args:
        parameters: Number of parameters.
        layers: Number of layers; 0 leaves attention out.
        heads: Attention heads of a layer.
        head_size: Size of a head's queries and keys, and of its values.
        sequence: Tokens in a sequence.
        embedding_parameters: Of these, those that are only looked up. torchtitan leaves them out, PaLM does not.

    Source:
        Chowdhery et al., PaLM, arXiv:2204.02311, appendix B; torchtitan, torchtitan/models/utils.py.
    """
    return 6 * (parameters - embedding_parameters) + 12 * layers * heads * head_size * sequence


def mfu(tokens_per_second: float, flops_per_token: float, peak_flops_per_second: float, devices: int = 1) -> float:
    """Model FLOPs utilisation, in [0, 1]: the model's own FLOPs beside the devices' dense peak.

    Source:
        Chowdhery et al., PaLM, arXiv:2204.02311, appendix B.
    """
    return tokens_per_second * flops_per_token / (peak_flops_per_second * devices)


def training_flops(parameters: float, tokens: float) -> float:
    """FLOPs of training on so many tokens: 6 N D.

    Source:
        Kaplan et al., Scaling laws for neural language models, arXiv:2001.08361, section 2.1.
    """
    return 6 * parameters * tokens


def compute_optimal_tokens(parameters: float, tokens_per_parameter: float = 20) -> float:
    """Tokens that make the best of a budget of FLOPs: about 20 for each parameter.

    Source:
        Hoffmann et al., Training compute-optimal large language models, arXiv:2203.15556, table 3 (67 B: 1.5 T).
    """
    return parameters * tokens_per_parameter


def training_days(
    parameters: float, tokens: float, devices: int, flops_per_second: float, *, recompute: bool = True
) -> float:
    """Days of training at a sustained rate per device: 8 N D with full recomputation, 6 N D without.

    Source:
        Narayanan et al., arXiv:2104.04473, equation 4 (GPT-3 on 1024 A100 at 140 TFLOP/s: 34 days).
    """
    return (8 if recompute else 6) * parameters * tokens / (devices * flops_per_second) / 86400
