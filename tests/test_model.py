"""The transformer, its cache and its files."""

import pytest
import torch

from cache import GROWTH, KVCache
from extras.hf import load_model, save_model
from logprobs import token_logprobs
from model import Transformer, tiny_config

SMALL = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=64)


@pytest.mark.parametrize("tied", (False, True))
def test_a_saved_model_opens_in_transformers_with_the_same_logits(tmp_path, tied):
    from transformers import LlamaForCausalLM
    model = Transformer(tiny_config(**SMALL, tie_word_embeddings=tied), seed=3)
    save_model(model, tmp_path)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.randint(50, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (model.logits(model(tokens)) - theirs(tokens).logits).abs().max() < 1e-5


@pytest.mark.parametrize("tied", (False, True))
def test_loading_gives_back_what_was_saved(tmp_path, tied):
    model = Transformer(tiny_config(**SMALL, tie_word_embeddings=tied), seed=3)
    save_model(model, tmp_path)
    again = load_model(tmp_path)
    assert {name: getattr(again.config, name) for name in SMALL} == SMALL
    for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_cached_turns_of_rows_of_unequal_length_equal_the_full_forward():
    """Three turns are fed to two dialogues: (5, 2), then (1, 4), then (3, 3) tokens; the shorter row of
    each is padded.
    """
    model = Transformer(tiny_config(**SMALL), seed=4).double()
    generator = torch.Generator().manual_seed(0)
    dialogues = [torch.randint(50, (9,), generator=generator) for _ in range(2)]
    full = [model(dialogue[None])[0] for dialogue in dialogues]
    cache, at = KVCache(model.config, 2, dtype=torch.float64), [0, 0]
    for counts in ([5, 2], [1, 4], [3, 3]):
        pieces = [dialogue[a:a + n] for dialogue, a, n in zip(dialogues, at, counts)]
        padded = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True, padding_value=7)
        hidden = model(padded, cache, torch.tensor(counts))
        for row, n in enumerate(counts):
            assert torch.allclose(hidden[row, :n], full[row][at[row]:at[row] + n], atol=1e-12)
            at[row] += n


def test_dropping_a_row_leaves_the_others_untouched():
    model = Transformer(tiny_config(**SMALL), seed=4).double()
    tokens = torch.randint(50, (3, 6), generator=torch.Generator().manual_seed(1))
    cache = KVCache(model.config, 3, dtype=torch.float64)
    model(tokens[:, :4], cache, torch.tensor([4, 4, 4]))
    cache.keep(torch.tensor([0, 2]))
    hidden = model(tokens[[0, 2], 4:], cache, torch.tensor([2, 2]))
    assert torch.allclose(hidden, model(tokens[[0, 2]])[:, 4:], atol=1e-12)


def test_a_cache_grows_and_keeps_what_it_holds():
    model = Transformer(tiny_config(**SMALL), seed=4).double()
    tokens = torch.randint(50, (1, 40), generator=torch.Generator().manual_seed(1))
    cache = KVCache(model.config, 1, dtype=torch.float64)
    pieces = [model(tokens[:, t:t + 1], cache, torch.tensor([1])) for t in range(40)]
    assert torch.allclose(torch.cat(pieces, 1), model(tokens), atol=1e-12)
    assert 40 <= cache.capacity <= 40 + GROWTH


def test_token_logprobs_speak_about_the_token_at_their_index():
    """logprobs[b, t] is log p(tokens[b, t] | tokens[b, :t]), compared with one softmax at a time."""
    model = Transformer(tiny_config(**SMALL), seed=5).double()
    tokens = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([[0, 1, 1, 0, 1, 1], [0, 0, 1, 1, 0, 0]])
    logprobs = token_logprobs(model, tokens, mask, temperature=0.7)
    for b in range(2):
        for t in range(6):
            expected = 0.0
            if mask[b, t]:
                logits = model.logits(model(tokens[b:b + 1, :t])[0, -1])
                expected = (logits / 0.7).log_softmax(-1)[tokens[b, t]].item()
            assert logprobs[b, t].item() == pytest.approx(expected, abs=1e-10)


def test_padding_on_the_right_changes_nothing():
    model = Transformer(tiny_config(**SMALL), seed=5).double()
    tokens = torch.randint(50, (1, 5), generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([[0, 1, 1, 1, 1]])
    padded, padded_mask = torch.cat([tokens, tokens[:, -1:].expand(1, 3)],
                                    1), torch.tensor([[0, 1, 1, 1, 1, 0, 0, 0]])
    assert torch.allclose(token_logprobs(model, tokens, mask),
                          token_logprobs(model, padded, padded_mask)[:, :5], atol=1e-12)
