"""Train Quire's demo model, a byte-level BPE tokenizer and a small Llama, on a CPU.

    python configs/demo/training/train.py CORPUS_DIR OUT_DIR [--minutes 80] [--tokens N] [--threads 2] [--seed 0]

CORPUS_DIR: see corpus.py. OUT_DIR becomes a transformers folder, written every few minutes, and on Ctrl-C or SIGTERM.
Runs with equal `--tokens` and seed differ only by the order in which threads add gradients; with `--minutes` the
machine's speed matters.
"""

import argparse
import json
import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from corpus import NOUNS, Chat, chats, draw_held_out, hold_out, load_books, made_up
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

END, START_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = Path(__file__).with_name("template.jinja").read_text("utf-8").rstrip("\n")


@dataclass(frozen=True)
class Stage:
    """A stage ends when the share `until` of the budget is used. A step has `rows` rows of `length` tokens. A row has
    chats' starts with probability `heads`, whole chats with probability `chats`, otherwise plain text.
    """

    until: float
    length: int
    rows: int
    chats: float
    heads: float


SHAPE: dict[str, Any] = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 6}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048}
SHAPE |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
STAGES = (Stage(0.45, 256, 24, 0.20, 0.08), Stage(0.94, 512, 12, 0.30, 0.05), Stage(1.0, 2048, 3, 0.40, 0.05))
PLAIN_TALES = 5000  # made-up tales among the plain texts
HEAD = 48  # tokens: the request and the first words of the answer
MICRO_TOKENS = 1024  # per forward and backward pass; threads share the passes of a step


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """The tokenizer can encode and restore any string exactly. Its special tokens have ids 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, START_TURN, END_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def render(chat: Chat) -> str:
    return "".join(f"{START_TURN}{turn['role']}\n{turn['content']}{END_TURN}\n" for turn in chat)


class Windows:
    """An endless stream of token windows over shuffled documents. Token 0 follows each document."""

    def __init__(self, documents: list[np.ndarray], rng: random.Random) -> None:
        self.documents = documents
        self.rng = rng
        self.order: list[int] = []
        self.rest = np.empty(0, np.uint16)

    def take(self, length: int, aligned: bool) -> np.ndarray:
        """Return the next `length` tokens. An aligned window starts with a document."""
        parts, have = ([], 0) if aligned else ([self.rest], len(self.rest))
        while have < length:
            if not self.order:
                self.order = self.rng.sample(range(len(self.documents)), len(self.documents))
            parts.append(self.documents[self.order.pop()])
            have += len(parts[-1])
        tokens = np.concatenate(parts)
        self.rest = tokens[length:]
        return tokens[:length]

    def heads(self, length: int) -> np.ndarray:
        count = -(-length // HEAD) * 2
        return np.concatenate([doc[:HEAD] for doc in self.rng.choices(self.documents, k=count)])[:length]


@dataclass(frozen=True)
class Data:
    """`held` maps each held-out book to its tokens and its size in UTF-8 bytes."""

    tokenizer: Tokenizer
    plain: Windows
    chat: Windows
    held: dict[str, tuple[np.ndarray, int]]

    def batch(self, stage: Stage, rng: random.Random) -> tuple[Tensor, Tensor]:
        """Return token and target ids (rows, length). The target is -100 where a new chat follows one that was cut
        short. Without rows of heads, a small model takes long to learn that the story is about the request.
        """
        rows = []
        for _ in range(stage.rows):
            draw = rng.random()
            if draw < stage.heads:
                rows.append(self.chat.heads(stage.length + 1))
            elif draw < stage.heads + stage.chats:
                rows.append(self.chat.take(stage.length + 1, aligned=rng.random() < 0.5))
            else:
                rows.append(self.plain.take(stage.length + 1, aligned=rng.random() < 0.1))
        window = torch.from_numpy(np.stack(rows).astype(np.int64))
        tokens, targets = window[:, :-1], window[:, 1:].clone()
        end, start, newline = (self.tokenizer.token_to_id(name) for name in (END, START_TURN, "\u010a"))
        targets[(targets == start) & (tokens != end) & (tokens != newline)] = -100
        return tokens, targets


def prepare(args: argparse.Namespace, rng: random.Random) -> Data:
    books = load_books(args.corpus)
    held = args.held_out or draw_held_out(books, rng)
    train = hold_out(books, held)
    plain = ["\n\n".join(story) for story in train]
    nouns = [rng.choice(NOUNS) for _ in range(PLAIN_TALES)]
    plain += [made_up(noun, noun, rng) for noun in nouns]
    talk = [render(chat) for chat in chats(args.corpus, train, args.chats, rng)]
    if args.tokenizer:
        tokenizer = Tokenizer.from_file(str(args.tokenizer))
    else:
        tokenizer = train_tokenizer(iter(plain + talk[:2000]), SHAPE["vocab_size"])
    end = tokenizer.token_to_id(END)

    def encode(texts: list[str]) -> list[np.ndarray]:
        return [np.array([*item.ids, end], np.uint16) for item in tokenizer.encode_batch_fast(texts)]

    held_texts = {name: ["\n\n".join(story) for story in books[name]] for name in held}
    measured = {
        name: (np.concatenate(encode(texts)), sum(len(text.encode()) for text in texts))
        for name, texts in held_texts.items()
    }
    return Data(tokenizer, Windows(encode(plain), rng), Windows(encode(talk), rng), measured)


def new_model() -> LlamaForCausalLM:
    """Create a float32 model whose layers initially add little to the residual stream."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            last = name.endswith(("o_proj.weight", "down_proj.weight"))  # the last matrix of a residual branch
            scale = (2 * SHAPE["num_hidden_layers"]) ** -0.5 if last else 0.5 if "embed" in name else 1.0
            nn.init.normal_(parameter, std=scale * SHAPE["hidden_size"] ** -0.5)
    return model


