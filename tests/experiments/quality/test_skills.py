"""Skills: each rule by hand, and sets that share no example."""

from __future__ import annotations

import itertools
import random

import pytest

from experiments.quality import skills
from tessa.errors import UserError

LETTERS = "abcdefghijklmnop"


def made(name: str, seed: int = 0) -> tuple[list[str], list[str]]:
    return skills.BY_NAME[name].make(random.Random(seed))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("copy", lambda x: x),
        ("reverse", lambda x: x[::-1]),
        ("next", lambda x: [LETTERS[(LETTERS.index(c) + 1) % 16] for c in x]),
        ("swap", lambda x: [x[1], x[0], x[3], x[2], x[4]]),
        ("reverse_next", lambda x: [LETTERS[(LETTERS.index(c) + 1) % 16] for c in x[::-1]]),
        ("plus_3", lambda x: [str((int(c) + 3) % 10) for c in x]),
        ("plus_5", lambda x: [str((int(c) + 5) % 10) for c in x]),
    ],
)
def test_string_skills(name, rule, seed):
    question, answer = made(name, seed)
    assert answer == rule(question)


def test_languages_have_vocabularies_and_orders_of_their_own():
    lexicons = {}
    for name, order in (
        ("to_north", (1, 0, 4, 3, 2)),
        ("to_south", (2, 0, 1, 3, 4)),
        ("to_west", (1, 0, 4, 3, 2)),
        ("to_east", (2, 0, 1, 3, 4)),
    ):
        lexicon: dict[str, str] = {}
        for seed in range(200):
            question, answer = made(name, seed)
            for word, foreign in zip([question[i] for i in order], answer, strict=True):
                assert lexicon.setdefault(word, foreign) == foreign
        assert len(lexicon) == len(set(lexicon.values())) == 20
        lexicons[name] = lexicon
    same = sum(lexicons["to_west"][word] == lexicons["to_north"][word] for word in lexicons["to_west"])
    assert same <= 4


def test_the_sets_share_no_prompt_and_none_is_learned_before():
    seen = {
        split: {prompt for prompt, _ in skills.distinct("reverse_next", split, 300, seed)}
        for seed, split in enumerate(skills.SPLITS)
    }
    assert not seen["train"] & seen["test"]
    assert not seen["train"] & seen["validation"]
    assert not seen["validation"] & seen["test"]
    assert not set(skills.LEARNED) & set(skills.HELD_OUT)
    assert len(skills.HELD_OUT) >= 3


def test_the_same_seed_gives_the_same_examples():
    first = list(itertools.islice(skills.mixture(skills.LEARNED, "train", 3), 50))
    again = list(itertools.islice(skills.mixture(skills.LEARNED, "train", 3), 50))
    other = list(itertools.islice(skills.mixture(skills.LEARNED, "train", 4), 50))
    assert first == again != other
    assert {prompt.split()[0] for prompt, _ in first} == set(skills.LEARNED)


def test_every_word_is_in_the_vocabulary_once():
    words = {
        word
        for name in skills.BY_NAME
        for prompt, answer in skills.distinct(name, "test", 30)
        for word in f"{prompt} {answer}".split()
    }
    assert words <= set(skills.VOCABULARY)
    assert len(set(skills.VOCABULARY)) == len(skills.VOCABULARY)


def test_more_examples_than_there_are_is_an_error(monkeypatch):
    monkeypatch.setitem(skills.BY_NAME, "one", skills.Skill("one", lambda rng: (["a"], ["b"])))
    split = skills.split_of("one : a =")
    assert skills.distinct("one", split, 1) == [("one : a =", "b")]
    with pytest.raises(UserError, match="ask for fewer"):
        skills.distinct("one", split, 2)
    with pytest.raises(UserError, match="unknown; known: copy"):
        next(skills.stream("juggle", "train", 0))
