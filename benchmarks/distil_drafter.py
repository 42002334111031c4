"""Teaches the embedded model to say what a larger one says, so that it drafts better for it:
`python -m benchmarks.distil_drafter LARGER CORPUS OUT [--stories 512] [--minutes 10]`.

LARGER has the embedded model's tokenizer (benchmarks/larger_model.py makes one). It goes on from the beginnings of
passages in the .txt files of the folder CORPUS, and the embedded model learns its distribution of every next token
there (Kim and Rush, 2016; Zhou et al., 2023, DistillSpec).
"""

from __future__ import annotations

import argparse
import random
import shutil
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.larger_model import WARM, encoded
from quire.engine.config import DEMO_MODEL, EngineConfig
from quire.engine.loop import Engine
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.types import Request, SamplingParams
from tests.engine.harness import run

BEGINNING, STORY = 12, 244
"""Tokens that are given, and that the larger model adds."""
ROWS = 4


def told(larger: Path, corpus: Tensor, count: int, threads: int) -> Tensor:
    """What the larger model says, drawn at temperatures from 0.6 to 1: [count, tokens]."""
    engine = Engine(EngineConfig(model=str(larger), threads=threads, max_model_len=512, num_kv_blocks=800))
    rng, requests = random.Random(0), []
    for number in range(count):
        begin = rng.randrange(len(corpus) - BEGINNING)
        params = SamplingParams(temperature=rng.uniform(0.6, 1.0), max_tokens=STORY, ignore_eos=True)
        ids = corpus[begin : begin + BEGINNING].tolist()
        requests.append(Request(id=str(number), prompt_ids=ids, params=params, seed=number))
    answers = run(engine, requests)
    return torch.tensor([[*each.prompt_ids, *answers[each.id].ids] for each in requests])


def train(student: torch.nn.Module, teacher: torch.nn.Module, rows: Tensor, minutes: float, rate: float) -> None:
    optimizer = torch.optim.AdamW(student.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    began, losses = time.monotonic(), []
    while (progress := (time.monotonic() - began) / 60 / minutes) < 1:
        batch = rows[torch.randint(len(rows), (ROWS,))]
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                wanted = teacher(input_ids=batch, use_cache=False).logits
            logits = student(input_ids=batch, use_cache=False).logits
        both = [F.log_softmax(each.float().flatten(0, 1), dim=-1) for each in (logits, wanted)]
        loss = F.kl_div(both[0], both[1], log_target=True, reduction="batchmean")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate * min(progress / WARM + 0.01, 1 - progress)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) % 50 == 0:
            print(f"{progress:.0%}: {len(losses) * batch.numel()} tokens, {sum(losses[-50:]) / 50:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("larger", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--stories", type=int, default=512)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--rate", type=float, default=5e-4, help="the highest learning rate")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    small = Path(DEMO_MODEL)
    rows = told(args.larger, encoded(args.corpus, Tokenizer.load(small).backend), args.stories, args.threads)
    print(f"{rows.numel()} tokens told", flush=True)
    student = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(args.larger, dtype=torch.bfloat16)
    train(student, teacher, rows, args.minutes, args.rate)
    shutil.copytree(small, args.out, ignore=shutil.ignore_patterns("training", "README.md"), dirs_exist_ok=True)
    tensors = {name: each.detach().bfloat16().contiguous() for name, each in student.named_parameters()}
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
