"""A character-level Qwen3 small enough to train on a laptop, and its tokenizer.

Owns the shape of the model and the alphabet. One character is one token without merges, so
text -> tokens -> text is exact and the tokens of a turn do not depend on the text around it.
"""

from __future__ import annotations

import string
from collections.abc import Iterable

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from configs.errors import SettingsError

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
# Every printable ASCII character has a token, so that other tasks can reuse the model.
ALPHABET = string.ascii_letters + string.digits + string.punctuation + " \n"
HEAD_WIDTH = 32  # the narrowest head that the CPU attention of vLLM accepts
MAX_POSITIONS = 4096


def make_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each printable ASCII character and each one in `texts`."""
    extra = sorted({character for text in texts for character in text} - set(ALPHABET))
    vocabulary = {
        token: token_id for token_id, token in enumerate([PAD, EOS, UNKNOWN, *ALPHABET, *extra])
    }
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # joins without spaces
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def token_id(tokenizer: PreTrainedTokenizerFast, token: str) -> int:
    """Return the id of a token of this vocabulary."""
    found = tokenizer.convert_tokens_to_ids(token)
    assert isinstance(found, int)
    return found


def make_model(
    tokenizer: PreTrainedTokenizerFast, *, layers: int, width: int, tied: bool, seed: int
) -> Qwen3ForCausalLM:
    """Make a Qwen3 with random weights: heads 32 wide, half as many for keys and values.

    Raises:
        SettingsError: `width` is not a multiple of 64.
    """
    if width % (2 * HEAD_WIDTH):
        raise SettingsError(
            f"learner.init_width must be a multiple of {2 * HEAD_WIDTH}, got {width}; "
            f"heads are {HEAD_WIDTH} wide and come in pairs"
        )
    heads = width // HEAD_WIDTH
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=HEAD_WIDTH,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=tied,
        pad_token_id=token_id(tokenizer, PAD),
        eos_token_id=token_id(tokenizer, EOS),
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)
