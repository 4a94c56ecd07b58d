"""Tokenizers of characters, as files: with and without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789=;[]*+- \n<|>_/AEOT"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}[]\n{% endif %}{% endif %}"
)


def save_tokenizer(
    folder: Path | str,
    *,
    template: str | None = None,
    end: str | None = "<|im_end|>",
    begin: str | None = None,
    unnamed: bool = False,
    special: Sequence[str] = SPECIAL,
    letters: str = LETTERS,
) -> str:
    """Save a tokenizer of characters; return its folder.

    Args:
        folder: Where.
        template: Of chats; None = a model without one.
        end: The end-of-sequence token.
        begin: The token that every text begins with.
        unnamed: Special tokens are known by no name.
        special: All of them.
        letters: All that are not unknown.
    """
    vocabulary = {token: number for number, token in enumerate([*letters, "?", *special])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A </s>",
            special_tokens=[(token, vocabulary[token]) for token in (begin, "</s>")],
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="?",
        eos_token=end,
        bos_token=begin,
        additional_special_tokens=[] if unnamed else list(special),
        chat_template=template,
    )
    if unnamed:  # as Gemma's and Phi's: special, and known by no name
        fast.add_tokens([AddedToken(token, special=True) for token in special])
    fast.save_pretrained(str(folder))
    return str(folder)
