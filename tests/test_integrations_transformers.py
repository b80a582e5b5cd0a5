"""Hugging Face Transformers: the conformance test, four models and mistakes, on two ranks."""

import copy
import importlib.util
import io

import pytest
import ranks
import torch

from fp4comm import transport

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="needs pip install 'transformers>=5.20'",
)


def test_models_with_their_experts_on_two_ranks():
    runs = ranks.torch_ranks(2, "transformers_models.py")
    ranks.passed(*runs)
    for kind in ("Mixtral", "Qwen3Moe", "DeepseekV3", "GptOss"):
        for run in runs:
            assert f"{kind} bf16 right" in run.stdout, ranks.report(run)
            assert f"{kind} mxfp4 right" in run.stdout, ranks.report(run)


def mixtral(dtype=torch.bfloat16, config=None):
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return MixtralForCausalLM(config or MixtralConfig(**sizes, **heads)).to(dtype)


def test_a_model_that_is_wrong_on_one_rank_is_the_same_error_on_all():
    from fp4comm.integrations.transformers import shard_experts

    models = [mixtral(), mixtral(torch.float64)]

    def on_rank(t):
        with pytest.raises(TypeError, match=r"^rank 1 of 2: model: expected experts in bfloat16"):
            shard_experts(models[t.rank], t)

    transport.run_local(2, on_rank, timeout_s=30)


def test_layers_that_share_weights_still_do_and_copies_of_a_model_work():
    from fp4comm.integrations.transformers import shard_experts

    model = mixtral()
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.gate_up_proj = first.gate_up_proj
    shard_experts(model, transport.open("local"))
    assert second.gate_up_proj is first.gate_up_proj
    assert second.down_proj is not first.down_proj
    ids = torch.arange(6)[None]
    assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)


def test_a_model_of_the_same_config_stays_whole():
    from fp4comm.integrations.transformers import shard_experts

    whole, ids = mixtral(), torch.arange(6)[None]
    before = whole(ids).logits
    sharded = shard_experts(mixtral(config=whole.config), transport.open("local"))
    sent = sharded(ids).logits
    for other in (whole, mixtral(config=whole.config)):
        assert torch.equal(other(ids).logits, before)
    whole.set_experts_implementation("eager")
    assert torch.equal(sharded(ids).logits, sent)
    assert not torch.equal(sent, before)


def test_a_sharded_model_is_saved_as_its_state():
    from fp4comm.integrations.transformers import shard_experts

    model, other, ids = mixtral(), mixtral(), torch.arange(6)[None]
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    for each in (model, other):
        shard_experts(each, transport.open("local"))
    with pytest.raises(TypeError, match=r"AllToAll: expected to stay .*save state_dict\(\)"):
        torch.save(model, io.BytesIO())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(ids).logits, model(ids).logits)
