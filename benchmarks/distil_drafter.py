"""Distils a larger model into the embedded one, which then drafts better for it: `python -m benchmarks.distil_drafter
LARGER CORPUS OUT [--stories 512] [--minutes 10]`.

LARGER needs the embedded model's tokenizer (benchmarks/larger_model.py). It continues passages of the .txt files in
CORPUS; the embedded model learns its next-token distributions (Kim and Rush, 2016; Zhou et al., 2023, DistillSpec).
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.common.options import options
from benchmarks.common.training import train
from benchmarks.larger_model import encoded
from quire.engine.common.config import DEMO_MODEL, EngineConfig
from quire.engine.common.request_params import SamplingParams
from quire.engine.common.types import EngineCoreRequest
from quire.engine.engine_core import EngineCore
from quire.engine.text.tokenizer import Tokenizer
from tests.engine.harness import run

BEGINNING, STORY = 12, 244
"""Tokens that the larger model gets, and generates."""
ROWS = 4


def told(larger: Path, corpus: Tensor, count: int, threads: int) -> Tensor:
    """Returns the stories, [count, tokens], at temperatures 0.6 to 1."""
    engine = EngineCore(EngineConfig(model=str(larger), threads=threads, max_model_len=512, num_kv_blocks=800))
    rng, requests = random.Random(0), []
    for number in range(count):
        begin = rng.randrange(len(corpus) - BEGINNING)
        params = SamplingParams(temperature=rng.uniform(0.6, 1.0), max_tokens=STORY, ignore_eos=True)
        ids = corpus[begin : begin + BEGINNING].tolist()
        requests.append(EngineCoreRequest(id=str(number), prompt_ids=ids, params=params, seed=number))
    answers = run(engine, requests)
    return torch.tensor([[*each.prompt_ids, *answers[each.id].ids] for each in requests])


def main() -> None:
    args = options(
        __doc__,
        {
            "larger": Path,
            "corpus": Path,
            "out": Path,
            "--stories": 512,
            "--minutes": 10.0,
            "--rate": {"default": 5e-4, "help": "the highest learning rate"},
            "--threads": 1,
        },
    )
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    small = Path(DEMO_MODEL)
    rows = told(args.larger, encoded(args.corpus, Tokenizer.from_pretrained(small).backend), args.stories, args.threads)
    print(f"{rows.numel()} tokens told", flush=True)
    student = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(args.larger, dtype=torch.bfloat16)

    def loss() -> Tensor:
        batch = rows[torch.randint(len(rows), (ROWS,))]
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                wanted = teacher(input_ids=batch, use_cache=False).logits
            logits = student(input_ids=batch, use_cache=False).logits
        both = [F.log_softmax(each.float().flatten(0, 1), dim=-1) for each in (logits, wanted)]
        return F.kl_div(both[0], both[1], log_target=True, reduction="batchmean")

    train(student.parameters(), loss, ROWS * rows.shape[1], args.minutes, args.rate)
    shutil.copytree(small, args.out, ignore=shutil.ignore_patterns("training", "README.md"), dirs_exist_ok=True)
    tensors = {name: each.detach().bfloat16().contiguous() for name, each in student.named_parameters()}
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