def loss_of(model: LlamaForCausalLM, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss in nats per token. `tokens` and `targets` are (rows, length)."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, held: np.ndarray, length: int, most: int | None = None) -> float:
    """Return the mean loss per token over the first `most` windows (None: all)."""
    length = min(length, len(held) - 1)
    starts = range(0, len(held) - length, length)[:most]
    model.eval()
    windows = (torch.from_numpy(held[i : i + length + 1].astype(np.int64))[None] for i in starts)
    losses = [loss_of(model, window[:, :-1], window[:, 1:]).item() for window in windows]
    model.train()
    return sum(losses) / len(losses)


def optimizers(model: LlamaForCausalLM, parts: int) -> list[torch.optim.Optimizer]:
    """Create Muon (Jordan et al. 2024) for layer matrices, AdamW for all other parameters. Muon takes a tenth of a
    step's time, so each thread has a Muon of its own.
    """
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed" in n]
    muons = [
        torch.optim.Muon(dealt, lr=5e-3, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        for dealt in (matrices[i::parts] for i in range(parts))
    ]
    return [*muons, torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0, fused=True)]


def rate(progress: float) -> float:
    """Return the learning rate's factor, which rises for 1 %, stays at 1 until 20 %, then falls linearly."""
    return min(1.0, progress / 0.01 + 0.02, max(0.01, (1.0 - progress) / 0.8))


class Trainer:
    """Divides each batch among threads. Using the threads inside each operation instead was five times slower on a busy
    machine.
    """

    def __init__(self, model: LlamaForCausalLM, threads: int) -> None:
        self.model = model
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        self.opts = optimizers(model, threads)
        self.peaks = [group["lr"] for opt in self.opts for group in opt.param_groups]
        self.stage: Stage | None = None
        self.loss: Callable[..., Tensor] = loss_of

    def step(self, stage: Stage, tokens: Tensor, targets: Tensor, factor: float) -> float:
        """`factor` is the learning rate divided by its peak. Returns the loss."""
        if stage is not self.stage:
            self._enter(stage, tokens, targets)
        micro = [part.split(max(1, MICRO_TOKENS // stage.length)) for part in (tokens, targets)]
        weights = [len(part) / len(tokens) for part in micro[0]]
        loss = sum(self.pool.map(self._backward, *micro, weights))
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for opt, peak in zip(self.opts, self.peaks, strict=True):
            opt.param_groups[0]["lr"] = peak * factor
        list(self.pool.map(lambda opt: opt.step(), self.opts))
        self.model.zero_grad()
        return loss

    def _enter(self, stage: Stage, tokens: Tensor, targets: Tensor) -> None:
        """Compile the model for the stage's shapes, which makes steps a quarter to a half faster."""
        self.stage = stage
        # Measured on a CPU: up to 512 tokens, eager attention is up to twice as fast as fused.
        self.model.set_attn_implementation("eager" if stage.length <= 512 else "sdpa")
        torch.compiler.reset()
        self.loss = torch.compile(loss_of, dynamic=False)
        rows = max(1, MICRO_TOKENS // stage.length)
        self._backward(tokens[:rows], targets[:rows], 1.0)  # compiles on one thread
        self.model.zero_grad()

    def _backward(self, tokens: Tensor, targets: Tensor, weight: float) -> float:
        loss = self.loss(self.model, tokens, targets) * weight
        loss.backward()
        return loss.item()


def run(model: LlamaForCausalLM, data: Data, args: argparse.Namespace) -> tuple[float, int]:
    """Returns (minutes trained, tokens seen)."""
    rng = random.Random(args.seed + 1)
    stop = []
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stop.append(True))
    trainer = Trainer(model, args.threads)
    began = reported = exported = time.monotonic()
    seen, step, recent = 0, 0, []
    while not stop:
        minutes = (time.monotonic() - began) / 60
        progress = seen / args.tokens if args.tokens else minutes / args.minutes
        if progress >= 1:
            break
        stage = next(s for s in STAGES if progress < s.until)
        tokens, targets = data.batch(stage, rng)
        recent.append(trainer.step(stage, tokens, targets, args.rate * rate(progress)))
        seen, step = seen + tokens.numel(), step + 1
        if time.monotonic() - reported > 30:
            reported = time.monotonic()
            loss = np.mean(recent)
            print(f"{minutes:6.1f} min  step {step}  {seen / 1e6:.2f} M tokens  train {loss:.3f}", flush=True)
            recent = []
        if time.monotonic() - exported > args.export_minutes * 60:
            exported = time.monotonic()
            losses = [f"{evaluate(model, held, 512, 15):.3f}" for held, _ in data.held.values()]
            print(f"{minutes:6.1f} min  held-out {' '.join(losses)}", flush=True)
            save_weights(model, args.out)
    return (time.monotonic() - began) / 60, seen


def _replace(path: Path, text: str) -> None:
    """Write the file atomically."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, "utf-8")
    os.replace(part, path)


def save_weights(model: LlamaForCausalLM, out: Path) -> None:
    tensors = {name: p.detach().bfloat16().contiguous() for name, p in model.named_parameters()}
    part = out / "model.safetensors.part"
    save_file(tensors, part, metadata={"format": "pt"})
    part.chmod(0o644)
    os.replace(part, out / "model.safetensors")


def save_settings(tokenizer: Tokenizer, out: Path) -> None:
    end, end_turn = tokenizer.token_to_id(END), tokenizer.token_to_id(END_TURN)
    ids = {"bos_token_id": end, "eos_token_id": [end_turn, end], "pad_token_id": end}
    LlamaConfig(**SHAPE, **ids, dtype="bfloat16", architectures=["LlamaForCausalLM"]).save_pretrained(out)
    GenerationConfig(**ids, do_sample=True, temperature=0.7, top_p=0.95).save_pretrained(out)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": SHAPE["max_position_embeddings"],
        "bos_token": END,
        "eos_token": END_TURN,
        "pad_token": END,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _replace(out / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
    _replace(out / "tokenizer.json", tokenizer.to_str() + "\n")


def save_card(model: LlamaForCausalLM, data: Data, minutes: float, seen: int, out: Path) -> None:
    """Rounds the weights to bf16 in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    rows, sums = [], {512: 0.0, 2048: 0.0}
    for name, (held, size) in data.held.items():
        losses = {length: evaluate(model, held, length) for length in sums}
        sums = {length: sums[length] + loss * len(held) for length, loss in losses.items()}
        rows.append(_row(name.removesuffix(".txt"), len(held), size, losses))
    count = sum(len(held) for held, _ in data.held.values())
    size = sum(size for _, size in data.held.values())
    rows.append(_row("all of them", count, size, {length: loss / count for length, loss in sums.items()}))
    print("\n".join(rows), flush=True)
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    template = Path(__file__).with_name("card.md").read_text("utf-8")
    card = template.format(**SHAPE, count=parameters, minutes=minutes, seen=seen / 1e6, rows="\n".join(rows))
    _replace(out / "README.md", card)


def _row(name: str, tokens: int, size: int, losses: dict[int, float]) -> str:
    """Return a table row: nats per token by window length, then bits per byte for the longest."""
    nats = " | ".join(f"{loss:.3f}" for loss in losses.values())
    return f"| {name} | {tokens:,} | {nats} | {losses[max(losses)] * tokens / size / math.log(2):.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the embedded demo model of Quire.")
    parser.add_argument("corpus", type=Path, help="folder of .txt books (and .jsonl questions)")
    parser.add_argument("out", type=Path, help="folder to write the model to")
    parser.add_argument("--minutes", type=float, default=80.0, help="time to train for, without preparation")
    parser.add_argument("--tokens", type=int, help="train for so many tokens instead (repeatable by seed)")
    parser.add_argument(
        "--rate", type=float, default=1.0, help="factor of the learning rates; less where --weights are given"
    )
    parser.add_argument("--export-minutes", type=float, default=5.0, help="time between two exports of the weights")
    parser.add_argument(
        "--held-out", nargs="+", metavar="FILE", help="books to hold out, instead of some that are drawn"
    )
    parser.add_argument("--chats", type=int, default=30000, help="conversations to build from the stories")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, help="use this tokenizer.json instead of training one")
    parser.add_argument("--weights", type=Path, help="start from this model.safetensors")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    data = prepare(args, random.Random(args.seed))
    sizes = [sum(map(len, source.documents)) for source in (data.plain, data.chat)]
    print(f"tokens: plain {sizes[0]}, chat {sizes[1]}; held out: {', '.join(data.held)}", flush=True)
    model = new_model()
    if args.weights:
        model.load_state_dict(load_file(args.weights), strict=False)  # no lm_head.weight: it is the embedding
    save_settings(data.tokenizer, args.out)
    save_weights(model, args.out)
    minutes, seen = run(model, data, args)
    save_weights(model, args.out)
    save_card(model, data, minutes, seen, args.out)


if __name__ == "__main__":
    main()
