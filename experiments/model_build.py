"""Write a generated model's folder: config, tokenizer and, unless the weights are dummy, random weights.

Runs in the child process of experiments.models; the parent of a run never imports it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from experiments.models import ModelSpec
from tessa.errors import UserError

# Scales of the random weights, relative to unit-variance outputs (standard deviation gain / sqrt(fan-in)).
# Queries and keys are sharp enough for attention to depend on the prompt: at gain 1 it is close to an average
# of all positions, and an error in the KV cache would hardly move the output. Logits with a standard
# deviation of 2.5 make some tokens clearly likelier than others without one winning everywhere.
GAINS = {"q_proj": 1.5, "k_proj": 1.5, "lm_head": 2.5}


def build(spec: ModelSpec, folder: Path) -> Path:
    """Write the folder unless it exists, and return it.

    The files are written into a scratch folder beside it that is renamed when it is complete. A lock lets one
    process write a given model at a time, so a scratch folder found under the lock was left by a killed one.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        for stale in folder.parent.glob(f".{folder.name}.tmp-*"):
            shutil.rmtree(stale, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
        try:
            write_config(spec, scratch)
            write_tokenizer(spec, scratch)
            if spec.weights == "random":
                save_file(random_weights(spec), scratch / "model.safetensors", metadata={"format": "pt"})
            # Both were made readable by their owner alone; a cache may be shared.
            for path in (scratch, *scratch.iterdir()):
                path.chmod(0o755 if path.is_dir() else 0o644)
            os.rename(scratch, folder)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    return folder


def write_config(spec: ModelSpec, folder: Path) -> None:
    """Write config.json. Plain JSON, as importing transformers for it takes longer than everything else here."""
    values = {"vocab_size": spec.vocab_size, "use_cache": True, **spec.architecture}
    values.setdefault("dtype", "float32" if spec.source == "generated" else "bfloat16")
    write_json(folder / "config.json", values)


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def write_tokenizer(spec: ModelSpec, folder: Path) -> None:
    """Write a byte-level tokenizer with exactly vocab_size tokens.

    Text becomes its bytes, so any text survives a round trip. The ids that are neither bytes nor special
    tokens decode to made-up words: an engine can turn every id that a model produces into text.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special: dict[str, int] = {}
    for token in ("pad", "bos", "eos"):
        number = spec.architecture.get(f"{token}_token_id")
        if number is not None and number not in special.values():
            special[f"<{token}>"] = number
    free = (i for i in range(spec.vocab_size) if i not in special.values())
    vocab = dict(special)
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[character] = next(free)
    # The byte-level alphabet writes a space as this letter.
    vocab.update({f"Ġw{i}": i for i in free})

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{token}_token": f"<{token}>" for token in ("pad", "bos", "eos") if f"<{token}>" in special}
    if "eos_token" in names:
        names.setdefault("pad_token", names["eos_token"])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": spec.architecture["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", {**settings, **names})


def random_weights(spec: ModelSpec) -> dict[str, np.ndarray]:
    """Weights of a Llama-architecture model, float32, named as Hugging Face names them.

    Each tensor has its own random stream, made from the seed and its name, so that a model with another
    number of layers keeps the tensors it shares with this one.
    """
    hidden = spec.hidden_size
    weights: dict[str, np.ndarray] = {}

    def normal(name: str, shape: tuple[int, int], std: float) -> None:
        stream = np.random.default_rng([spec.seed, zlib.crc32(name.encode())])
        weights[name] = stream.standard_normal(shape, dtype=np.float32) * np.float32(std)

    # Unit variance: the layers' outputs and the embedding weigh about the same in the residual stream.
    normal("model.embed_tokens.weight", (spec.vocab_size, hidden), 1.0)
    for module, (d_out, d_in) in spec.linear_shapes().items():
        gain = GAINS.get(module.rsplit(".", 1)[1], 1.0)
        normal(f"{module}.weight", (d_out, d_in), gain / d_in**0.5)
    for layer in range(spec.num_layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = np.ones(hidden, np.float32)
    weights["model.norm.weight"] = np.ones(hidden, np.float32)
    if not spec.architecture.get("tie_word_embeddings"):
        normal("lm_head.weight", (spec.vocab_size, hidden), GAINS["lm_head"] / hidden**0.5)
    return weights


def download(spec: ModelSpec) -> Path:
    """Fetch a published model into Hugging Face's own cache, or find it there, and return its folder."""
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
    options: dict[str, Any] = {"revision": spec.revision, "allow_patterns": wanted}
    try:
        return Path(snapshot_download(str(spec.hub_id), **options))
    except Exception as error:
        # Any cause (no network, gated, unknown id) ends at the same choice for the user.
        cause = str(error).strip().splitlines()
        raise UserError(
            f"model {spec.name!r}: {spec.hub_id} could not be downloaded: {cause[0] if cause else error!r}\n"
            "Check the network, accept the model's licence and set HF_TOKEN; or use model.weights=dummy "
            "(timing without downloads); or point model=local model.path=FOLDER at a copy."
        ) from error
