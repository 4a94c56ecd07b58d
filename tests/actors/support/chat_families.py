"""Chat templates in the manner of ten families, on any tokenizer.

Each has a peculiarity of its own, shortened from the template of real models. Those in the wheels
of vLLM and TRL are taken as they are.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from actors.engine.tokenizer import ModelTokenizer
from configs.errors import SettingsError

OPEN = "{% if add_generation_prompt %}"
HERMES = (
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}"
)
CALLS = "{% for c in m.tool_calls or [] %}"
XML = (  # Qwen3-Coder, Qwen3.5
    CALLS + "\n<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
    "{% endfor %}"
)
DEEPSEEK = (  # it takes arguments as a text
    CALLS + "<｜tool▁call▁begin｜>{{ c.function.name + '<｜tool▁sep｜>' + c.function.arguments }}"
    "<｜tool▁call▁end｜>{% endfor %}"
)
LISTED = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
LAST_USER = (
    "{% set last = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
)
FAMILIES = {
    # A default system prompt, and nothing else: SmolLM2.
    "chatml": (
        "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\n"
        "You are a helpful AI assistant<|im_end|>\n{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        + OPEN
        + "<|im_start|>assistant\n{% endif %}"
    ),
    # Results of tools side by side are one turn of the user: Qwen2.5.
    "hermes": (
        "{% if tools %}<|im_start|>system\n" + LISTED + "<|im_end|>\n{% endif %}"
        "{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user"
        "{% endif %}\n<tool_response>\n{{ m.content }}\n</tool_response>"
        "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}" + HERMES + "<|im_end|>\n{% endif %}"
        "{% endfor %}" + OPEN + "<|im_start|>assistant\n{% endif %}"
    ),
    # Thinking before the user's last turn is dropped: Qwen3.
    "thinking": (
        LAST_USER + LISTED + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content and loop.index0 > last.user %}<think>\n"
        "{{ m.reasoning_content.strip('\n') }}\n</think>\n\n{% endif %}{{ m.content.lstrip('\n') }}"
        + HERMES
        + "<|im_end|>\n{% endfor %}"
        + OPEN
        + "<|im_start|>assistant\n{% endif %}"
    ),
    # The prompt opens the thinking, and no turn keeps it: DeepSeek-R1.
    "forgetful": (
        "{{ bos_token }}" + LISTED + "{% for m in messages %}{% set said = m.content %}"
        "{% if '</think>' in said %}{% set said = said.split('</think>')[-1] %}{% endif %}"
        "{% if m.role == 'assistant' %}<｜Assistant｜>{{ said }}"
        + DEEPSEEK
        + "<｜end▁of▁sentence｜>{% else %}<｜User｜>{{ said }}{% endif %}{% endfor %}"
        + OPEN
        + "<｜Assistant｜><think>\n{% endif %}"
    ),
    # All thinking is kept as a field of its own, and the prompt opens it: Qwen3.5.
    "opened": (
        LISTED + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n"
        "{% endif %}{{ m.content }}"
        + XML
        + "<|im_end|>\n{% endfor %}"
        + OPEN
        + "<|im_start|>assistant\n<think>\n{% endif %}"
    ),
    # Contents are trimmed, and a call is bare JSON: Llama 3.
    "llama": (
        "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\n" + LISTED + "<|eot_id|>"
        "{% for m in messages %}<|start_header_id|>"
        "{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
        "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
        "{{ raise_exception('one call at a time') }}{% endif %}"
        '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
        "{{ m.tool_calls[0].function.arguments | tojson }}}"
        "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
        + OPEN
        + "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    # Tools stand before the user's last turn, and no turn is opened: Mistral.
    "mistral": (
        LAST_USER + "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
        " {{ m.content }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function | tojson }}"
        "{% endfor %}{{ eos_token }}{% elif m.role == 'tool' %}"
        "[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]{% else %}"
        "{% if tools and loop.index0 == last.user %}[AVAILABLE_TOOLS] {{ tools | tojson }}"
        "[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]{% endif %}{% endfor %}"
    ),
    # The system prompt stands in the user's first turn: Gemma.
    "gemma": (
        "{{ bos_token }}{% set first = namespace(text='') %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% if not loop.first %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% set first.text = m.content + '\n\n' %}{% else %}<start_of_turn>"
        "{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ first.text + m.content | trim }}"
        "{% set first.text = '' %}<end_of_turn>\n{% endif %}{% endfor %}"
        + OPEN
        + "<start_of_turn>model\n{% endif %}"
    ),
    # The last turn is left open: the form of vLLM's `template_chatml.jinja`.
    "unclosed": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if add_generation_prompt or not loop.last %}<|im_end|>\n{% endif %}{% endfor %}"
        + OPEN
        + "<|im_start|>assistant\n{% endif %}"
    ),
    # Roles have tokens of their own, as Granite's, and a chat that is over ends twice, as Phi-3's.
    "granite": (
        LISTED + "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>"
        "{{ m.content }}"
        + HERMES
        + "<|end_of_text|>\n{% endfor %}"
        + OPEN
        + "<|start_of_role|>assistant<|end_of_role|>{% else %}{{ eos_token }}{% endif %}"
    ),
}
CONTROL = re.compile(
    r"<\|[^|<>{}\s]+\|>|<｜[^｜{}]+｜>|\[/?[A-Z][A-Z_]+\]|<(?:start|end)_of_turn>|</?s>|<bos>|<eos>"
)
ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<｜end▁of▁sentence｜>", "<|end_of_text|>")
BEGIN, END = "<s>", "</s>"


def wheel_templates() -> Iterator[tuple[str, str]]:
    """Yield name and text of the chat templates in the wheels of vLLM and TRL, where they are."""
    for package, folder in (
        ("vllm", "transformers_utils/chat_templates"),
        ("trl", "chat_templates"),
    ):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            for path in sorted((Path(spec.origin).parent / folder).glob("*.jinja")):
                yield f"{package}/{path.stem}", path.read_text()


def takes_tools(tokenizer: ModelTokenizer) -> bool:
    """Whether calls with tools are not refused."""
    try:
        tokenizer.check_tools()
    except SettingsError:
        return False
    return True


def chat_tokenizer(folder: Path, template: str, *, model: str | None = None) -> ModelTokenizer:
    """Make the tokenizer of a family.

    Args:
        folder: Where it is saved.
        template: Its chat template, whose control tokens are added.
        model: The model whose tokenizer it is otherwise; None = a small one of pairs of bytes.
    """
    tokenizer: Any = _small() if model is None else AutoTokenizer.from_pretrained(model)
    control = list(dict.fromkeys([BEGIN, END, *CONTROL.findall(template)]))
    tokenizer.add_special_tokens({"additional_special_tokens": control})
    tokenizer.bos_token = BEGIN
    tokenizer.eos_token = next((end for end in ENDS if end in template), END)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder))
    return ModelTokenizer(str(folder), template_kwargs={"date_string": "1 Jan 2026"})


def _small() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(FAMILIES.values(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
