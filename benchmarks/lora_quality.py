"""Trains a small adapter with PEFT on a folder of texts and compares its held-out loss in PEFT and in Quire.

    pip install peft accelerate gguf
    python -m benchmarks.lora_quality CORPUS OUT [--model FOLDER or .gguf] [--steps 60] [--rank 8]

A .gguf model is saved to OUT/model as float32, so that both sides have the same weights. OUT/adapter works with `quire
serve --lora-modules tales=OUT/adapter`. Losses are in nats per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.options import options
from benchmarks.common.training import Descent
from quire import LLM, LoRARequest, SamplingParams
from quire.engine.checkpoint.model_resolver import resolve_model


def prepared(model: str, out: Path) -> Path:
    """Folder of the model in float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path, target = resolve_model(model), out / "model"
    if path.is_dir():
        return path
    if not target.is_dir():
        where: dict[str, Any] = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        config = read.config
        del config.quantization_config  # transformers cannot save a model marked as quantized
        plain = AutoModelForCausalLM.from_config(config)
        plain.load_state_dict(read.state_dict())
        plain.save_pretrained(target)
        AutoTokenizer.from_pretrained(**where).save_pretrained(target)
    return target


def windows(tokenizer: Any, corpus: Path, count: int, size: int) -> list[list[int]]:
    """`size` tokens from the middle of each text, by file name."""
    found = []
    for path in sorted(corpus.glob("*.txt"))[:count]:
        text = path.read_text(encoding="utf-8")
        middle = len(text) // 2
        found.append(tokenizer(text[middle : middle + 8 * size])["input_ids"][:size])
    return [ids for ids in found if len(ids) == size]


def train(model: Any, texts: Sequence[list[int]], steps: int, rank: int, out: Path) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    descent = Descent(each for each in adapted.parameters() if each.requires_grad)
    for step in range(steps):
        ids = torch.tensor([texts[step % len(texts)]])
        descent.step(adapted(ids, labels=ids).loss, 5e-4)
        if step % 10 == 0:
            print(f"step {step}: {descent.losses[-1]:.3f}", flush=True)
    adapted.eval().save_pretrained(out / "adapter")
    return adapted


@torch.no_grad()
def peft_loss(model: Any, texts: Sequence[list[int]]) -> float:
    return sum(float(model(torch.tensor([ids]), labels=torch.tensor([ids])).loss) for ids in texts) / len(texts)


def quire_loss(llm: LLM, texts: Sequence[list[int]], adapter: LoRARequest | None) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    answers = llm.generate(list(texts), params, use_tqdm=False, lora_request=adapter)
    each = [
        [one[token].logprob for one, token in zip(answer.prompt_logprobs or (), ids, strict=True) if one is not None]
        for answer, ids in zip(answers, texts, strict=True)
    ]
    return -sum(sum(one) / len(one) for one in each) / len(each)


def main() -> None:
    args = options(
        __doc__,
        {
            "corpus": Path,
            "out": Path,
            "--model": "smollm2",
            "--steps": 60,
            "--rank": 8,
            "--texts": {"default": 72, "help": "most of them; a sixth is held out"},
            "--window": {"default": 256, "help": "tokens of a text"},
        },
    )
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    path = prepared(args.model, args.out)
    texts = windows(AutoTokenizer.from_pretrained(path), args.corpus, args.texts, args.window)
    held, own = texts[::6], [ids for index, ids in enumerate(texts) if index % 6]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    base = peft_loss(model, held)
    print(f"base, transformers: {base:.4f}", flush=True)
    adapted = train(model, own, args.steps, args.rank, args.out)
    print(f"adapter, PEFT:      {peft_loss(adapted, held):.4f}", flush=True)
    del model, adapted
    llm = LLM(str(path), dtype="float32", enable_lora=True, max_lora_rank=args.rank, kv_cache_memory=0.5)
    print(f"base, Quire:        {quire_loss(llm, held, None):.4f}")
    print(f"adapter, Quire:     {quire_loss(llm, held, LoRARequest('tales', 1, str(args.out / 'adapter'))):.4f}")


if __name__ == "__main__":
    main()
