"""Model specifications from conf/model/*.yaml, and the folders that an engine loads them from.

Three sources. `generated`: a small Llama-architecture checkpoint with random weights that the project writes
itself. `hub`: a published model; with `weights=dummy` only its architecture is used, which stands in the
YAML, so that nothing is downloaded. `path`: a folder on disk.

The parent process of a run imports this module, so nothing here imports torch, transformers or NumPy; the
folders are written by a child process, `python -m experiments.models NAME [CACHE_DIR]`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from tessa.errors import UserError

REPO = Path(__file__).resolve().parents[1]
CONF = REPO / "conf" / "model"
# Part of every folder's name: raise it when the same specification starts to give other files.
FORMAT = 1
WEIGHTS = {"generated": ("random", "dummy"), "hub": ("hub", "dummy"), "path": ("path", "dummy")}
DTYPES = ("auto", "float32", "bfloat16", "float16")
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
MIN_CPU_HEAD_DIM = 32
SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class ModelSpec:
    """One model. `architecture` holds Hugging Face config values without vocab_size, which is a field here.

    `dtype` is the default to run in, not the dtype on disk: generated weights are stored in float32.
    """

    name: str
    source: str
    weights: str
    architecture: Mapping[str, Any] = field(default_factory=dict)
    vocab_size: int = 0
    max_model_len: int = 2048
    dtype: str = "bfloat16"
    seed: int = 0
    tokenizer: str = "generated"
    hub_id: str | None = None
    revision: str | None = None
    path: str | None = None

    @property
    def hidden_size(self) -> int:
        return int(self.architecture["hidden_size"])

    @property
    def intermediate_size(self) -> int:
        return int(self.architecture["intermediate_size"])

    @property
    def num_layers(self) -> int:
        return int(self.architecture["num_hidden_layers"])

    @property
    def num_heads(self) -> int:
        return int(self.architecture["num_attention_heads"])

    @property
    def num_kv_heads(self) -> int:
        return int(self.architecture["num_key_value_heads"])

    @property
    def head_dim(self) -> int:
        return int(self.architecture.get("head_dim") or self.hidden_size // self.num_heads)

    @property
    def load_format(self) -> str:
        """vLLM's load_format for the folder of ensure_model."""
        return "dummy" if self.weights == "dummy" else "safetensors"

    @property
    def hash(self) -> str:
        """sha256 over what determines the files of the folder (not over name, dtype and max_model_len)."""
        parts = {
            "format": FORMAT,
            "weights": self.weights,
            "architecture": dict(self.architecture),
            "vocab_size": self.vocab_size,
            "tokenizer": self.tokenizer,
            "seed": self.seed if self.weights == "random" else None,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Every projection of every layer: module path -> (d_out, d_in), unsharded, in layer order."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        per_layer = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        return {f"model.layers.{i}.{m}": s for i in range(self.num_layers) for m, s in per_layer.items()}


def known_models(conf: Path = CONF) -> list[str]:
    return sorted(file.stem for file in conf.glob("*.yaml"))


def load_named(name: str, conf: Path = CONF) -> ModelSpec:
    """The specification in conf/model/<name>.yaml. Raises UserError for an unknown name."""
    if name not in known_models(conf):
        raise UserError(f"unknown model {name!r}; known: {', '.join(known_models(conf))} (files in {conf})")
    return load_spec(yaml.safe_load((conf / f"{name}.yaml").read_text()))


def _plain(value: Any) -> Any:
    """Hydra's containers as dicts and lists, which json can write."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def load_spec(values: Mapping[str, Any]) -> ModelSpec:
    """Check the values of one model (a dict or Hydra's) and make the specification. Raises UserError."""
    values = _plain(values)
    known = {f.name for f in fields(ModelSpec)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise UserError(f"model: unknown key {unknown[0]!r}; allowed: {', '.join(sorted(known))}")
    missing = [key for key in ("name", "source", "weights") if not values.get(key)]
    if missing:
        raise UserError(f"model: {missing[0]!r} is missing; conf/model/small.yaml shows a complete file")
    spec = ModelSpec(**values)
    label = f"model {spec.name!r}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", spec.name):
        raise UserError(f"{label}: a name may hold letters, digits, dot, dash and underscore")
    if spec.source not in WEIGHTS:
        raise UserError(f"{label}: source={spec.source!r}; allowed: {', '.join(WEIGHTS)}")
    if spec.weights not in WEIGHTS[spec.source]:
        allowed = ", ".join(WEIGHTS[spec.source])
        raise UserError(f"{label}: weights={spec.weights!r} with source={spec.source}; allowed: {allowed}")
    if spec.dtype not in DTYPES:
        raise UserError(f"{label}: dtype={spec.dtype!r}; allowed: {', '.join(DTYPES)}")
    if spec.tokenizer != "generated":
        raise UserError(
            f"{label}: tokenizer={spec.tokenizer!r}; the only value is 'generated' "
            "(a downloaded model or a folder brings its own tokenizer and ignores this)"
        )
    if spec.source == "hub" and not spec.hub_id:
        raise UserError(f"{label}: source=hub needs hub_id, for example hub_id=Qwen/Qwen3-8B")
    if spec.source == "path":
        spec = _with_folder_config(spec)
    _check_sizes(spec, label)
    return spec


def _with_folder_config(spec: ModelSpec) -> ModelSpec:
    """Fill architecture and vocab_size of a model on disk from its config.json."""
    if not spec.path:
        raise UserError(f"model {spec.name!r}: source=path needs the folder, model.path=/folder/of/the/model")
    folder = Path(spec.path).expanduser().absolute()
    if not (folder / "config.json").is_file():
        what = "holds no config.json" if folder.is_dir() else "does not exist"
        raise UserError(f"model {spec.name!r}: folder {folder} {what}; give a Hugging Face model folder")
    if spec.weights == "path" and not any(folder.glob("*.safetensors")):
        raise UserError(
            f"model {spec.name!r}: {folder} holds no *.safetensors; convert it or use weights=dummy"
        )
    try:
        config = json.loads((folder / "config.json").read_text())
        vocab_size = int(config.pop("vocab_size"))
    except (ValueError, KeyError, AttributeError) as error:
        raise UserError(f"model {spec.name!r}: {folder}/config.json cannot be used: {error!r}") from error
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    limit = config.get("max_position_embeddings") or spec.max_model_len
    changes = {
        "path": str(folder),
        "architecture": config,
        "vocab_size": vocab_size,
        "max_model_len": min(spec.max_model_len, limit),
    }
    return ModelSpec(**{**asdict(spec), **changes})


def _check_sizes(spec: ModelSpec, label: str) -> None:
    arch = spec.architecture
    if "vocab_size" in arch:
        raise UserError(f"{label}: put vocab_size beside architecture, not inside it")
    if not arch.get("model_type"):
        raise UserError(f"{label}: architecture.model_type is missing, for example llama or qwen3")
    for key in SIZES:
        if not isinstance(arch.get(key), int) or arch[key] < 1:
            raise UserError(f"{label}: architecture.{key} must be a positive integer, is {arch.get(key)!r}")
    if spec.num_heads % spec.num_kv_heads:
        raise UserError(
            f"{label}: {spec.num_heads} heads cannot share {spec.num_kv_heads} KV heads; "
            "num_key_value_heads must divide num_attention_heads"
        )
    if not 1 <= spec.max_model_len <= arch["max_position_embeddings"]:
        raise UserError(
            f"{label}: max_model_len={spec.max_model_len}; allowed: 1 to "
            f"architecture.max_position_embeddings={arch['max_position_embeddings']}"
        )
    if spec.source == "path":
        return
    if spec.vocab_size < 256 + len(SPECIAL_IDS):
        raise UserError(
            f"{label}: vocab_size={spec.vocab_size}; at least 259 (256 bytes and 3 special tokens)"
        )
    for key in SPECIAL_IDS:
        if arch.get(key) is not None and not 0 <= arch[key] < spec.vocab_size:
            raise UserError(f"{label}: {key}={arch[key]} lies outside the vocabulary of {spec.vocab_size}")
    if spec.source == "generated":
        if arch["model_type"] != "llama":
            raise UserError(f"{label}: model_type={arch['model_type']!r}; only llama models can be generated")
        if spec.head_dim < MIN_CPU_HEAD_DIM:
            raise UserError(
                f"{label}: head_dim={spec.head_dim}; "
                f"vLLM's attention on the CPU needs at least {MIN_CPU_HEAD_DIM}"
            )


def allowed_parallel(spec: ModelSpec) -> list[int]:
    """Tensor-parallel degrees at which every rank gets whole heads; KV heads may be split or repeated."""
    return [
        tp
        for tp in range(1, spec.num_heads + 1)
        if spec.num_heads % tp == 0
        and (spec.num_kv_heads % tp == 0 or tp % spec.num_kv_heads == 0)
        and spec.intermediate_size % tp == 0
    ]


def check_parallel(spec: ModelSpec, tp: int) -> None:
    """Raise UserError unless the model can be split over `tp` ranks."""
    allowed = allowed_parallel(spec)
    if tp not in allowed:
        raise UserError(
            f"tp={tp} does not fit model {spec.name!r} "
            f"({spec.num_heads} heads, {spec.num_kv_heads} KV heads, "
            f"intermediate size {spec.intermediate_size}); "
            f"allowed: {', '.join(map(str, allowed))}"
        )


def default_cache() -> Path:
    """$TESSA_CACHE, or ~/.cache/tessa-bench."""
    return Path(os.environ.get("TESSA_CACHE") or "~/.cache/tessa-bench").expanduser().absolute()


def model_folder(spec: ModelSpec, cache: Path) -> Path:
    """Where ensure_model puts a model that the project writes itself."""
    return cache / "models" / f"{spec.name}-{spec.hash[:12]}"


def ensure_model(spec: ModelSpec, cache: Path | None = None) -> Path:
    """The folder to load `spec` from, made first when missing; `cache` defaults to default_cache().

    A folder with this name is complete: it is written elsewhere and renamed. Raises UserError for what the
    user can mend (cache inside the repository, model not to be had), RuntimeError when the child fails.
    """
    if spec.source == "path":
        return Path(spec.path or "")
    cache = (cache or default_cache()).expanduser().absolute()
    if cache.is_relative_to(REPO) and not cache.is_relative_to(REPO / ".cache"):
        raise UserError(
            f"the model cache {cache} lies inside the repository; set TESSA_CACHE to a folder outside it"
        )
    folder = model_folder(spec, cache)
    if spec.weights != "hub" and folder.is_dir():
        return folder
    command = [sys.executable, "-m", "experiments.models", spec.name, str(cache), "--spec", "-"]
    child = subprocess.run(
        command, cwd=REPO, input=json.dumps(asdict(spec)), capture_output=True, text=True, check=False
    )
    if child.returncode == 2:
        raise UserError(child.stderr.strip())
    if child.returncode != 0:
        tail = "\n".join(child.stderr.splitlines()[-15:])
        raise RuntimeError(f"making model {spec.name!r} failed with exit status {child.returncode}:\n{tail}")
    return Path(child.stdout.splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> int:
    """Make one model and print its folder. Exit status 2 and a message on stderr for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m experiments.models", description=main.__doc__)
    parser.add_argument("name", help="a file of conf/model without .yaml")
    parser.add_argument("cache", nargs="?", type=Path, default=None, help="default: $TESSA_CACHE")
    parser.add_argument("--spec", help="JSON file with the whole specification, - for standard input")
    args = parser.parse_args(argv)
    try:
        if args.spec:
            text = sys.stdin.read() if args.spec == "-" else Path(args.spec).read_text()
            spec = load_spec(json.loads(text))
        else:
            spec = load_named(args.name)
        # Only here, as the process that gets this far is the child.
        from experiments import model_build

        if spec.source == "path":
            print(spec.path)
        elif spec.weights == "hub":
            print(model_build.download(spec))
        else:
            print(model_build.build(spec, model_folder(spec, args.cache or default_cache())))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
