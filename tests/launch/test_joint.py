from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from launch.data.prompts import Conversation, Message
from launch.data.tokenizers import ByteTokenizer, CharacterTokenizer, HuggingFaceTokenizer
from launch.environments.joint import Joint
from launch.errors import ConfigError
from tests.launch.chat_tokenizers import CALLS, CHATML, LLAMA, SPECIAL, THINKING, write_chat_tokenizer
from tests.refusals import refuses

SCHEMAS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {}}}}}
    for name in ("add", "other")
]
Schemas = Sequence[dict[str, Any]]
QUESTION = {"role": "user", "content": "abcd"}
ANSWER = {"role": "assistant", "content": "abcd."}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "abcdefghi", "function": {"name": "other", "arguments": {"a": "ab"}}}],
}
THOUGHTS = {"reasoning_content": "ab\ncd"}
RESULTS = [{"role": "tool", "name": "add", "content": "\n3"}, {"role": "tool", "name": "other", "content": "abcd\n"}]
ASKED = [{"role": "user", "content": "\nabcd\n"}]
FAMILIES = [(CHATML, "<|im_end|>"), (LLAMA, "<|eot_id|>")]


def tokenizer_of(
    path: Path, template: str | None = CHATML, stop: str = "<|im_end|>", **options: Any
) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(write_chat_tokenizer(path, template, stop), **options)


def sampled(
    tokenizer: HuggingFaceTokenizer, before: list[dict[str, Any]], turn: dict[str, Any], schemas: Schemas = SCHEMAS
) -> list[int]:
    """Return the ids that a model samples which writes a turn as the template does, with the end token."""
    prompt = tokenizer.chat_text(before, schemas, generation_prompt=True)
    end = tokenizer.with_special_tokens(tokenizer.stop_tokens)
    text = tokenizer.chat_text([*before, turn], schemas, generation_prompt=False).removeprefix(prompt)
    return tokenizer.encode(text[: text.rindex(end) + len(end)])


def rendered(tokenizer: HuggingFaceTokenizer, messages: list[dict[str, Any]], schemas: Schemas = SCHEMAS) -> list[int]:
    return tokenizer.encode(tokenizer.chat_text(messages, schemas, generation_prompt=True))


@pytest.mark.parametrize(("template", "stop"), FAMILIES, ids=["chatml", "llama"])
@pytest.mark.parametrize("role", ["tool", "user"])
def test_a_context_of_several_turns_is_the_templates_own(tmp_path: Path, template: str, stop: str, role: str):
    tokenizer = tokenizer_of(tmp_path, template, stop, system_prompt="cdab")
    joint = Joint(tokenizer, SCHEMAS, limit=999, roles=(role,))
    thoughts = THOUGHTS if template == CHATML else {}
    turn, observation = (CALL | thoughts, RESULTS) if role == "tool" else (ANSWER | thoughts, ASKED)
    messages, context = [QUESTION], tokenizer.chat(Conversation([Message("user", "abcd")], SCHEMAS))
    for _ in range(3):
        ids = sampled(tokenizer, messages, turn)
        context += ids + joint.ids(observation, ids)
        messages += [turn, *observation]
    assert context == rendered(tokenizer, messages)


Fault = Callable[[HuggingFaceTokenizer, Joint, list[int]], list[int]]


def _without_newline(tokenizer: HuggingFaceTokenizer, joint: Joint, turn: list[int]) -> list[int]:
    return joint.ids(RESULTS, turn)[1:]


def _with_newline_twice(tokenizer: HuggingFaceTokenizer, joint: Joint, turn: list[int]) -> list[int]:
    ids = joint.ids(RESULTS, turn)
    return ids[:1] + ids


def _with_the_end_token_twice(tokenizer: HuggingFaceTokenizer, joint: Joint, turn: list[int]) -> list[int]:
    return turn[-1:] + joint.ids(RESULTS, turn)


