"""Makes a larger model with the embedded one's tokenizer, so that the embedded one can draft for it: `python -m
benchmarks.larger_model CORPUS OUT [--minutes 20]`.

The embedded model grows to 40 M parameters (Chen et al., 2016, Net2Net): twice the layers and a wider MLP, whose new
units add nothing yet. Then it is trained on the .txt files in CORPUS.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common.options import options
from benchmarks.common.training import train
from quire.engine.common.config import DEMO_MODEL

INTERMEDIATE = 3968
WINDOW, ROWS = 256, 4


def grown(small: Path) -> LlamaForCausalLM:
    """It computes the same as the small model."""
    config = json.loads((small / "config.json").read_text("utf-8"))
    layers, old = config["num_hidden_layers"], config["intermediate_size"]
    config |= {"num_hidden_layers": 2 * layers, "intermediate_size": INTERMEDIATE}
    model = LlamaForCausalLM(LlamaConfig(**config)).float()
    weights = load_file(small / "model.safetensors")
    table = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in table.items():
            _, _, rest = name.partition("model.layers.")
            index, _, part = rest.partition(".")
            if not rest:
                parameter.copy_(weights[name])
            elif part.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            if rest and not int(index) % 2:  # layers copied from the small model
                given = weights[f"model.layers.{int(index) // 2}.{part}"]
                wide = "gate_proj" in part or "up_proj" in part
                kept = parameter[:old] if wide else parameter[:, :old] if "down_proj" in part else parameter
                kept.copy_(given)
    return model


def encoded(corpus: Path, tokenizer: Tokenizer) -> Tensor:
    """Returns all tokens, concatenated: [tokens]."""
    end = tokenizer.token_to_id("<|endoftext|>")
    texts = [path.read_text("utf-8") for path in sorted(corpus.glob("*.txt"))]
    return torch.tensor([token for text in texts for token in [*tokenizer.encode(unwrapped(text)).ids, end]])


def unwrapped(text: str) -> str:
    """One line per paragraph, as in the embedded model's training."""
    return "\n\n".join(" ".join(part.split()) for part in text.replace("\r\n", "\n").split("\n\n") if part.strip())


def main() -> None:
    args = options(
        __doc__,
        {
            "corpus": Path,
            "out": Path,
            "--minutes": 20.0,
            "--rate": {"default": 2e-4, "help": "the highest learning rate"},
            "--threads": 1,
        },
    )
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    small = Path(DEMO_MODEL)
    model = grown(small)
    print(f"{sum(each.numel() for each in model.parameters()) / 1e6:.1f} M parameters")
    tokens = encoded(args.corpus, Tokenizer.from_file(str(small / "tokenizer.json")))

    def loss() -> Tensor:
        starts = torch.randint(len(tokens) - WINDOW - 1, (ROWS,)).tolist()
        rows = torch.stack([tokens[start : start + WINDOW + 1] for start in starts])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    train(model.parameters(), loss, ROWS * WINDOW, args.minutes, args.rate)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(small / name, args.out / name)
    model.config.save_pretrained(args.out)
    tensors = {name: each.detach().bfloat16().contiguous() for name, each in model.named_parameters()}
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
