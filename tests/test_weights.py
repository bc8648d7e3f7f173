"""Hugging Face checkpoints in and out: logits of every family, against transformers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (AutoModelForCausalLM, BertConfig, Gemma3Config, Gemma3ForConditionalGeneration,
                          Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config)

from cache import KVCache
from config import UserError
from extras.checkpoint import load_checkpoint, save_checkpoint
from extras.hf import load_model, save_model
from extras.lora import Adapter, add_adapters, reference_of
from logprobs import token_logprobs
from model import Transformer, trainable

SMALL = dict(vocab_size=90, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, head_dim=12, max_position_embeddings=128, bos_token_id=None,
             eos_token_id=None, pad_token_id=None)
SLIDING = dict(use_sliding_window=True, sliding_window=6, max_window_layers=2)
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
GEMMA_ROPE = {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
              "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "llama, tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama, biases": LlamaConfig(**SMALL, attention_bias=True),
    "llama 3": LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "llama, linear": LlamaConfig(**SMALL,
                                 rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "llama, every query its key": LlamaConfig(**SMALL | {"num_key_value_heads": 4}),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen2, sliding": Qwen2Config(**SMALL, **SLIDING),
    "qwen3": Qwen3Config(**SMALL),
    "qwen3, biases, sliding": Qwen3Config(**SMALL, attention_bias=True, **SLIDING),
    "gemma3": Gemma3TextConfig(**SMALL, sliding_window=6, query_pre_attn_scalar=20,
                               rope_parameters=GEMMA_ROPE,
                               layer_types=["sliding_attention", "sliding_attention", "full_attention",
                                            "sliding_attention"]),
    "gemma3, soft-capped": Gemma3TextConfig(**SMALL, sliding_window=6, final_logit_softcapping=0.5),
}


@pytest.fixture(params=CONFIGS, scope="module")
def pair(request, tmp_path_factory):
    """A random checkpoint of transformers and what we load from it."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(CONFIGS[request.param]).eval()
    for parameter in theirs.parameters():           # norms and biases start as ones and zeros, all else small
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() == 1 else 0.1)
    folder = tmp_path_factory.mktemp("theirs")
    theirs.save_pretrained(folder)
    return theirs, load_model(folder)


def tokens_and_logits(theirs):
    tokens = torch.randint(90, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return tokens, theirs(tokens).logits


def test_logits_of_a_full_forward_are_those_of_transformers(pair):
    theirs, ours = pair
    tokens, expected = tokens_and_logits(theirs)
    assert (ours.logits(ours(tokens)) - expected).abs().max() < 1e-4
    assert expected.std() > 0.05                                      # or everything would agree


def test_logits_of_cached_ragged_turns_are_those_of_transformers(pair):
    """Row 0 is fed 11, 1, 1 and 20 tokens, row 1 is fed 4, 1, 1 and 7: prefill, two steps, another turn."""
    theirs, ours = pair
    tokens, expected = tokens_and_logits(theirs)
    cache, at = KVCache(ours.config, 2), [0, 0]
    for counts in ([11, 4], [1, 1], [1, 1], [20, 7]):
        pieces = [row[a:a + n] for row, a, n in zip(tokens, at, counts)]
        padded = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True)
        with torch.no_grad():
            logits = ours.logits(ours(padded, cache, torch.tensor(counts)))
        for row, n in enumerate(counts):
            assert (logits[row, :n] - expected[row, at[row]:at[row] + n]).abs().max() < 1e-4
            at[row] += n


def test_a_saved_model_opens_in_transformers_and_here_with_the_same_logits(pair, tmp_path):
    theirs, ours = pair
    tokens, expected = tokens_and_logits(theirs)
    save_model(ours, tmp_path)
    reloaded = load_model(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        assert (again(tokens).logits - expected).abs().max() < 1e-4
        assert torch.equal(reloaded.logits(reloaded(tokens)), ours.logits(ours(tokens)))


def test_sharded_weights_load(tmp_path):
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(CONFIGS["qwen2"]).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tokens, expected = tokens_and_logits(theirs)
    ours = load_model(tmp_path)
    assert (ours.logits(ours(tokens)) - expected).abs().max() < 1e-4


def test_of_a_multimodal_gemma_the_language_model_is_loaded_and_said_so(tmp_path, capsys):
    torch.manual_seed(0)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                  image_size=28, patch_size=14)
    config = Gemma3Config(text_config=CONFIGS["gemma3"].to_dict(), vision_config=vision,
                          mm_tokens_per_image=4)
    theirs = Gemma3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    tokens, expected = tokens_and_logits(theirs)
    ours = load_model(tmp_path)
    assert "only its language model is loaded" in capsys.readouterr().out
    assert (ours.logits(ours(tokens)) - expected).abs().max() < 1e-4


def test_weights_load_in_bf16_when_asked(tmp_path):
    AutoModelForCausalLM.from_config(CONFIGS["gemma3"]).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.logits(model(torch.tensor([[1, 2]]))).dtype == torch.float32


