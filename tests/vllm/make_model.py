"""A model for a real vLLM on a CPU: random weights of a few megabytes, with the local model's tokenizer and ChatML.

`python make_model.py FOLDER [--seed N]`. What it samples is noise: texts that no tokenizer would write so, characters
cut in two, and once in a while a special token. Its template is that of the scripted server, whose prompts are
compared with its own, id by id. Another seed makes other weights for the same model: a checkpoint of the next version.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from pathlib import Path

import numpy as np

from rollyard.gateway.local_model import demo_model_path
from rollyard.gateway.scripted import chatml
from rollyard.gateway.tokens.tokenizer import TextTokenizer, load_tokenizer
from rollyard.schemas.errors import RollyardError

_HIDDEN, _INNER, _LAYERS, _HEADS = 64, 128, 2, 2
# So wide that logits differ: logprobs of a flat distribution would all look alike.
_SPREAD = 0.3


def make_model(folder: Path, seed: int = 1) -> Path:
    """Write the model's files, and return the folder. Raises SetupError when the local model is not installed."""
    tokenizer = load_tokenizer(demo_model_path())
    folder.mkdir(parents=True, exist_ok=True)
    # Whole ids of a vocabulary can only be had from the library's own object.
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", _tokenizer_config(tokenizer))
    _write(folder / "config.json", _config(tokenizer))
    _write(folder / "generation_config.json", {"eos_token_id": sorted(tokenizer.eos_ids), "do_sample": True})
    (folder / "model.safetensors").write_bytes(_safetensors(_weights(tokenizer.vocab_size, seed)))
    return folder


def _config(tokenizer: TextTokenizer) -> dict[str, object]:
    return {
        # Not qwen2: for that, transformers cuts text as Qwen's models want it, whatever tokenizer.json says.
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.specials[tokenizer.bos_token],
        "eos_token_id": tokenizer.specials[tokenizer.eos_token],
        "torch_dtype": "bfloat16",
    }


def _tokenizer_config(tokenizer: TextTokenizer) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "chat_template": chatml.TEMPLATE,
    }


def _weights(vocab_size: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)

    def noise(*shape: int) -> np.ndarray:
        return random.normal(0.0, _SPREAD, shape).astype(np.float32)

    ones = np.ones(_HIDDEN, dtype=np.float32)
    weights = {
        "model.embed_tokens.weight": noise(vocab_size, _HIDDEN),
        "lm_head.weight": noise(vocab_size, _HIDDEN),
        "model.norm.weight": ones,
    }
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}"
        weights |= {f"{name}.{norm}_layernorm.weight": ones for norm in ("input", "post_attention")}
        for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{name}.self_attn.{projection}.weight"] = noise(_HIDDEN, _HIDDEN)
        weights[f"{name}.mlp.gate_proj.weight"] = noise(_INNER, _HIDDEN)
        weights[f"{name}.mlp.up_proj.weight"] = noise(_INNER, _HIDDEN)
        weights[f"{name}.mlp.down_proj.weight"] = noise(_HIDDEN, _INNER)
    return weights


def _safetensors(weights: dict[str, np.ndarray]) -> bytes:
    """The weights as bfloat16, which NumPy has not: the upper half of a float32."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    parts, at = [], 0
    for name, value in weights.items():
        part = (np.ascontiguousarray(value).view("<u4") >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": [at, at + len(part)]}
        parts.append(part)
        at += len(part)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + b"".join(parts)


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2), "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    try:
        print(make_model(options.folder, options.seed))
    except RollyardError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
