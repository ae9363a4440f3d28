"""Built-in task for an instruction-tuned model: one short sentence about a topic that uses a given word.

prompt    Write one short sentence about winter. Use the word "candle".
answer    candle
correct   A candle warms a long winter night.
"""

import random
import re
from collections.abc import Sequence
from itertools import product

from launch.data.problems import Problem

MOST_WORDS = 25

TOPICS = (
    "winter, the sea, a garden, music, bread, the moon, a train journey, football, cats, the desert, coffee, "
    "a birthday party, school, mountains, rain, the city at night, a farm, books, painting, bicycles, the forest, "
    "a wedding, cooking, space travel, friendship, a market, horses, the beach, snow, a library, dreams, spiders, "
    "old age, the news, chess, sleep"
).split(", ")
WORDS = (
    "candle river window golden quiet seven brother metal promise lemon bridge secret dance paper thunder pocket "
    "mirror gentle sugar shadow travel button yellow stone laugh doctor island hungry feather clock"
).split()
HELD_OUT_TOPICS = (
    "autumn, a lake, the kitchen, dogs, airplanes, the theatre, tea, a hospital, tennis, bees, history, a storm, "
    "the stars, shoes, honesty, a museum"
).split(", ")
HELD_OUT_WORDS = "basket silver whisper uncle ladder orange sudden thread harbor eleven carpet brave".split()

# Marks that end a sentence, with the quotes and brackets that close after them.
_END = re.compile(r"[.!?…]+[\"'”’)\]*]*")


def problems(seed: int) -> tuple[list[Problem], list[Problem]]:
    """Return the training problems and the held-out ones, in random order. They share no topic and no word."""
    return _problems(seed, TOPICS, WORDS), _problems(seed, HELD_OUT_TOPICS, HELD_OUT_WORDS)


def one_sentence(completion: str, word: str) -> float:
    """Return 1.0 if the completion is one sentence of at most 25 words that holds the word, in any case; else 0.0.

    Other forms of the word, and longer words that contain it, do not count. A sentence ends at a punctuation mark that
    is followed by white space or the end of the text; "Mr. " ends one too. Text without a final mark was cut off.
    """
    text = completion.strip()
    ends = [match.end() for match in _END.finditer(text) if text[match.end() :][:1].strip() == ""]
    is_sentence = ends == [len(text)] and len(text.split()) <= MOST_WORDS and "\n" not in text
    has_word = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None
    return float(is_sentence and has_word)


def _problems(seed: int, topics: Sequence[str], words: Sequence[str]) -> list[Problem]:
    pairs = list(product(topics, words))
    random.Random(seed).shuffle(pairs)
    return [
        Problem(prompt=f'Write one short sentence about {topic}. Use the word "{word}".', answer=word)
        for topic, word in pairs
    ]
