"""Text and tokens of character models and chat models."""

from __future__ import annotations

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from actors.engine.tokenizer import ModelTokenizer
from configs.errors import SettingsError

SPECIAL = ["<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(folder, *, template=None, end="<|im_end|>"):
    letters = "abcdefghijklmnopqrstuvwxyz0123456789=;[]*+- \n"
    vocabulary = {token: number for number, token in enumerate([*letters, "?", *SPECIAL])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="?",
        eos_token=end,
        additional_special_tokens=SPECIAL,
        chat_template=template,
    )
    fast.save_pretrained(str(folder))
    return str(folder)


def test_a_character_model_reads_the_bare_text(tmp_path):
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path))

    prompt = tokenizer.encode_prompt("7+8*3=")

    assert len(prompt) == 6
    assert tokenizer.decode(prompt) == "7+8*3="
    assert tokenizer.encode_observation("24;") == tokenizer.encode_prompt("24;")
    assert tokenizer.decode(tokenizer.stop_token_ids) == "<|im_end|>"


def test_a_chat_model_reads_its_template(tmp_path):
    tokenizer = ModelTokenizer(save_tokenizer(tmp_path, template=CHATML))

    prompt = tokenizer.decode(tokenizer.encode_prompt("7+8="))
    observation = tokenizer.decode(tokenizer.encode_observation("24;"))

    assert prompt == "<|im_start|>user\n7+8=<|im_end|>\n<|im_start|>assistant\n"
    # The turn itself ends with the sampled <|im_end|>: what follows belongs to the observation.
    assert observation == "\n<|im_start|>user\n24;<|im_end|>\n<|im_start|>assistant\n"


def test_a_model_without_tokenizer_or_end_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"run.model must be a model with a tokenizer, got"):
        ModelTokenizer(str(tmp_path))

    with pytest.raises(SettingsError, match="with an end-of-sequence token"):
        ModelTokenizer(save_tokenizer(tmp_path, end=None))
