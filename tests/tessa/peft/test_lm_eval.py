"""lm-eval's own command line scores a TESSA adapter given as ``peft=FOLDER``."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import peft
import pytest
import torch

from tessa.peft import TessaConfig

pytest.importorskip("lm_eval")

TASK = """
task: counting
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{target}}}}"
metric_list:
  - metric: perplexity
    aggregation: perplexity
    higher_is_better: false
"""


def _tokenizer(vocabulary: int):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


@pytest.mark.slow
def test_command_line_scores_the_adapter(llama, tmp_path):
    context, target = list(range(5, 15)), [17, 30]
    llama.save_pretrained(tmp_path / "base")
    _tokenizer(llama.config.vocab_size).save_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    model = peft.get_peft_model(
        llama, TessaConfig(rank_equivalent=16, init_weights=False, offset_rule="first", task_type="CAUSAL_LM")
    )
    model.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor([context + target])

    def perplexity() -> float:
        """lm-eval's: exp of minus the mean over documents of the target's summed log-probability."""
        with torch.no_grad():
            logprobs = model(ids).logits.double().log_softmax(-1)[0]
        return sum(logprobs[len(context) - 1 + i, t] for i, t in enumerate(target)).neg().exp().item()

    adapted = perplexity()
    with model.disable_adapter():
        assert abs(perplexity() / adapted - 1) > 0.05

    data = tmp_path / "data.jsonl"
    words = [" ".join(f"w{i}" for i in ids) for ids in (context, target)]
    row = {"context": words[0], "target": f" {words[1]}"}  # this task type puts no delimiter between the two
    data.write_text(json.dumps(row) + "\n")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "counting.yaml").write_text(TASK.format(data=data))
    command = [sys.executable, "-m", "tessa.lm_eval", "run", "--model", "hf"]
    command += ["--model_args", f"pretrained={tmp_path / 'base'},peft={tmp_path / 'adapter'},dtype=float32"]
    command += ["--tasks", "counting", "--include_path", str(tmp_path / "tasks"), "--device", "cpu"]
    command += ["--output_path", str(tmp_path / "out.json")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (result,) = tmp_path.glob("out*.json")
    scored = json.loads(result.read_text())["results"]["counting"]["perplexity,none"]
    assert scored == pytest.approx(adapted, rel=1e-3)
