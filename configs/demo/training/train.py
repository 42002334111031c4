"""Train Quire's embedded demo model: a byte-level BPE tokenizer and a small Llama, on a folder of stories, on a CPU.

    python configs/demo/training/train.py CORPUS_DIR OUT_DIR [--minutes 80] [--tokens N] [--threads 2] [--seed 0]

CORPUS_DIR holds `.txt` books and, if you like, `.jsonl` questions (see `corpus.py`). OUT_DIR becomes a folder that
transformers can load. It is written at the start (untrained), every few minutes, at the end, and when the run is
stopped by Ctrl-C or SIGTERM, so that it can be used at any time. The learning rate follows the clock (`--minutes`) or
the tokens seen (`--tokens`). A run by `--tokens` repeats itself for the same seed, but for the order in which threads
add up gradients; one by the clock depends on the machine.
"""

import argparse
import json
import math
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from corpus import Chat, chats, hold_out, load_books
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

END, START_TURN, END_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = Path(__file__).with_name("template.jinja").read_text("utf-8").rstrip("\n")


@dataclass(frozen=True)
class Stage:
    """A part of the run: it lasts until the share `until` of the budget is spent; `rows` of `length` tokens a step.

    A row is plain text, or chats with probability `chats`, or only the heads of chats with probability `heads`.
    """

    until: float
    length: int
    rows: int
    chats: float
    heads: float


SHAPE: dict[str, Any] = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 6}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048}
SHAPE |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}
STAGES = (Stage(0.42, 256, 12, 0.25, 0.15), Stage(0.66, 512, 8, 0.35, 0.10), Stage(1.0, 2048, 2, 0.40, 0.05))
HEAD = 48  # tokens of a request and the first words of its answer
MICRO_TOKENS = 768  # a forward and backward pass of this size stays near the caches of a small CPU


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE without normalization: every string comes back byte by byte. Special tokens have ids 0, 1, 2."""
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
    """The text of a conversation, as CHAT_TEMPLATE writes it."""
    return "".join(f"{START_TURN}{turn['role']}\n{turn['content']}{END_TURN}\n" for turn in chat)


class Windows:
    """Endless windows of tokens from documents in shuffled order, each document followed by the end token (id 0)."""

    def __init__(self, documents: list[np.ndarray], rng: random.Random) -> None:
        self.documents = documents
        self.rng = rng
        self.order: list[int] = []
        self.rest = np.empty(0, np.uint16)

    def take(self, length: int, aligned: bool) -> np.ndarray:
        """The next `length` tokens; an aligned window starts with the start of a document."""
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
        """`length` tokens made of the first HEAD tokens of documents."""
        count = -(-length // HEAD) * 2
        return np.concatenate([doc[:HEAD] for doc in self.rng.choices(self.documents, k=count)])[:length]


@dataclass(frozen=True)
class Data:
    """Tokens to train on and to test with; `held_bytes` is the UTF-8 size of the held-out text."""

    tokenizer: Tokenizer
    plain: Windows
    chat: Windows
    held: np.ndarray
    held_bytes: int

    def batch(self, stage: Stage, rng: random.Random) -> tuple[Tensor, Tensor]:
        """Token ids (rows, length) and the ids that follow them, -100 where a cut chat ends and another begins.

        Rows of heads are there because it takes a small model long to find out that a story is about the thing that
        was asked for: they hold many requests, and little else.
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


def prepare(corpus: Path, tokenizer_file: Path | None, vocab_size: int, chat_count: int, rng: random.Random) -> Data:
    """Clean the corpus, set books aside, train (or load) the tokenizer, build the chats and encode everything."""
    train, held = hold_out(load_books(corpus), rng)
    plain = ["\n\n".join(story) for story in train]
    talk = [render(chat) for chat in chats(corpus, train, chat_count, rng)]
    if tokenizer_file:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    else:
        tokenizer = train_tokenizer(iter(plain + talk[:2000]), vocab_size)
    end = tokenizer.token_to_id(END)

    def encode(texts: list[str]) -> list[np.ndarray]:
        return [np.array([*item.ids, end], np.uint16) for item in tokenizer.encode_batch_fast(texts)]

    held_texts = ["\n\n".join(story) for story in held]
    return Data(
        tokenizer,
        Windows(encode(plain), rng),
        Windows(encode(talk), rng),
        np.concatenate(encode(held_texts)),
        sum(len(text.encode()) for text in held_texts),
    )


