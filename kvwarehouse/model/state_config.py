"""State-space and linear-attention layers of a config.json: how large their state is.

Stateless; thread-safe. The shapes are those that transformers and vLLM allocate: a recurrent state
per head or channel, and the last inputs of a short convolution (its width less one).
"""

from __future__ import annotations

from kvwarehouse.model.architecture import StateSpace
from kvwarehouse.model.config_fields import ConfigFields


def state_layer(fields: ConfigFields, *, convolution_only: bool = False) -> StateSpace:
    """Raises UsageError where the fields of no known family are there."""
    if convolution_only:
        return _short_convolution(fields)
    if fields.has("linear_num_value_heads"):
        return _delta_net(fields)
    if any(fields.has(name) for name in ("mamba_num_heads", "mamba_n_heads")):
        return _mamba2(fields)
    if fields.text("model_type") == "mamba2":
        return _mamba2(fields)
    return _mamba1(fields)


def _delta_net(fields: ConfigFields) -> StateSpace:
    """Gated delta rule (Qwen3-Next): a matrix of key by value dimension for each value head."""
    key_heads = fields.count("linear_num_key_heads")
    value_heads = fields.count("linear_num_value_heads")
    key_dim = fields.count("linear_key_head_dim")
    value_dim = fields.count("linear_value_head_dim")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    width = fields.count("linear_conv_kernel_dim", default=4)
    return StateSpace(value_heads * key_dim * value_dim, channels * (width - 1), value_heads)


def _mamba2(fields: ConfigFields) -> StateSpace:
    """A matrix of head by state dimension for each head; the convolution runs over the inner
    channels and two groups of state channels."""
    heads = fields.count("mamba_num_heads", "mamba_n_heads", "num_heads")
    head_dim = fields.count("mamba_head_dim", "mamba_d_head", "head_dim", default=64)
    state = fields.count("ssm_state_size", "mamba_d_state", "state_size")
    groups = fields.count("mamba_n_groups", "n_groups", default=1)
    width = fields.count("conv_kernel", "mamba_d_conv", default=4)
    channels = heads * head_dim + 2 * groups * state
    return StateSpace(heads * head_dim * state, channels * (width - 1), heads)


def _mamba1(fields: ConfigFields) -> StateSpace:
    """A state vector for each inner channel."""
    hidden = fields.count("hidden_size", "d_model")
    expand = fields.count("mamba_expand", "expand", default=2)
    inner = fields.count("mamba_intermediate_size", "mamba_d_inner", default=hidden * expand)
    state = fields.count("mamba_d_state", "state_size", default=16)
    width = fields.count("mamba_d_conv", "conv_kernel", default=4)
    return StateSpace(inner * state, inner * (width - 1))


def _short_convolution(fields: ConfigFields) -> StateSpace:
    """Gated short convolutions (LFM2): the last inputs of each hidden channel, nothing more."""
    width = fields.count("conv_L_cache", default=3)
    return StateSpace(fields.count("hidden_size") * width, 0)
