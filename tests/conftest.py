"""Shared by all tests: a small untrained model that speaks the embedded tokenizer."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from chat import tiny_chat  # noqa: E402
from model import Transformer, tiny_config  # noqa: E402

torch.set_num_threads(2)


@pytest.fixture(scope="session")
def chat():
    return tiny_chat()


@pytest.fixture
def model(chat):
    """In float64, so that agreement can be asked for to 1e-9."""
    return Transformer(tiny_config(vocab_size=chat.vocab_size, hidden_size=32, intermediate_size=64,
                                   head_dim=8), seed=1).double()
