"""The embedded task family: skills that a small base model learns, and held-out ones that adapters learn.

Texts are words separated by spaces; each word is one token. A prompt names its skill first. Held-out skills share
words, operations and shapes with the learned ones, so a pretrained model has something to adapt, but their rule is
new: another number to add, two known rules at once, languages with another vocabulary.

Whether an example is for training, validation or testing is decided by a hash of its prompt, so the three sets
share no example, whatever the seeds.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from experiments.identity import canonical_hash
from tessa.errors import UserError

LETTERS = tuple("abcdefghijklmnop")
DIGITS = tuple("0123456789")
NOUNS = ("cat", "dog", "bird", "fish", "king", "queen", "child", "horse")
ADJECTIVES = ("red", "big", "old", "wet", "calm", "odd")
VERBS = ("sees", "likes", "hears", "moves", "calls", "helps")
FOREIGN = tuple(a + b for a in "klmrt" for b in ("ai", "eo", "iu", "ou"))
SIGNS = (":", "=")
PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SPLITS = ("train", "validation", "test")
STRING_LENGTH = 5
EXAMPLES = 256
"""Documents for testing, and as many for validation, of each held-out skill."""
SHARE = 10  # one prompt in so many is for testing, and as many for validation

Example = tuple[str, str]
Words = tuple[list[str], list[str]]


@dataclass(frozen=True)
class Skill:
    """make: random generator -> (words of the question, words of the answer). held_out: not in pretraining."""

    name: str
    make: Callable[[random.Random], tuple[list[str], list[str]]]
    held_out: bool = False


def _string(rng: random.Random) -> list[str]:
    return [rng.choice(LETTERS) for _ in range(STRING_LENGTH)]


def _step(letter: str, by: int) -> str:
    return LETTERS[(LETTERS.index(letter) + by) % len(LETTERS)]


def _transform(function: Callable[[list[str]], list[str]]) -> Callable[[random.Random], Words]:
    def make(rng: random.Random) -> Words:
        text = _string(rng)
        return text, function(text)

    return make


def _swap_pairs(text: list[str]) -> list[str]:
    swapped = list(text)
    for i in range(0, len(text) - 1, 2):
        swapped[i], swapped[i + 1] = text[i + 1], text[i]
    return swapped


def _plus(number: int) -> Callable[[random.Random], Words]:
    """A string of digits with a number added to each, modulo 10."""

    def make(rng: random.Random) -> Words:
        digits = [rng.randrange(10) for _ in range(STRING_LENGTH)]
        return [DIGITS[x] for x in digits], [DIGITS[(x + number) % 10] for x in digits]

    return make


def _translation(language: str, order: tuple[int, ...]) -> Callable[[random.Random], Words]:
    """A sentence of five words into a language with its own vocabulary and word order."""
    words = [*NOUNS, *ADJECTIVES, *VERBS]
    foreign = list(FOREIGN)
    random.Random(f"language {language}").shuffle(foreign)
    lexicon = dict(zip(words, foreign, strict=True))

    def make(rng: random.Random) -> Words:
        sentence = [rng.choice(k) for k in (ADJECTIVES, NOUNS, VERBS, ADJECTIVES, NOUNS)]
        return sentence, [lexicon[sentence[i]] for i in order]

    return make


SKILLS = (
    Skill("copy", _transform(list)),
    Skill("reverse", _transform(lambda text: text[::-1])),
    Skill("next", _transform(lambda text: [_step(x, 1) for x in text])),
    Skill("swap", _transform(_swap_pairs)),
    Skill("plus_2", _plus(2)),
    Skill("plus_5", _plus(5)),
    Skill("to_north", _translation("north", (1, 0, 4, 3, 2))),
    Skill("to_south", _translation("south", (2, 0, 1, 3, 4))),
    Skill("plus_3", _plus(3), held_out=True),
    Skill("reverse_next", _transform(lambda text: [_step(x, 1) for x in text[::-1]]), held_out=True),
    Skill("to_west", _translation("west", (1, 0, 4, 3, 2)), held_out=True),
    Skill("to_east", _translation("east", (2, 0, 1, 3, 4)), held_out=True),
)
BY_NAME = {skill.name: skill for skill in SKILLS}
LEARNED = tuple(skill.name for skill in SKILLS if not skill.held_out)
HELD_OUT = tuple(skill.name for skill in SKILLS if skill.held_out)
VOCABULARY = (
    PAD, BOS, EOS, *SIGNS, *DIGITS, *LETTERS, *NOUNS, *ADJECTIVES, *VERBS, *FOREIGN, *BY_NAME,
)  # fmt: skip


def fingerprint() -> str:
    """A hash of what the skills are: two versions of them that give other texts differ in it."""
    samples = [[s.name, s.held_out, distinct(s.name, "test", 8)] for s in SKILLS]
    return canonical_hash([VOCABULARY, samples])[:16]


def split_of(prompt: str) -> str:
    """The set that an example belongs to, from its prompt alone."""
    number = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") % SHARE
    return {0: "test", 1: "validation"}.get(number, "train")


def stream(skill: str, split: str, seed: int) -> Iterator[Example]:
    """Endless (prompt, answer) pairs of one set, drawn with replacement.

    Raises:
        UserError: for an unknown skill or split.
    """
    if skill not in BY_NAME:
        raise UserError(f"skill {skill!r} is unknown; known: {', '.join(BY_NAME)}")
    if split not in SPLITS:
        raise UserError(f"split {split!r} is unknown; allowed: {', '.join(SPLITS)}")
    rng = random.Random(f"{skill} {split} {seed}")
    while True:
        question, answer = BY_NAME[skill].make(rng)
        prompt = " ".join([skill, ":", *question, "="])
        if split_of(prompt) == split:
            yield prompt, " ".join(answer)


def mixture(names: tuple[str, ...], split: str, seed: int) -> Iterator[Example]:
    """Endless pairs of several skills in turn."""
    streams = [stream(name, split, seed) for name in names]
    while True:
        for one in streams:
            yield next(one)


def distinct(skill: str, split: str, count: int, seed: int = 0) -> list[Example]:
    """`count` different examples of one set.

    Raises:
        UserError: where the skill does not have as many.
    """
    found: dict[str, str] = {}
    source = stream(skill, split, seed)
    for _ in range(100 * count + 1000):
        prompt, answer = next(source)
        found.setdefault(prompt, answer)
        if len(found) == count:
            return list(found.items())
    raise UserError(f"skill {skill!r} has no {count} different {split} examples; ask for fewer")
