"""Published formats: small files of the same shape, what is learned from them, and how answers are scored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.quality import commonsense, data, metamath, published
from experiments.quality.spec import QualitySpec
from tessa.errors import UserError


@pytest.fixture
def maths(tmp_path: Path) -> Path:
    rows = [
        {
            "query": f"What is {n} + {n}?",
            "response": f"Twice {n}.\nThe answer is: {2 * n}",
            "type": "GSM_AnsAug",
        }
        for n in range(60)
    ]
    rows.append({"query": "long", "response": "x" * metamath.CHAR_LIMIT, "type": "GSM_AnsAug"})
    (tmp_path / "MetaMathQA-395K.json").write_text(json.dumps(rows))
    (tmp_path / "gsm8k").mkdir()
    for split, count in (("train", 70), ("test", 4)):
        lines = [json.dumps({"question": f"{split} {n}?", "answer": f"So.\n#### {n}"}) for n in range(count)]
        (tmp_path / "gsm8k" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.fixture
def sense(tmp_path: Path) -> Path:
    def row(n: int, answer: str) -> dict[str, str]:
        return {
            "instruction": f"Question {n}. Answer format: true/false", "input": "",
            "output": f"the correct answer is {answer}", "answer": answer,
        }  # fmt: skip

    rows = [row(n, "true" if n % 2 else "solution1") for n in range(40)]
    (tmp_path / "commonsense_170k.json").write_text(json.dumps(rows))
    for task, answer in (("boolq", "false"), ("piqa", "solution2")):
        (tmp_path / "dataset" / task).mkdir(parents=True)
        tests = [row(n, answer) for n in range(100, 103)]
        (tmp_path / "dataset" / task / "test.json").write_text(json.dumps(tests))
    return tmp_path


def test_metamath_is_loaded_as_published(maths):
    pairs = data.training_pairs(QualitySpec(protocol="metamath", data=str(maths)))
    assert len(pairs) == 60  # the long one is left out
    assert pairs[3].prompt == "Question: What is 3 + 3? Think step by step.\nAnswer:"
    assert pairs[3].continuation == " Twice 3.\nThe answer is: 6"
    test = metamath.gsm8k(maths, "test")
    assert [row["prompt"] for row in test][:1] == ["Question: test 0? Think step by step.\nAnswer:"]
    validation = metamath.gsm8k(maths, "validation")
    assert len(validation) == metamath.VALIDATION_SIZE
    assert all("train " in row["prompt"] for row in validation)
    few = data.training_pairs(QualitySpec(protocol="metamath", data=str(maths), train_examples=7))
    assert len(few) == 7


@pytest.mark.parametrize(
    ("written", "reference", "right"),
    [
        ("It is 4.\nThe answer is: 72", "...\n#### 72", True),
        ("The answer is: $1,072.", "#### 72", False),
        ("The answer is: 72.00", "#### 72", True),
        ("The answer is: 50%", "#### 50", True),
        ("The answer is: 3/4.", "#### 0.75", True),
        ("The answer is: 1/0", "#### 1", False),
        ("The answer is: 5\n\nQuestion: 6", "#### 5", True),
        ("72", "#### 72", False),
        ("The answer is: x", "#### x", True),
    ],
)
def test_gsm8k_answers(written, reference, right):
    assert metamath.same(metamath.stated_answer(written), metamath.stated_answer(reference)) is right


def test_commonsense_is_loaded_as_published(sense):
    pairs = data.training_pairs(QualitySpec(protocol="commonsense", data=str(sense)))
    held = commonsense.documents(sense, "boolq", "validation")
    assert len(pairs) == 20  # half of so small a file is held back
    assert not {pair.prompt for pair in pairs} & {row["prompt"] for row in held}
    assert {row["answer"] for row in held} == {"true"}  # the others' answers are of another task
    assert pairs[0].prompt.startswith("Below is an instruction that describes a task.")
    assert "### Instruction:\n                Question" in pairs[0].prompt
    assert pairs[0].continuation.startswith("the correct answer is ")
    assert [row["answer"] for row in commonsense.documents(sense, "piqa", "test")] == ["solution2"] * 3


@pytest.mark.parametrize(
    ("task", "words", "found"),
    [
        ("boolq", "the correct answer is false, not true", "false"),
        ("piqa", "solution3 or solution2", "solution2"),
        ("ARC-Easy", "answer5", "answer5"),
        ("winogrande", "neither", None),
    ],
)
def test_commonsense_answers(task, words, found):
    assert commonsense.first_answer(words, task) == found


def test_the_tasks_of_lm_eval_load_and_score(maths, monkeypatch):
    from experiments.quality.evaluation import Evaluator

    spec = QualitySpec(protocol="metamath", data=str(maths))
    evaluate = Evaluator(spec)
    (task,) = evaluate.tasks("test")
    documents = list(task.eval_docs)
    assert [row["prompt"] for row in documents] == [row["prompt"] for row in metamath.gsm8k(maths, "test")]
    assert task.doc_to_text(documents[0]) == documents[0]["prompt"]
    assert task.process_results(documents[3], ["So.\nThe answer is: 3"]) == {"exact_match": 1.0}
    assert task.process_results(documents[3], ["The answer is: 4"]) == {"exact_match": 0.0}
    (task,) = evaluate.tasks("validation")
    assert len(task.eval_docs) == metamath.VALIDATION_SIZE


def test_files_that_are_wrong_are_named(maths):
    with pytest.raises(UserError, match="give the folder that holds MetaMathQA"):
        data.training_pairs(QualitySpec(protocol="metamath"))
    lines = (maths / "gsm8k" / "test.jsonl").read_text().splitlines()
    (maths / "gsm8k" / "test.jsonl").write_text("\n".join([lines[0], "{broken"]))
    with pytest.raises(UserError, match=r"test.jsonl:2 is not JSON"):
        metamath.gsm8k(maths, "test")
    (maths / "MetaMathQA-395K.json").write_text(json.dumps([{"query": "q"}]))
    with pytest.raises(UserError, match="entry 1 has no text under 'response'"):
        metamath.training(maths)


def test_published_scores_are_there_for_the_gpu_protocols():
    assert any(line.startswith("LoRA r32: gsm8k 47.8") for line in published.expected("metamath"))
    assert any("mean 80.8" in line for line in published.expected("commonsense"))
    assert published.expected("skills") == []
