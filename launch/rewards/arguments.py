"""Arguments of a scorer of one's own, by the names and places of its parameters."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from launch.errors import ConfigError

# What a parameter gets, by its name: our names, and those that others have for the same.
_COMPLETION = (
    *("completion", "response", "output", "prediction", "solution_str", "text", "generated", "generation"),
    *("pred", "y_pred", "predicted", "hypothesis", "hyp", "candidate"),
    *("model_output", "model_response", "model_answer"),
)
_ANSWER = (
    *("answer", "ground_truth", "reference", "target", "expected", "truth", "gold", "label", "gt", "ref", "y_true"),
    *("expected_answer", "reference_answer", "correct_answer", "gold_answer", "true_answer"),
)
ROLES = {
    **dict.fromkeys(_COMPLETION, "completion"),
    "whole_text": "whole_text",
    **dict.fromkeys(_ANSWER, "answer"),
    "problem": "problem",
}
GENERATED, REFERENCES = {"completion", "whole_text"}, {"answer", "problem"}
# Names of what no parameter gets: of other parts of a problem, and of batches.
ELSEWHERE = {"prompt", "question", "query", "prompts", "completions", "answers", "problems"}
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
    parameters = [each for each in signature.parameters.values() if each.kind not in _VARIADIC]
    first = [each.name for each in parameters if each.kind in _PLACED][:2]
    known = {each.name: ROLES[each.name] for each in parameters if each.name in ROLES}
    names = list(first)
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in signature.parameters.values()):
        names += ["*"] * (2 - len(first))
    placed = _filled(names, known)
    named = {name: role for name, role in known.items() if name not in first}
    missing = [name for name, role in zip(names, placed, strict=True) if not role or name in ELSEWHERE]
    missing += [each.name for each in parameters if each.default is each.empty and each.name not in {*first, *known}]
    reason = _contradiction(names, placed, named, missing)
    if reason is not None:
        raise ConfigError(
            f"{owner}: takes {signature}: {reason}; must take (completion, problem) or (completion, answer), and may "
            "take whole_text: it is called for each completion"
        )
    return Arguments(tuple(placed), named)


def _filled(names: Sequence[str], known: Mapping[str, str]) -> list[str]:
    """Return the roles of the first places: those that names say, and in the others what is left; "" if nothing is."""
    left = [part[0] for part in (("completion",), ("answer", "problem")) if not {*part} & {*known.values()}]
    return [known.get(name) or (left.pop(-place) if left else "") for place, name in enumerate(names)]


def _contradiction(
    names: Sequence[str], placed: Sequence[str], named: Mapping[str, str], missing: Sequence[str]
) -> str | None:
    """Return what is wrong with the roles of a scorer's parameters, None if nothing is."""
    roles = [*placed, *named.values()]
    if len(roles) < 2:
        return "takes too few"
    if missing:
        return f"{missing[0]} is not given"
    if len({*roles}) < len(roles) or not GENERATED & {*roles}:
        return "names must give the completion to one, and the same to no two"
    if placed and placed[0] in REFERENCES and not GENERATED & {ROLES.get(name) for name in names}:
        return f"{names[0]} stands in the place of the completion"
    return None
