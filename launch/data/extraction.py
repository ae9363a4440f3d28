"""Built-in task for an instruction-tuned model: write what a sentence says about a person as a JSON object.

prompt    Nora Silva, 34, left a job as a nurse in Oslo and is now a baker in Lisbon.
          Write this person as JSON: {"name": ..., "age": ..., "job": ..., "city": ...}
answer    {"name": "Nora Silva", "age": 34, "job": "baker", "city": "Lisbon"}
"""

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from launch.data.problems import Problem

KEYS = ("name", "age", "job", "city")
QUESTION = '\nWrite this person as JSON: {"name": ..., "age": ..., "job": ..., "city": ...}'


@dataclass(frozen=True)
class People:
    """The sentences, and the facts to fill in. Facts in "{old_job}" and "{old_city}" must not be reported."""

    sentences: Sequence[str]
    first_names: Sequence[str]
    last_names: Sequence[str]
    jobs: Sequence[str]
    cities: Sequence[str]


TRAINING = People(
    sentences=(
        "{name}, {age}, works as a {job} in {city}.",
        "{name} is a {age}-year-old {job} from {city}.",
        "In {city}, {name} earns a living as a {job} at the age of {age}.",
        "{name}, {age}, left a job as a {old_job} in {old_city} and is now a {job} in {city}.",
        "At {age}, {name} is the youngest {job} in {city}.",
        "{name} grew up in {old_city} but lives in {city}, where the {age}-year-old has a job as a {job}.",
        "After ten years as a {old_job}, {name} became a {job} in {city} and turned {age} this spring.",
        "The {job} who has just moved from {old_city} to {city} is {name}, {age}.",
    ),
    first_names="Nora Ben Maria Tom Aisha Lukas Priya Carlos Emma Ivan Grace Omar Julia Peter Lina Samuel".split(),
    last_names="Silva Brown Novak Khan Weber Rossi Jensen Ortiz Clark Meyer Dubois Singh Berg Walsh".split(),
    jobs="nurse baker teacher pilot lawyer farmer dentist painter plumber chef tailor librarian miner judge".split(),
    cities="Lisbon Oslo Chicago Cairo Madrid Toronto Mumbai Vienna Seoul Dublin Athens Boston Lima Hamburg".split(),
)
HELD_OUT = People(
    sentences=(
        "{name}, a {job} who lives in {city}, is {age} years old.",
        "{name} used to be a {old_job} in {old_city}; today the {age}-year-old is a {job} in {city}.",
        "{city} has a new {job}: {name}, {age}, who comes from {old_city}.",
        "Meet {name}, {age}: once a {old_job}, now a {job} in {city}.",
    ),
    first_names="Clara Hugo Fatima Daniel Yuki Martin Elena Noah".split(),
    last_names="Costa Taylor Haddad Lindgren Moreau Kim Fischer Doyle".split(),
    jobs="carpenter doctor journalist butcher gardener singer mechanic barber".split(),
    cities="Paris Nairobi Denver Prague Tokyo Naples Sydney Warsaw".split(),
)


class _Facts(list[tuple[str, object]]):
    """The pairs of a JSON object, duplicates kept."""


def problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Return 2,000 training problems and 200 held-out ones. They share no sentence, name, job or city."""
    return _problems(seed, TRAINING, 2000), _problems(seed, HELD_OUT, 200)


def all_right(completion: str, answer: str) -> float:
    """Return 1.0 if the completion is a JSON object that says exactly what `answer` says; else 0.0."""
    return float(right_facts(completion, answer) == 1.0)


def right_facts(completion: str, answer: str) -> float:
    """Return the share of keys and values that the completion, a JSON object, gets right: 1.0 for all of `answer`.

    A value is right under its own key. Facts that were not asked for, and keys that come twice, lower the share. Keys
    may come in any order; capitals do not matter; numbers may be in quotes; the object may stand in a Markdown code
    block, but not among other text.
    """
    fenced = re.fullmatch("```(?:json)?(.*)```", completion.strip(), re.DOTALL)
    try:
        found = json.loads(fenced[1] if fenced else completion, object_pairs_hook=_Facts)
    except (ValueError, RecursionError):
        return 0.0
    if not isinstance(found, _Facts):
        return 0.0
    given, wanted = (
        # A list or an object is no value: its text may be too deep to be made.
        [(key.lower(), None if isinstance(value, list) else str(value).lower()) for key, value in facts]
        for facts in (found, json.loads(answer).items())
    )
    keys = dict(given).keys() & dict(wanted).keys()
    right = len(keys) + sum(fact in given for fact in wanted)
    return right / (2 * max(len(given), len(wanted)))


def _problems(seed: int, people: People, number: int) -> list[Problem]:
    draw = random.Random(seed)
    found: dict[str, Problem] = {}
    while len(found) < number:
        job, old_job = draw.sample(people.jobs, 2)
        city, old_city = draw.sample(people.cities, 2)
        name = f"{draw.choice(people.first_names)} {draw.choice(people.last_names)}"
        person = dict(zip(KEYS, (name, draw.randint(20, 69), job, city), strict=True))
        sentence = draw.choice(people.sentences).format(**person, old_job=old_job, old_city=old_city)
        found.setdefault(sentence, Problem(prompt=sentence + QUESTION, answer=json.dumps(person)))
    return list(found.values())
