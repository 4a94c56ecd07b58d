"""The character tokenizer and model as transformers loads them again."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.engine.character_tokenizer import make_tokenizer
from configs.errors import SettingsError
from learner.initial_model import make_model

TEXTS = ["abc>", "a b  c", "  two\nlines\n", "3+4=7", 'quote " and \\', "Ünïcødé €", ""]


def test_text_to_tokens_to_text_is_exact(tmp_path: Path) -> None:
    make_tokenizer(TEXTS).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    for text in TEXTS:
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(token_ids) == len(text)
        assert tokenizer.decode(token_ids) == text
        assert tokenizer.decode([*token_ids, tokenizer.eos_token_id], skip_special_tokens=True) == (
            text
        )


def test_turns_are_tokenized_alike_alone_and_together() -> None:
    tokenizer = make_tokenizer(TEXTS)

    together = tokenizer.encode("".join(TEXTS), add_special_tokens=False)

    alone = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    assert together == [token_id for token_ids in alone for token_id in token_ids]


def test_an_unknown_character_has_a_token_too() -> None:
    tokenizer = make_tokenizer(["abc"])

    assert tokenizer.encode("é", add_special_tokens=False) == [tokenizer.unk_token_id]


def test_end_and_padding_are_the_first_tokens_and_differ() -> None:
    tokenizer = make_tokenizer([])

    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_has_the_heads_that_vllm_accepts(tmp_path: Path, tied: bool) -> None:
    tokenizer = make_tokenizer([])
    make_model(tokenizer, layers=2, width=128, tied=tied, seed=1).save_pretrained(tmp_path)

    config = AutoModelForCausalLM.from_pretrained(tmp_path).config

    assert (config.head_dim, config.num_attention_heads, config.num_key_value_heads) == (32, 4, 2)
    assert config.tie_word_embeddings == tied
    assert config.vocab_size == len(tokenizer)
    assert config.eos_token_id == tokenizer.eos_token_id


def test_a_width_without_heads_is_refused() -> None:
    with pytest.raises(SettingsError, match="init_width must be a multiple of 64, got 100"):
        make_model(make_tokenizer([]), layers=1, width=100, tied=True, seed=0)