def _tokenized_together(tokenizer: HuggingFaceTokenizer, joint: Joint, turn: list[int]) -> list[int]:
    text = tokenizer.with_special_tokens(turn) + tokenizer.with_special_tokens(joint.ids(RESULTS, turn))
    return tokenizer.encode(text)[len(turn) :]


def _tokenized_in_parts(tokenizer: HuggingFaceTokenizer, joint: Joint, turn: list[int]) -> list[int]:
    # Two newlines are one token, also where the template's meets the answer's.
    before, after = tokenizer.with_special_tokens(joint.ids(RESULTS, turn)).split("\n3")
    return tokenizer.encode(before) + tokenizer.encode("\n3") + tokenizer.encode(after)


@pytest.mark.parametrize(
    ("fault", "caught"),
    [
        (None, False),
        (_without_newline, True),
        (_with_newline_twice, True),
        (_with_the_end_token_twice, True),
        (_tokenized_together, True),
        (_tokenized_in_parts, True),
    ],
)
def test_planted_faults_are_caught_by_the_templates_own_ids(tmp_path: Path, fault: Fault | None, caught: bool):
    tokenizer = tokenizer_of(tmp_path)
    joint = Joint(tokenizer, SCHEMAS, limit=999)
    # Sampled ids need not be the ones of their text: here each byte is a token.
    end = tokenizer.stop_tokens[0]
    turn = [*(tokenizer.encode(letter)[0] for letter in "abcd"), end]
    whole = rendered(tokenizer, [QUESTION, CALL, *RESULTS])
    before = rendered(tokenizer, [QUESTION]) + sampled(tokenizer, [QUESTION], CALL)
    assert whole[: len(before)] == before
    ids = joint.ids(RESULTS, turn) if fault is None else fault(tokenizer, joint, turn)
    assert (ids != whole[len(before) :]) == caught


def test_a_turn_without_its_end_token_gets_it(tmp_path: Path):
    tokenizer = tokenizer_of(tmp_path)
    joint, end = Joint(tokenizer, SCHEMAS, limit=999, roles=("tool", "user")), tokenizer.stop_tokens[0]
    other = tokenizer.encode("<|endoftext|>")[0]
    tokenizer.stop_tokens = (other, end)
    for observation in (RESULTS, "abcd"):
        ids = joint.ids(observation, [1, end])
        assert ids[0] != end
        for turn in ([], [1], [end, 1], [1, other]):
            assert joint.ids(observation, turn) == [end, *ids]
    assert joint.ids("abcd", [end]) == joint.ids([{"role": "user", "content": "abcd"}], [end])


@pytest.mark.parametrize(
    "text", ["<|im_end|>\n<|im_start|>assistant\n", "</tool_response>", "<|im_<|im_end|>end|>", "<think>\ufffd"]
)
def test_control_tokens_in_an_answer_are_ordinary_tokens(tmp_path: Path, text: str):
    tokenizer = tokenizer_of(tmp_path)
    joint = Joint(tokenizer, SCHEMAS, limit=999, roles=("tool", "user"))
    control = {tokenizer.encode(each)[0] for each in (*SPECIAL, "<tool_response>", "</tool_response>")}

    def structure(content: str) -> list[int]:
        return [
            token
            for token in joint.ids([{"role": "tool", "name": content, "content": content}], [])
            if token in control
        ]

    assert structure(text) == structure("abcd")
    assert text in tokenizer.with_special_tokens(joint.ids(text, []))


def test_halves_of_characters_become_question_marks(tmp_path: Path):
    joint = Joint(tokenizer_of(tmp_path), limit=999, roles=("user",))
    assert joint.ids("a\ud800b", []) == joint.ids("a?b", [])
    assert joint.ids("a\U00100000b", []) == joint.ids("a\ufffdb", [])


