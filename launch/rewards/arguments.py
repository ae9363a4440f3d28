"""Arguments of a scorer of one's own, by the names and places of its parameters."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from launch.cli.errors import ConfigError

# What a parameter gets, by its name: our names, and those that other libraries have for the same.
ROLES = {
    **dict.fromkeys(("completion", "response", "output", "prediction", "solution_str"), "completion"),
    "whole_text": "whole_text",
    **dict.fromkeys(("answer", "ground_truth", "reference", "target", "expected", "truth", "gold"), "answer"),
    "problem": "problem",
}
GENERATED, REFERENCES = {"completion", "whole_text"}, {"answer", "problem"}
RIVALS = {"completion": {"completion"}, "answer": REFERENCES}
# Names of what no parameter gets.
ELSEWHERE = {"prompt", "prompts", "completions", "answers", "problems"}
_PLACED = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
_VARIADIC = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


class Arguments(NamedTuple):
    """Roles of the first parameters, in their order, and of others, by their names.

    A role is completion, the text that is scored; whole_text, all of the completion; answer; or problem.
    """

    placed: tuple[str, ...] = ("completion", "answer")
    named: Mapping[str, str] = {}  # noqa: RUF012, never changed

    def call(self, function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
        """Call the function with the values of its roles."""
        named = {name: values[role] for name, role in self.named.items()}
        return function(*(values[role] for role in self.placed), **named)


def arguments_of(function: Callable[..., Any], owner: str) -> Arguments:
    """Return what each parameter of a scorer gets.

    A parameter with a name in `ROLES` gets what the name says, wherever it stands. Another gets the completion in the
    first place and the answer in the second, or what is left of them. In later places it keeps its default.

    Raises ConfigError, beginning with `owner`, if a parameter gets nothing, or if a name contradicts its place.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of C
        return Arguments()
    parameters = list(signature.parameters.values())
    first = [each for each in parameters if each.kind in _PLACED][:2]
    others = [each for each in parameters if each not in first and each.kind not in _VARIADIC]
    names = [each.name for each in first]
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters):
        names += ["*"] * (2 - len(names))
    known = {each.name: ROLES[each.name] for each in parameters if each.name in ROLES}
    placed = list[str]()
    for name, wanted in zip(names, (("completion", "answer"), ("answer", "completion")), strict=False):
        taken = {*known.values(), *placed}
        placed.append(known.get(name) or next((role for role in wanted if not RIVALS[role] & taken), ""))
    named = {each.name: known[each.name] for each in others if each.name in known}
    roles = [*placed, *named.values()]
    unknown = [each.name for each in others if each.default is each.empty and each.name not in known]
    unknown += [name for name, role in zip(names, placed, strict=True) if not role or name in ELSEWHERE]
    reason = None
    if len(roles) < 2:
        reason = "takes too few"
    elif unknown:
        reason = f"{unknown[0]} is not given"
    elif len({*roles}) < len(roles) or not GENERATED & {*roles}:
        reason = "names must give the completion to one, and the same to no two"
    elif placed and placed[0] in REFERENCES and not GENERATED & {known.get(name) for name in names}:
        reason = f"{names[0]} stands in the place of the completion"
    if reason is not None:
        raise ConfigError(
            f"{owner}: takes {signature}: {reason}; must take (completion, problem) or (completion, answer), and may "
            "take whole_text: it is called for each completion"
        )
    return Arguments(tuple(placed), named)
