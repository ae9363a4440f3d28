"""Check that a chat template continues a conversation after the tokens of the turns before it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from launch.data.tokenizers import HuggingFaceTokenizer
from launch.errors import ConfigError, first_line
from launch.rewards.thinking import KNOWN

# Texts that no template has.
_THOUGHT, _ANSWER, _ARGUMENT, _OBSERVED = "dummy-thought", "dummy-answer", "dummy-argument", "dummy-observation"
CALL_ID = "call00000"  # Mistral's templates want nine letters and digits


class Base(NamedTuple):
    """A dummy conversation that an observation continues.

    Attributes:
        messages: of a user and of an assistant.
        text:     as the template writes them, up to the stop token that ends the assistant's turn.
        end:      text of this token.
        end_id:   its id.
    """

    messages: list[Mapping[str, Any]]
    text: str
    end: str
    end_id: int


def find_base(tokenizer: HuggingFaceTokenizer, schemas: Sequence[dict[str, Any]], role: str) -> Base:
    """Return the conversation that an observation of a role continues.

    The assistant thinks if the template has thinking, and calls the first tool before an observation of role "tool".

    Raises ConfigError, naming the fault, if the template is not append-only: if it changes what it wrote when messages
    follow, or does not write all of the assistant's message.
    """
    follows = "a tool's answer" if role == "tool" else f"a message of the {role}"

    def refused(fault: str) -> ConfigError:
        instead = "" if role == "tool" else ", or tools must answer instead of messages of the user"
        return ConfigError(
            f"model.path = {tokenizer.directory}: its chat template {fault}; must be one that only appends, by "
            f"data.chat_template_kwargs chat_template{instead}"
        )

    def text_of(messages: Sequence[Mapping[str, Any]], generation_prompt: bool = True) -> str:
        try:
            return tokenizer.chat_text(messages, schemas, generation_prompt)
        except Exception as error:  # a template is a program, which may raise anything
            raise refused(f"fails in a conversation with {follows}: {first_line(error)}") from error

    question = {"role": "user", "content": "dummy-question"}
    prompt = text_of([question])
    turn, parts = _turn(tokenizer.template or "", prompt, schemas if role == "tool" else ())
    conversation = text_of([question, turn], generation_prompt=False)
    for part, said in parts.items():
        if conversation.count(part) <= prompt.count(part):
            raise refused(f"leaves out {said}")
    if not conversation.startswith(prompt):
        raise refused("begins an assistant's message in another way than the prompt of one")
    stop, end, end_id = _last_stop(tokenizer, conversation)
    if any(part in conversation[stop + len(end) :] for part in parts):
        raise ConfigError(
            f"rollout.stop_tokens = {tokenizer.stop_tokens}: the chat template of model.path = {tokenizer.directory} "
            f"ends an assistant's message with {conversation[-20:]!r}; must name the token that ends a turn"
        )
    observation = {"role": role, "content": _OBSERVED, "tool_call_id": CALL_ID}
    begun, turn_text = conversation[: stop + len(end)], conversation[len(prompt) : stop + len(end)]
    continued = text_of([question, turn, observation])
    again = text_of([question, turn, observation, turn, observation])
    for text, before in ((continued, begun), (again, continued + turn_text)):
        if not text.startswith(before):
            lost = next((said for part, said in parts.items() if text.count(part) < before.count(part)), None)
            raise refused(f"{f'drops {lost}' if lost else 'changes the turns before'} when {follows} comes")
    if _OBSERVED not in continued[len(begun) :]:
        raise refused(f"leaves out {follows}")
    return Base([question, turn], conversation[:stop], end, end_id)


def _last_stop(tokenizer: HuggingFaceTokenizer, text: str) -> tuple[int, str, int]:
    """Return where the last stop token of a text begins (-1 without one), its text and its id."""
    stops = {token: tokenizer.with_special_tokens([token]) for token in tokenizer.stop_tokens}
    return max((text.rfind(stop) if stop else -1, stop, token) for token, stop in stops.items())


def _turn(template: str, prompt: str, schemas: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a dummy message of an assistant, and the texts that it must be written with, by what they are."""
    turn: dict[str, Any] = {"role": "assistant", "content": ""}
    parts = dict[str, str]()
    markers = next((each for each in KNOWN if any(marker.partition("|>")[0] in template for marker in each)), None)
    if markers is not None and not prompt.rstrip().endswith(markers[1]):  # thinking that is closed is turned off
        parts[_THOUGHT] = "an assistant's thinking"
        if "reasoning_content" in template:
            turn["reasoning_content"] = _THOUGHT
        else:
            turn["content"] = f"{markers[0]}\n{_THOUGHT}\n{markers[1]}\n\n"
    if schemas:
        function = schemas[0]["function"]
        arguments = dict.fromkeys([*function["parameters"]["properties"]][:1], _ARGUMENT)
        parts |= {function["name"]: "the calls of tools"} | dict.fromkeys(arguments.values(), "the arguments of calls")
        call = {"name": function["name"], "arguments": arguments}
        turn["tool_calls"] = [{"type": "function", "id": CALL_ID, "function": call}]
    else:
        turn["content"] += _ANSWER
        parts[_ANSWER] = "an assistant's text"
    return turn, parts