BERT = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                  intermediate_size=32).to_json_string()


def llama(**options):
    return json.dumps(LlamaConfig(**SMALL).to_dict() | options)


@pytest.mark.parametrize("config, message", [
    (None, "no config.json"),
    ("{", "no configuration"), ("[]", "no configuration"), ("{}", "no configuration"),
    (BERT, "bert models are not supported, only llama, qwen2, qwen3, gemma3_text"),
    (llama(hidden_act="relu"), "the activation relu"), (llama(mlp_bias=True), "mlp_bias"),
    (llama(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}), "yarn rotary scaling"),
    (llama(num_key_value_heads=3), "4 query heads, 3 key heads"), (llama(head_dim=7), "head_dim.*=7"),
    (llama(num_hidden_layers=0), "sizes that fit no model"),
    (Gemma3TextConfig(**SMALL, attn_logit_softcapping=50.0).to_json_string(), "attn_logit_softcapping"),
    (Gemma3TextConfig(**SMALL, use_bidirectional_attention=True).to_json_string(),
     "use_bidirectional_attention"),
    (llama(), "is not a model that loads")])
def test_what_we_do_not_compute_is_refused_by_name_before_any_weight_is_read(tmp_path, config, message):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError, match=message) as error:
        load_model(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("source", ("nowhere", "no where/at all", "missing.gguf", "tests/missing", __file__))
def test_a_path_that_is_no_model_is_refused_without_asking_the_hub(source, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent)
    with pytest.raises(UserError, match="is not a model: no folder, no .gguf file and no id as"):
        load_model(source)


def test_a_checkpoint_that_lacks_weights_is_refused_instead_of_filled_with_noise(tmp_path):
    save_model(Transformer(CONFIGS["llama"]), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="lacks weights: model.layers.1.mlp.up_proj.weight"):
        load_model(tmp_path)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    save_model(Transformer(CONFIGS["llama"]), tmp_path)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(UserError, match="is not a model that loads"):
        load_model(tmp_path)


# Adapters ---------------------------------------------------------------------------------------------------

def adapted(steps):
    """A model with adapters after some steps of AdamW on random tokens, the optimiser, an untrained copy."""
    model = Transformer(CONFIGS["qwen2"], seed=3)
    untrained = Transformer(CONFIGS["qwen2"], seed=3)
    add_adapters(model, rank=2, seed=0)
    optimiser = torch.optim.AdamW(trainable(model), lr=0.05)
    tokens = torch.randint(90, (2, 12), generator=torch.Generator().manual_seed(2))
    for _ in range(steps):
        (-token_logprobs(model, tokens, torch.arange(12).expand(2, -1) > 0).mean()).backward()
        optimiser.step()
        optimiser.zero_grad()
    return model, optimiser, untrained, tokens


def test_adapters_start_as_nothing_and_train_alone():
    model, _, untrained, tokens = adapted(steps=0)
    assert torch.equal(model(tokens), untrained(tokens))
    model, _, untrained, tokens = adapted(steps=3)
    assert (model(tokens) - untrained(tokens)).abs().max() > 0.01
    assert 0 < sum(p.numel() for p in trainable(model)) < sum(p.numel() for p in model.parameters()) / 4
    for name, parameter in untrained.model.layers[0].self_attn.q_proj.named_parameters():
        assert torch.equal(model.model.layers[0].self_attn.q_proj.base.get_parameter(name), parameter)


def test_the_reference_is_the_policy_with_its_adapters_off_and_shares_its_weights():
    model, _, untrained, tokens = adapted(steps=3)
    reference = reference_of(model)
    assert torch.equal(reference(tokens), untrained(tokens))
    assert reference.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()
    assert not any(isinstance(module, Adapter) for module in reference.modules())


def test_without_adapters_the_reference_is_a_copy():
    model = Transformer(CONFIGS["llama, tied"])
    reference = reference_of(model)
    model.lm_head.weight.data += 1
    assert (reference.lm_head.weight - model.lm_head.weight).abs().min() > 0.9
    assert reference.lm_head.weight is reference.model.embed_tokens.weight and not trainable(reference)


def test_a_saved_model_has_its_adapters_merged(tmp_path):
    model, _, _, tokens = adapted(steps=3)
    save_model(model, tmp_path)
    assert torch.allclose(load_model(tmp_path)(tokens), model(tokens), atol=1e-5)


def test_a_checkpoint_holds_the_adapters_alone_and_continues_to_the_bit(tmp_path):
    model, optimiser, *_ = adapted(steps=2)
    save_checkpoint(tmp_path / "checkpoint", 2, model, optimiser)
    again, its_optimiser, *_ = adapted(steps=0)
    assert load_checkpoint(tmp_path / "checkpoint", again, its_optimiser) == 2
    for mine, theirs in zip(trainable(model), trainable(again), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(optimiser.state[mine]["exp_avg"], its_optimiser.state[theirs]["exp_avg"])
    frozen = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in trainable(model))
    assert (tmp_path / "checkpoint").stat().st_size < 4 * frozen