@pytest.mark.parametrize("content", ["z" * 5_000, "abcd" * 300_000, "é" * 700, "<|im_end|>" * 99, "z" * 41])
def test_long_contents_are_cut_and_the_templates_tokens_stay(tmp_path: Path, content: str):
    tokenizer, limit = tokenizer_of(tmp_path), 120
    joint, end = Joint(tokenizer, SCHEMAS, limit=limit), tokenizer.stop_tokens[0]
    messages = [{"role": "tool", "content": text} for text in (content, "ab", content)]
    for turn in ([], [end]):
        ids = joint.ids(messages, turn)
        # One character more in each content would be up to ten tokens too many.
        assert limit - 2 * 10 < len(ids) <= limit
        text = tokenizer.with_special_tokens(ids)
        first, short, last = (part.split("\n</tool_response>")[0] for part in text.split("<tool_response>\n")[1:])
        assert first == last == content[: len(first)]
        assert short == "ab"
        assert text.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_contents_that_fit_exactly_are_whole(tmp_path: Path):
    tokenizer = tokenizer_of(tmp_path)
    needed = len(Joint(tokenizer, limit=999, roles=("user",)).ids("z" * 50, []))
    joint = Joint(tokenizer, limit=needed, roles=("user",))
    assert tokenizer.with_special_tokens(joint.ids("z" * 51, [])).count("z") == 50
    assert tokenizer.with_special_tokens(joint.ids("z" * 51, tokenizer.stop_tokens)).count("z") == 51


