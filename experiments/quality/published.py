"""Published scores of the GPU protocols, printed beside ours. Percent of right answers."""

from __future__ import annotations

from collections.abc import Mapping

METAMATH: Mapping[str, float] = {
    "LoRA r32": 47.8,
    "LoRA r64, rank-stabilised": 51.3,
    "BD-LoRA": 48.7,
    "SHiRA": 51.0,
    "full fine-tuning": 47.2,
}
"""Llama-3.2-3B on GSM8K, huggingface/peft, method_comparison/MetaMathQA; one standard error is 1.4 points."""

COMMONSENSE: Mapping[str, Mapping[str, float]] = {
    "LoRA r32": {
        "boolq": 70.8, "piqa": 85.2, "social_i_qa": 79.9, "hellaswag": 91.7, "winogrande": 84.3, "arc_easy": 84.2,
        "arc_challenge": 71.2, "openbookqa": 79.0,
    },
    "DoRA r32": {
        "boolq": 74.6, "piqa": 89.3, "social_i_qa": 79.9, "hellaswag": 95.5, "winogrande": 85.6, "arc_easy": 90.5,
        "arc_challenge": 80.4, "openbookqa": 85.8,
    },
}  # fmt: skip
"""Llama-3-8B trained on commonsense-170k, NVlabs/DoRA (arXiv 2402.09353)."""


def expected(protocol: str) -> list[str]:
    """A line per published method; none for protocols of our own."""
    if protocol == "metamath":
        return [f"{name}: gsm8k {score}" for name, score in METAMATH.items()]
    if protocol == "commonsense":
        return [
            f"{name}: {', '.join(f'{task} {score}' for task, score in scores.items())}; "
            f"mean {sum(scores.values()) / len(scores):.1f}"
            for name, scores in COMMONSENSE.items()
        ]
    return []
