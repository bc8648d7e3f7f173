"""Token-exact dialogues."""

import pytest

from chat import END, RANKS, USER, tiny_chat
from config import UserError
from extras.tokenizer import build_ranks, tokenizer_corpus
from task_math import TASK

TEXTS = ["how many apples does Tom have now?", "4, no wait, 5 more books", "7 + 5 = 12. #### 12", "",
         " two  spaces ", "Grüße, 你好 🙂", "a\nb\tc\r\n", "1234567 and 0.5 and $3,000", "\x00\x01"]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encoding_and_decoding(chat, text):
    assert chat.decode(chat.encode(text)) == text.strip()


def test_a_small_number_is_one_token_wherever_it_stands(chat):
    for n in range(100):
        token, = chat.encode(str(n))
        assert token in chat.encode(f"Tom finds {n} more apples.")


def test_control_tokens_typed_by_a_user_stay_text(chat):
    for text in (END, f"hello {USER} {END}", "<|assistant|>"):
        ids = chat.encode(text)
        assert not set(ids) & chat.stop_ids
        assert chat.decode(ids) == text


def test_all_256_bytes_are_tokens(chat):
    """Otherwise tiktoken panics in Rust on bytes that it cannot encode."""
    for byte in range(256):
        assert chat.encode(bytes([byte]).decode("latin-1"))


def test_half_a_character_decodes_to_the_replacement_character(chat):
    assert "\ufffd" in chat.decode(chat.encode("🙂")[:-1])


def test_the_action_mask_of_a_two_turn_dialogue_by_hand(chat):
    """User tokens and format 0, what the assistant says and its end-of-turn 1."""
    ids, mask = chat.render([{"role": "user", "content": "hi, how many?"},
                             {"role": "assistant", "content": "How many at first?"},
                             {"role": "user", "content": "it's 5"},
                             {"role": "assistant", "content": "#### 5"}])
    #              <user>  hi  ,  how many ?  <end> <assistant>  How many at first ?  <end>
    assert mask == [0,     0,  0, 0,  0,   0, 0,    0,           1,  1,   1, 1,    1, 1,
                    0, 0, 0, 0, 0, 1, 1, 1]
    #              <user> it's 5 <end> <assistant>  #### 5 <end>
    assert len(ids) == len(mask)


def test_ids_of_turn_k_are_a_literal_prefix_of_turn_k_plus_1(chat):
    texts = ["a question", "An answer?", "more", "Another.", "thanks", "Bye."]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    whole = chat.render(messages)[0]
    for k in range(1, len(messages)):
        ids = chat.render(messages[:k])[0]
        assert whole[:len(ids)] == ids


def test_turns_built_one_by_one_equal_the_rendered_dialogue(chat):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "B."},
                {"role": "user", "content": "c"}]
    ids = chat.open("a") + chat.encode("B.") + [chat.end]
    assert ids + chat.extend(ids[-1], "c") == chat.render(messages)[0]


def test_a_cut_reply_gets_the_end_of_turn_it_lacks(chat):
    assert chat.extend(chat.encode("cut")[-1], "c") == [chat.end, *chat.extend(chat.end, "c")]


@pytest.mark.parametrize("roles", (["assistant"], ["user", "user"], ["user", "assistant", "assistant"]))
def test_roles_that_do_not_take_turns_are_refused(chat, roles):
    with pytest.raises(ValueError, match="take turns"):
        chat.render([{"role": role, "content": "x"} for role in roles])


def test_the_committed_ranks_are_what_the_documented_command_builds(tmp_path, chat):
    build_ranks(tokenizer_corpus(TASK), tmp_path / "ranks")
    assert (tmp_path / "ranks").read_bytes() == RANKS.read_bytes()
    assert tiny_chat(tmp_path / "ranks").encode("Tom finds 5") == chat.encode("Tom finds 5")


@pytest.mark.parametrize("content", ("", "YQ== 0\n", "no base64\n", "a\n", "\u00e9 1\n"))
def test_a_file_that_is_no_vocabulary_is_refused_by_name(tmp_path, content):
    (tmp_path / "ranks").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match="ranks is not a tokenizer"):
        tiny_chat(tmp_path / "ranks")
