"""Adaptation quality at matched budgets: training through PEFT, evaluation through lm-eval, cells in the same store."""
