"""Small tokenizers of bytes and pairs, with chat templates in the style of model families."""

import json
from pathlib import Path

import pytest

# "<think>" and the markers of tools are added tokens, but not special ones, as in Qwen3's tokenizer.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
PAIRS = [("Ċ", "Ċ"), ("a", "b"), ("c", "d"), ("ab", "cd")]

_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
)
_RESPONSE = (
    "{% if message.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
THINKING = (
    "{% if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}"
)
CALLS = (
    "{% for call in message.tool_calls or [] %}{% if not loop.first %}{{ '\n' }}{% endif %}"
    """{{ '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}"""
    "{{ (call.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}"
)
# Qwen's style: a newline follows the end token.
CHATML = (
    f"{_TOOLS}{{% for message in messages %}}{_RESPONSE}"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' }}"
    f"{THINKING}{{{{ message.content }}}}{CALLS}{{{{ '<|im_end|>\n' }}}}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Llama's style: nothing follows the end token, contents are trimmed, and a tool's answer is JSON.
LLAMA = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + ({'output': message.content} | tojson) + '<|eot_id|>' }}"
    "{% elif message.tool_calls %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    """{{ '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}"""
    "{{ (message.tool_calls[0].function.arguments | tojson) + '}<|eot_id|>' }}"
    "{% else %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    "{{ (message.content | trim) + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def write_chat_tokenizer(directory: Path, template: str | None, stop: str = "<|im_end|>") -> Path:
    """Write a tokenizer of bytes and PAIRS in Hugging Face layout, with a chat template and a stop token."""
    pytest.importorskip("transformers")
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(first + second for first, second in PAIRS)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, PAIRS))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ADDED])
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": stop, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
