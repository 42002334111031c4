"""Trains a small draft head for the embedded model on stories that this writes: `python -m benchmarks.train_head OUT
[--method eagle3] [--stories 96] [--rounds 6]`.

Serve OUT with `quire serve --speculative-config '{"method": "eagle3", "model": "OUT"}'`. With `--method mtp` OUT is the
embedded model with an MTP layer: `quire serve OUT --speculative-config mtp`. `--layers 48` adds 42 layers that change
nothing: cost of a larger model, same stories and acceptance.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from benchmarks.common.options import options
from benchmarks.common.training import Descent
from quire.engine.common.config import DEMO_MODEL, EngineConfig
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from quire.engine.text.tokenizer import Tokenizer
from tests.engine.harness import run
from tests.tiny_heads import (
    Reference,
    Tensors,
    eagle3_tensors,
    eagle_config,
    eagle_tensors,
    medusa_tensors,
    save_head,
)

TAPS = [1, 3, 5]
WHO = ["fox", "king", "witch", "ship", "mouse", "princess", "giant", "tree", "soldier", "fairy", "wolf", "ring"]
MEDUSA_HEADS = 3


def story_requests(count: int, seed: int, tokens: int = 256) -> list[EngineCoreRequest]:
    """Requests for stories, as the server's page makes them."""
    tokenizer = Tokenizer.from_pretrained(Path(DEMO_MODEL))
    params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=tokens, ignore_eos=True)
    found = []
    for number in range(count):
        request = f"Tell me a story about a {WHO[(number + seed) % len(WHO)]}."
        text = f"<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer.backend.encode(text, add_special_tokens=False).ids
        found.append(EngineCoreRequest(id=str(number), prompt_ids=ids, params=params, seed=1000 * seed + number))
    return found


def told(count: int, seed: int) -> list[list[int]]:
    """Stories with their requests."""
    engine = EngineCore(EngineConfig(threads=torch.get_num_threads(), max_model_len=512, num_kv_blocks=800))
    requests = story_requests(count, seed)
    answers = run(engine, requests)
    return [[*each.prompt_ids, *answers[each.id].ids] for each in requests]


def new_head(method: str, hidden: int, head: Tensor) -> tuple[Tensors, list[str]]:
    """Returns tensors, and the names of those to train."""
    vocab = len(head)
    if method == "medusa":
        tensors = medusa_tensors(hidden, vocab, MEDUSA_HEADS)
        tensors = {name: head.clone() if name.endswith(".1.weight") else each / 10 for name, each in tensors.items()}
    elif method == "eagle":
        tensors = eagle_tensors(hidden, vocab)
        tensors["fc.weight"] = torch.cat((torch.eye(hidden), torch.eye(hidden)), 1) + tensors["fc.weight"] / 10
        tensors["fc.bias"] /= 10
    else:
        tensors = eagle3_tensors(hidden, vocab, len(TAPS), said=vocab)
        tensors["lm_head.weight"] = head.clone()
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = tensors[name] / 10
    return tensors, [name for name in tensors if name not in ("embed_tokens.weight", "d2t", "t2d")]


class MtpHead(torch.nn.Module):
    """The embedded model's last layer after a linear of hidden state and embedding, as in tests/tiny_heads.py."""

    third = medusa = False

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = copy.deepcopy(model.config)
        config.num_hidden_layers = 1
        hidden = config.hidden_size
        self.body = AutoModel.from_config(config).float()
        self.body.layers[0].load_state_dict(model.model.layers[-1].state_dict())
        self.body.norm.load_state_dict(model.model.norm.state_dict())
        self.embedding, self.head = model.get_input_embeddings().weight.data, model.lm_head.weight.data
        self.norms = torch.nn.ModuleDict({each: torch.nn.RMSNorm(hidden, config.rms_norm_eps) for each in "eh"})
        self.join = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.join.weight.data = torch.cat((torch.eye(hidden), torch.eye(hidden)), 1)

    def read(self, hidden: Tensor, tapped: list[Tensor]) -> Tensor:
        return hidden

    def layer(self, following: Tensor, read: Tensor) -> Tensor:
        joined = torch.cat((self.norms["e"](self.embedding[following]), self.norms["h"](read)), -1)
        found: Tensor = self.body(inputs_embeds=self.join(joined)[None], use_cache=False).last_hidden_state[0]
        return found

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self.head)

    @property
    def trained(self) -> list[Tensor]:
        return [each for name, each in self.named_parameters() if "embed_tokens" not in name]

    def tensors(self) -> Tensors:
        """Tensors in Qwen's published layout."""
        layer = {f"mtp.layers.0.{name}": each for name, each in self.body.layers[0].state_dict().items()}
        norms = {
            "pre_fc_norm_embedding": self.norms["e"],
            "pre_fc_norm_hidden": self.norms["h"],
            "norm": self.body.norm,
        }
        return layer | {
            "mtp.fc.weight": self.join.weight,
            **{f"mtp.{name}.weight": norm.weight for name, norm in norms.items()},
        }