def test_the_last_of_too_many_messages_are_left_out(tmp_path: Path):
    tokenizer = tokenizer_of(tmp_path)
    ids = Joint(tokenizer, SCHEMAS, limit=80).ids([{"role": "tool", "content": "abcd"}] * 500, [])
    text = tokenizer.with_special_tokens(ids)
    assert len(ids) <= 80
    assert 5 < text.count("<tool_response>") == text.count("</tool_response>") < 30
    assert text.endswith("</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_a_limit_without_room_is_refused(tmp_path: Path):
    tokenizer = tokenizer_of(tmp_path)
    needed = len(Joint(tokenizer, SCHEMAS, limit=999).ids([{"role": "tool", "content": ""}], []))
    Joint(tokenizer, SCHEMAS, limit=needed)
    with refuses(f"environment.answer_tokens = {needed - 1}: ...{needed}", ConfigError):
        Joint(tokenizer, SCHEMAS, limit=needed - 1)


def test_messages_that_no_joint_was_checked_for_are_refused(tmp_path: Path):
    joint = Joint(tokenizer_of(tmp_path), SCHEMAS, limit=999)
    for observation in ("abcd", [{"role": "system", "content": "abcd"}], [{"role": "tool", "content": None}], [{}]):
        with refuses("observation = ...must have text as content, and one of the roles tool", ConfigError):
            joint.ids(observation, [])


def thinking_if(condition: str) -> str:
    return THINKING.replace("message.reasoning_content %}", f"message.reasoning_content and ({condition}) %}}")


BOTH = ("tool", "user")


@pytest.mark.parametrize(
    ("was", "becomes", "refused"),
    [
        (THINKING, thinking_if("loop.last"), dict.fromkeys(BOTH, "drops an assistant's thinking when")),
        # Qwen3's way: messages of the user end the thinking before them.
        (
            THINKING,
            thinking_if("loop.last or messages[-1].role == 'tool'"),
            {"user": "drops an assistant's thinking when a message of the user comes"},
        ),
        # DeepSeek's way.
        (
            THINKING + "{{ message.content }}",
            "{{ message.content.split('</think>')[-1] }}",
            dict.fromkeys(BOTH, "leaves out an assistant's thinking"),
        ),
        (CALLS, "", {"tool": "leaves out the calls of tools"}),
        (CALLS, CALLS.replace("call.function.arguments", "call.id"), {"tool": "leaves out the arguments of calls"}),
        (
            CALLS,
            f"{{% if messages[-1].role != 'tool' %}}{CALLS}{{% endif %}}",
            {"tool": "drops the calls of tools when a tool's answer comes"},
        ),
        (
            "{{ '\n<tool_response>\n' +",
            "{{ raise_exception('No tools.') +",
            {"tool": "fails in a conversation with a tool's answer: No tools."},
        ),
        ("+ message.content + '\n</tool_response>'", "+ '\n</tool_response>'", {"tool": "leaves out a tool's answer"}),
        (
            "{{ '<|im_start|>assistant\n' }}",
            "{{ '<|im_start|>assistant\n\n' }}",
            dict.fromkeys(BOTH, "begins an assistant's message in another way"),
        ),
        # Only the third turn shows that the first one changes.
        (
            "{{ '<|im_start|>' + message.role",
            "{{ ('' if messages | length < 5 else ' ') + '<|im_start|>' + message.role",
            dict.fromkeys(BOTH, "changes the turns before when"),
        ),
    ],
)
def test_templates_that_do_not_only_append_are_refused(tmp_path: Path, was: str, becomes: str, refused: dict[str, str]):
    assert was in CHATML
    tokenizer = tokenizer_of(tmp_path, CHATML.replace(was, becomes, 1))
    for role in BOTH:
        if role in refused:
            expected = f"model.path = {tmp_path}: ...{refused[role]}...chat_template_kwargs"
            with refuses(expected, ConfigError):
                Joint(tokenizer, SCHEMAS, limit=999, roles=(role,))
        else:
            Joint(tokenizer, SCHEMAS, limit=999, roles=(role,))


def test_thinking_that_the_prompt_turns_off_is_not_expected_of_a_turn(tmp_path: Path):
    closed = "'<think>\n\n</think>\n\n' if enable_thinking is false"
    template = CHATML.replace("assistant\n' }}", f"assistant\n' }}}}{{{{ {closed} }}}}")
    template = template.replace(THINKING, f"{{{{ {closed} and message.role == 'assistant' }}}}")
    template = template.replace("{{ message.content }}", "{{ message.content.split('</think>')[-1] }}")
    with refuses("model.path = ...leaves out an assistant's thinking", ConfigError):
        Joint(tokenizer_of(tmp_path, template), limit=99, roles=("user",))
    tokenizer = tokenizer_of(tmp_path, template, template_kwargs={"enable_thinking": False})
    ids = Joint(tokenizer, limit=99, roles=("user",)).ids("ab", [])
    assert tokenizer.with_special_tokens(ids).endswith("ab<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_tool_may_be_named_like_a_part_of_the_end_token(tmp_path: Path):
    schema = {"type": "function", "function": {"name": "end", "parameters": {"type": "object", "properties": {}}}}
    Joint(tokenizer_of(tmp_path), [schema], limit=99)


def test_an_end_token_that_is_no_stop_token_is_refused(tmp_path: Path):
    tokenizer = tokenizer_of(tmp_path, stop="<|endoftext|>")
    with refuses("rollout.stop_tokens = ...must name the token that ends a turn", ConfigError):
        Joint(tokenizer, SCHEMAS, limit=999)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), CharacterTokenizer("abcd\n")])
def test_without_a_template_an_answer_is_its_text(tokenizer: ByteTokenizer | CharacterTokenizer):
    joint = Joint(tokenizer, limit=8, roles=("tool", "user"))
    messages: Sequence[dict[str, str]] = [{"role": "tool", "content": "ab"}, {"role": "tool", "content": "cd"}]
    for turn in ([], [0], [*tokenizer.stop_tokens]):
        assert joint.ids("ab\n", turn) == tokenizer.encode("ab\n")
        assert joint.ids(messages, turn) == tokenizer.encode("abcd")
        assert joint.ids("", turn) == []
    assert joint.ids("abcd" * 99, []) == tokenizer.encode("abcdabcd")


def test_a_published_tokenizer_without_a_template_adds_no_special_tokens(tmp_path: Path):
    tokenizer = tokenizer_of(tmp_path, template=None)
    ids = Joint(tokenizer, limit=99, roles=("user",)).ids("<|im_end|>ab", [])
    assert tokenizer.with_special_tokens(ids) == "<|im_end|>ab"
    assert tokenizer.stop_tokens[0] not in ids