def new_model() -> LlamaForCausalLM:
    """Untrained, in float32; the layers' outputs start small."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            last = name.endswith(("o_proj.weight", "down_proj.weight"))  # of a residual branch
            scale = (2 * SHAPE["num_hidden_layers"]) ** -0.5 if last else 0.5 if "embed" in name else 1.0
            nn.init.normal_(parameter, std=scale * SHAPE["hidden_size"] ** -0.5)
    return model


def loss_of(model: LlamaForCausalLM, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood, in nats per token, of targets after tokens, both (rows, length)."""
    # Measured: on a CPU, in rows of up to 512 tokens, the plain product is up to twice as fast as the fused one.
    model.set_attn_implementation("eager" if tokens.shape[1] <= 512 else "sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, held: np.ndarray, length: int, most: int | None = None) -> float:
    """Loss per token over consecutive windows of the held-out text (the first `most` of them)."""
    length = min(length, len(held) - 1)
    starts = range(0, len(held) - length, length)[:most]
    model.eval()
    windows = (torch.from_numpy(held[i : i + length + 1].astype(np.int64))[None] for i in starts)
    losses = [loss_of(model, window[:, :-1], window[:, 1:]).item() for window in windows]
    model.train()
    return sum(losses) / len(losses)


def optimizers(model: LlamaForCausalLM, parts: int) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the matrices of the layers, AdamW for the embedding and the norms.

    Muon's own products cost a tenth of a step: its matrices are dealt to `parts` optimizers, one for each thread.
    """
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed" in n]
    muons = [
        torch.optim.Muon(dealt, lr=5e-3, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        for dealt in (matrices[i::parts] for i in range(parts))
    ]
    return [*muons, torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0, fused=True)]


def rate(progress: float) -> float:
    """Factor of the learning rate: warm up for 1 % of the run, hold until 20 %, then fall in a line to nearly 0."""
    return min(1.0, progress / 0.01 + 0.02, max(0.01, (1.0 - progress) / 0.8))


def run(model: LlamaForCausalLM, data: Data, args: argparse.Namespace) -> tuple[float, int]:
    """Train until the budget is spent or a signal comes, exporting on the way. Returns (minutes, tokens seen).

    Each thread takes small parts of the batch through the model by itself. Threads inside the operations, which wait
    for each other thousands of times a step, were five times slower on a machine with other work to do.
    """
    rng = random.Random(args.seed + 1)
    stop = []
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stop.append(True))
    pool = ThreadPoolExecutor(args.threads, initializer=torch.set_num_threads, initargs=(1,))
    opts = optimizers(model, args.threads)
    peaks = [group["lr"] for opt in opts for group in opt.param_groups]
    began = reported = exported = time.monotonic()
    seen, step, recent = 0, 0, []
    while not stop:
        minutes = (time.monotonic() - began) / 60
        progress = seen / args.tokens if args.tokens else minutes / args.minutes
        if progress >= 1:
            break
        stage = next(s for s in STAGES if progress < s.until)
        tokens, targets = data.batch(stage, rng)
        micro = [part.split(max(1, MICRO_TOKENS // stage.length)) for part in (tokens, targets)]
        weights = [len(part) / len(tokens) for part in micro[0]]
        recent.append(sum(pool.map(partial(_backward, model), *micro, weights)))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt, peak in zip(opts, peaks, strict=True):
            opt.param_groups[0]["lr"] = peak * rate(progress)
        list(pool.map(lambda opt: opt.step(), opts))
        model.zero_grad()
        seen, step = seen + tokens.numel(), step + 1
        if time.monotonic() - reported > 30:
            reported = time.monotonic()
            loss = np.mean(recent)
            print(f"{minutes:6.1f} min  step {step}  {seen / 1e6:.2f} M tokens  train {loss:.3f}", flush=True)
            recent = []
        if time.monotonic() - exported > args.export_minutes * 60:
            exported = time.monotonic()
            print(f"{minutes:6.1f} min  held-out {evaluate(model, data.held, 512, 40):.4f}", flush=True)
            save_weights(model, args.out)
    return (time.monotonic() - began) / 60, seen


def _backward(model: LlamaForCausalLM, tokens: Tensor, targets: Tensor, weight: float) -> float:
    loss = loss_of(model, tokens, targets) * weight
    loss.backward()
    return loss.item()


def _replace(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, never a half."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, "utf-8")
    os.replace(part, path)


def save_weights(model: LlamaForCausalLM, out: Path) -> None:
    """Write `model.safetensors` in bf16 under the names of transformers."""
    tensors = {name: p.detach().bfloat16().contiguous() for name, p in model.named_parameters()}
    part = out / "model.safetensors.part"
    save_file(tensors, part, metadata={"format": "pt"})
    part.chmod(0o644)
    os.replace(part, out / "model.safetensors")


def save_settings(tokenizer: Tokenizer, out: Path) -> None:
    """Write the configuration and the tokenizer; they do not change during a run."""
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
    """Measure the held-out loss of the rounded weights and write `README.md`."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    losses = {length: evaluate(model, data.held, length) for length in (512, 2048)}
    per_byte = len(data.held) / data.held_bytes / math.log(2)
    count = sum(p.numel() for p in model.parameters())
    rows = "\n".join(f"| {n} tokens | {loss:.3f} | {loss * per_byte:.3f} |" for n, loss in losses.items())
    print(rows, flush=True)
    template = Path(__file__).with_name("card.md").read_text("utf-8")
    sizes = {"count": count / 1e6, "held": len(data.held), "held_bytes": data.held_bytes}
    card = template.format(**SHAPE, **sizes, minutes=minutes, seen=seen / 1e6, rows=rows)
    _replace(out / "README.md", card)


def main() -> None:
    """Read the command line, prepare the data, train, export."""
    parser = argparse.ArgumentParser(description="Train the embedded demo model of Quire.")
    parser.add_argument("corpus", type=Path, help="folder of .txt books (and .jsonl questions)")
    parser.add_argument("out", type=Path, help="folder to write the model to")
    parser.add_argument("--minutes", type=float, default=80.0, help="time to train for, without preparation")
    parser.add_argument("--tokens", type=int, help="train for so many tokens instead (repeatable by seed)")
    parser.add_argument("--export-minutes", type=float, default=5.0, help="time between two exports of the weights")
    parser.add_argument("--chats", type=int, default=30000, help="conversations to build from the stories")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, help="use this tokenizer.json instead of training one")
    parser.add_argument("--weights", type=Path, help="start from this model.safetensors")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    data = prepare(args.corpus, args.tokenizer, SHAPE["vocab_size"], args.chats, random.Random(args.seed))
    sizes = [sum(map(len, source.documents)) for source in (data.plain, data.chat)]
    print(f"tokens: plain {sizes[0]}, chat {sizes[1]}, held out {len(data.held)} ({data.held_bytes} bytes)", flush=True)
    model = new_model()
    if args.weights:
        model.load_state_dict(load_file(args.weights), strict=False)  # without lm_head.weight, which is the embedding
    save_settings(data.tokenizer, args.out)
    save_weights(model, args.out)
    minutes, seen = run(model, data, args)
    save_weights(model, args.out)
    save_card(model, data, minutes, seen, args.out)


if __name__ == "__main__":
    main()