def loss_of(
    reference: Reference | MtpHead, hidden: Tensor, tapped: list[Tensor], ids: Tensor, wanted: Tensor
) -> Tensor:
    """Cross-entropy between model and head, in nats. `wanted`: the model's logits [T, vocab]."""
    if reference.medusa:
        losses = [
            F.cross_entropy(reference.medusa_logits(hidden[: -1 - head], head), wanted[1 + head :].softmax(-1))
            for head in range(MEDUSA_HEADS)
        ]
        return torch.stack(losses).mean()
    read, losses = reference.read(hidden, tapped)[:-1], []
    for ahead in range(2):  # from the model's hidden states, then from the head's prediction of them
        following, target = ids[1 + ahead :], wanted[1 + ahead :]
        states = reference.layer(following, read[: len(following)])
        losses.append(F.cross_entropy(reference.logits(states), target.softmax(-1)))
        if not reference.third:
            losses.append(F.smooth_l1_loss(states[: len(hidden) - 1 - ahead], hidden[1 + ahead :]) / 2)
        read = states[:-1]
    return torch.stack(losses).sum()


def train(method: str, texts: list[list[int]], rounds: int) -> Tensors:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL).float()
    if method == "mtp":
        module = MtpHead(model)
        descend(module, module.trained, model, texts, rounds)
        return {name: each.detach().contiguous() for name, each in module.tensors().items()}
    head = model.lm_head.weight.data
    tensors, trained = new_head(method, head.shape[1], head)
    parameters = [tensors[name].requires_grad_() for name in trained]
    descend(Reference(tensors, model.get_input_embeddings().weight.data, head), parameters, model, texts, rounds)
    return {name: each.detach().contiguous() for name, each in tensors.items()}


def descend(
    reference: Reference | MtpHead, parameters: list[Tensor], model: Any, texts: list[list[int]], rounds: int
) -> None:
    descent, steps = Descent(parameters, decay=0.0), rounds * len(texts)
    for number in range(rounds):
        for text in texts:
            ids = torch.tensor(text)
            with torch.no_grad():
                output = model(ids[None], output_hidden_states=True)
            layers = [each[0] for each in output.hidden_states]
            loss = loss_of(reference, layers[-1], [layers[tap] for tap in TAPS], ids, output.logits[0])
            done = len(descent.losses)
            descent.step(loss, 2e-3 * min(1.0, (done + 1) / 20) * (1 - done / steps))
        print(f"round {number + 1}: loss {descent.mean(len(texts)):.3f}", flush=True)


def train_head(path: Path, method: str, stories: int, rounds: int, layers: int = 6) -> Path:
    """Writes the head in the method's published layout. `layers`: number of layers of a model with an MTP layer."""
    torch.manual_seed(0)
    tensors = train(method, told(stories, seed=1), rounds)
    if method == "mtp":
        return save_deeper(path, tensors, layers)
    vocab, hidden = 4096, 256
    config = eagle_config(hidden, vocab)
    if method == "eagle3":
        config |= {"draft_vocab_size": vocab, "eagle_config": {"eagle_aux_hidden_state_layer_ids": TAPS}}
    file = {"eagle": "pytorch_model.bin", "eagle3": "model.safetensors", "medusa": "medusa_lm_head.pt"}[method]
    return save_head(path, tensors, config, file)


def save_deeper(path: Path, more: Tensors, layers: int) -> Path:
    shutil.copytree(DEMO_MODEL, path, ignore=shutil.ignore_patterns("training"))
    config = json.loads((path / "config.json").read_text())
    tensors, own = load_file(path / "model.safetensors"), config["num_hidden_layers"]
    last = {name: each for name, each in tensors.items() if name.startswith(f"model.layers.{own - 1}.")}
    for layer in range(own, layers):
        for name, each in last.items():
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            copied = torch.zeros_like(each) if adds else each.clone()
            tensors[name.replace(f".{own - 1}.", f".{layer}.", 1)] = copied
    kind = tensors["model.norm.weight"].dtype
    tensors |= {name: each.to(kind) for name, each in more.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": max(own, layers)}))
    return path


def main() -> None:
    args = options(
        __doc__,
        {
            "out": Path,
            "--method": {"choices": ["eagle", "eagle3", "medusa", "mtp"], "default": "eagle3"},
            "--stories": 96,
            "--rounds": 6,
            "--threads": 1,
            "--layers": {"default": 6, "help": "of the model with an MTP layer"},
        },
    )
    torch.set_num_threads(args.threads)
    train_head(args.out, args.method, args.stories, args.rounds, args.layers)


if __name__ == "__main__":
    main()
