"""Models whose pages would not be a function of their tokens are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

import kvwarehouse as kvw

pytest.importorskip("torch", reason="needs torch: make test-engines installs it")
pytest.importorskip("transformers", reason="needs transformers: make test-engines installs it")

from kvwarehouse_connectors.transformers import support
from kvwarehouse_connectors.transformers.support import (
    observe,
    require_supported,
    require_unchanged,
    with_cache,
)

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def made(transformers: Any, family: str, **more: Any) -> Any:
    config = getattr(transformers, f"{family}Config")(**SMALL, **more)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def test_sliding_window_is_refused_with_its_layer(transformers: Any) -> None:
    model = made(transformers, "Mistral", sliding_window=16)
    with pytest.raises(kvw.UsageError, match="MistralForCausalLM has a DynamicSlidingWindowLayer"):
        require_supported(model)


def test_recurrent_state_is_refused_with_its_layer(transformers: Any) -> None:
    model = made(
        transformers,
        "Qwen3Next",
        layer_types=["linear_attention", "full_attention"],
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    with pytest.raises(kvw.UsageError, match="LinearAttentionLayer in layer 0"):
        require_supported(model)


@pytest.mark.parametrize("version", ["4.57.1", "5.15.9"])
def test_library_is_refused_when_its_caches_do_not_tell_unsafe_models(
    transformers: Any, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 5.0 to 5.4 a Qwen3-Next was taken for a model that keeps keys in each layer."""
    model = made(transformers, "Llama")
    monkeypatch.setattr(support.transformers, "__version__", version)
    with pytest.raises(kvw.UsageError, match=rf"transformers {version} is too old") as refused:
        require_supported(model)
    assert refused.value.code == "unsupported_version"


def test_encoder_decoder_is_refused(transformers: Any) -> None:
    config = transformers.T5Config(vocab_size=64, d_model=32, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(kvw.UsageError, match="T5ForConditionalGeneration is an encoder-decoder"):
        require_supported(transformers.T5ForConditionalGeneration(config).eval())


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_moves_with_the_prompt_is_refused(transformers: Any, rope_type: str) -> None:
    model = made(transformers, "Llama")
    model.config.rope_parameters = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(kvw.UsageError, match=f'rope_type "{rope_type}"'):
        require_supported(model)


def test_body_without_a_head_is_refused(transformers: Any) -> None:
    with pytest.raises(kvw.UsageError, match="LlamaModel is no causal LM"):
        require_supported(transformers.LlamaModel(transformers.LlamaConfig(**SMALL)).eval())


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(kvw.UsageError, match=r"str is not a transformers\.PreTrainedModel"):
        require_supported("gpt2")


def test_cache_is_handed_over_under_the_name_that_the_model_takes() -> None:
    class Before:
        def forward(self, past_key_values: Any = None, **more: Any) -> None: ...

    class Since:
        def forward(self, cache: Any = None, **more: Any) -> None: ...

    assert with_cache(Before(), 7) == {"past_key_values": 7}
    assert with_cache(Since(), 7) == {"cache": 7}


@pytest.mark.filterwarnings("error::FutureWarning")
def test_nothing_deprecated_is_asked_of_the_library(transformers: Any) -> None:
    observe(made(transformers, "Llama"))


def test_training_mode_is_refused(transformers: Any) -> None:
    with pytest.raises(kvw.UsageError, match=r"call model.eval\(\)"):
        require_supported(made(transformers, "Llama").train())


def test_adapters_are_refused(transformers: Any) -> None:
    model = made(transformers, "Llama")
    model._hf_peft_config_loaded = True
    with pytest.raises(kvw.UsageError, match="adapters loaded"):
        require_supported(model)


def inject(torch: Any, model: Any, kind: str) -> None:
    """A contract model of peft, which is not installed here: get_peft_model and
    PeftModel.from_pretrained put a module of their own in the place of a layer, with the layer
    inside, and set peft_config on the model. They leave _hf_peft_config_loaded alone."""

    class Layer(torch.nn.Module):
        def __init__(self, base_layer: Any) -> None:
            super().__init__()
            self.base_layer = base_layer
            self.lora = torch.nn.Linear(base_layer.in_features, base_layer.out_features, bias=False)

        def forward(self, states: Any) -> Any:
            return self.base_layer(states) + self.lora(states)

    Layer.__module__ = "peft.tuners.lora.layer"

    class CustomLayer(Layer):
        """A user's own, of peft's base class."""

    attention = model.model.layers[1].self_attn
    attention.v_proj = {"peft's": Layer, "custom": CustomLayer}[kind](attention.v_proj).eval()
    model.peft_config = {"default": object()}


@pytest.mark.parametrize("kind", ["peft's", "custom"])
def test_adapters_that_peft_put_into_the_model_are_refused(
    torch: Any, transformers: Any, kind: str
) -> None:
    """The wrapped model, as get_base_model() gives it, was taken for the model of the checkpoint:
    KV of the adapter was stored as the model's own."""
    model = made(transformers, "Llama")
    require_unchanged(model)
    inject(torch, model, kind)
    for refuses in (require_supported, require_unchanged):
        with pytest.raises(kvw.UsageError, match=r"adapters loaded \((Custom)?Layer\).*merge them"):
            refuses(model)


def test_wrapper_of_peft_is_refused_for_its_adapters(torch: Any, transformers: Any) -> None:
    """It said "pass the model itself", which has the adapters too."""

    class PeftModelForCausalLM(torch.nn.Module):
        """A contract model of peft's."""

        def __init__(self, base_model: Any) -> None:
            super().__init__()
            self.base_model = base_model

    PeftModelForCausalLM.__module__ = "peft.peft_model"
    with pytest.raises(kvw.UsageError, match="PeftModelForCausalLM has adapters loaded"):
        require_supported(PeftModelForCausalLM(made(transformers, "Llama")).eval())


def test_model_with_merged_adapters_is_supported(torch: Any, transformers: Any) -> None:
    """merge_and_unload takes its modules out again; older versions leave peft_config."""
    model = made(transformers, "Llama")
    inject(torch, model, "peft's")
    attention = model.model.layers[1].self_attn
    attention.v_proj = attention.v_proj.base_layer
    require_supported(model)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Olmo2"])
def test_plain_families_are_supported_and_their_heads_are_found(
    transformers: Any, family: str
) -> None:
    model = made(transformers, family, head_dim=16)
    require_supported(model)
    assert observe(model).heads == ((2, 16, 2, 16),) * 2


def test_keys_and_values_of_different_size_are_found(transformers: Any) -> None:
    model = made(
        transformers,
        "DeepseekV3",
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=2,
    )
    require_supported(model)
    assert observe(model).heads == ((1, 16, 1, 8),) * 2  # it caches the compressed latent
