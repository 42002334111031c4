"""GRPO in plain PyTorch (Shao et al., 2024, "DeepSeekMath"): Quire samples answers, PyTorch takes a step, and the
weights go back, in one process.

    python examples/rl/grpo.py --steps 60 --curve curve.csv

The embedded model learns to tell stories whose words begin with the same letter. The sampler must give many answers per
prompt, the log probability of each token, and take new weights before the next answer. The algorithm is on-policy: the
trainer's log probabilities of the sampled tokens must be the sampler's, and `mismatch` shows how far apart they are.

With `--reward-model FOLDER` a sequence classifier with one label, served in the same process, judges the answers.

With `--deepspeed` (pip install deepspeed) DeepSpeed takes the step with ZeRO stage 2, on CPUs too; over several ranks:

    torchrun --nproc-per-node 2 examples/rl/grpo.py --deepspeed

The first rank samples, and each learns from its share of the answers; CPUs may need DS_ACCELERATOR=cpu.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire import LLM, SamplingParams
from quire.engine.common.config import DEMO_MODEL

Judge = Callable[[Sequence[str], Sequence[str]], list[float]]
"""Story starts and their continuations, to rewards."""
STARTS = (
    *("Once upon a time", "There was once", "In a small house", "One day", "The old king", "A little girl"),
    *("The fox said", "In the forest", "By the river", "A poor man", "The queen had", "Two brothers"),
)


@dataclass(frozen=True)
class Sample:
    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    """The sampler's, per token of the answer."""
    reward: float


@dataclass(frozen=True)
class Step:
    step: int
    reward: float
    """Mean of the step's answers, before its update."""
    mismatch: float
    """Largest difference between the trainer's and the sampler's log probability of a sampled token."""
    weights_version: str
    """Weights that gave the answers."""
    seconds: float


def reward_of(text: str, letter: str = "s") -> float:
    """Share of words that begin with the letter."""
    words = text.lower().split()
    return sum(word.startswith(letter) for word in words) / max(1, len(words))


def by_letter(starts: Sequence[str], texts: Sequence[str]) -> list[float]:
    """The start of a story does not count."""
    return [reward_of(text) for text in texts]


def by_model(model: LLM) -> Judge:
    """Judges stories including their starts."""

    def judged(starts: Sequence[str], texts: Sequence[str]) -> list[float]:
        stories = [start + text for start, text in zip(starts, texts, strict=True)]
        return [each.outputs.score for each in model.reward(stories, use_tqdm=False)]

    return judged


def sampled(llm: LLM, starts: Sequence[str], params: SamplingParams, judge: Judge) -> tuple[list[list[Sample]], str]:
    """A group of answers per start, and the version of the weights that gave them."""
    groups, versions = [], set()
    for start, generation in zip(starts, llm.generate(starts, params, use_tqdm=False), strict=True):
        versions.add(generation.weights_version)
        group = []
        rewards = judge([start] * len(generation.outputs), [output.text for output in generation.outputs])
        for output, reward in zip(generation.outputs, rewards, strict=True):
            assert output.logprobs is not None
            found = [each[token].logprob for each, token in zip(output.logprobs, output.token_ids, strict=True)]
            group.append(Sample(generation.prompt_token_ids, output.token_ids, found, reward))
        groups.append(group)
    (version,) = versions
    return groups, version


def advantages_of(groups: Sequence[Sequence[Sample]]) -> list[float]:
    """In standard deviations from the mean of the answers to the same prompt."""
    found = []
    for group in groups:
        rewards = torch.tensor([each.reward for each in group])
        found += ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
    return found


def answer_logprobs(policy: Any, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Log probability of each token, and whether there is one: [samples, longest answer]."""
    longest = max(len(each.prompt) + len(each.answer) for each in samples)
    width = max(len(each.answer) for each in samples)
    ids, there = torch.zeros(len(samples), longest, dtype=torch.long), torch.zeros(len(samples), width)
    places = torch.zeros(len(samples), width, dtype=torch.long)
    for row, each in enumerate(samples):
        tokens = each.prompt + each.answer
        ids[row, : len(tokens)] = torch.tensor(tokens)
        there[row, : len(each.answer)] = 1
        places[row, : len(each.answer)] = torch.arange(len(each.prompt), len(tokens))
    # No mask is needed: padding comes after the answer, and the model is causal.
    logits = policy(input_ids=ids[:, :-1]).logits.float()
    every = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return every.gather(1, (places - 1).clamp(min=0)) * there, there


class Trainer:
    def __init__(self, policy: PreTrainedModel, learning_rate: float) -> None:
        self.policy: Any = policy
        """Token ids to logits."""
        self._optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.0)

    def step(self, loss: Tensor) -> None:
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self._optimizer.step()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.policy.state_dict().items())


@dataclass(frozen=True)
class Ranks:
    rank: int
    count: int

    def shared(self, made: Any) -> Any:
        """Broadcast the first rank's object."""
        box = [made]
        if self.count > 1:
            torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def largest(self, number: Tensor) -> float:
        if self.count > 1:
            torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX)
        return float(number)


class DeepSpeedTrainer(Trainer):
    """Creates a group of one process unless torchrun made one. The gradient is the mean over ranks."""

    def __init__(self, policy: PreTrainedModel, learning_rate: float) -> None:
        import deepspeed

        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        for name, alone in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
            os.environ.setdefault(name, alone)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.0)
        config = {
            **{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}},
            "zero_allow_untested_optimizer": True,
        }
        self.policy = deepspeed.initialize(model=policy, optimizer=optimizer, config=config)[0]

    def step(self, loss: Tensor) -> None:
        self.policy.backward(loss)
        self.policy.step()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.policy.module.state_dict().items())


def trained(llm: LLM | None, trainer: Trainer, judge: Judge, args: argparse.Namespace, ranks: Ranks) -> Iterator[Step]:
    """The first rank's sampler gets the new weights before the next update."""
    draw = random.Random(args.seed)
    for number in range(1, args.steps + 1):
        began = time.perf_counter()
        params = SamplingParams(
            n=args.answers, temperature=1.0, max_tokens=args.tokens, logprobs=0, seed=args.seed + number
        )
        starts = draw.sample(STARTS, args.prompts)
        groups, version = ranks.shared(None if llm is None else sampled(llm, starts, params, judge))
        samples = [each for group in groups for each in group]
        own = samples[ranks.rank :: ranks.count]
        logprobs, there = answer_logprobs(trainer.policy, own)
        with torch.no_grad():
            theirs = torch.zeros_like(logprobs)
            for row, each in enumerate(own):
                theirs[row, : len(each.logprobs)] = torch.tensor(each.logprobs)
            mismatch = ranks.largest((logprobs - theirs).abs().max())
        # The sampling policy is the trained one, so the ratio is 1 and only its gradient matters.
        ratio = (logprobs - logprobs.detach()).exp()
        advantages = torch.tensor(advantages_of(groups)[ranks.rank :: ranks.count])[:, None]
        tokens = sum(len(each.answer) for each in samples) / ranks.count  # gradients are averaged over ranks
        trainer.step(-(advantages * ratio * there).sum() / tokens)
        if llm is not None:
            llm.load_weights(trainer.weights(), version=f"step-{number}")
        reward = sum(each.reward for each in samples) / len(samples)
        yield Step(number, reward, mismatch, version, time.perf_counter() - began)


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL, help="a folder of safetensors files")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=6, help="in a step")
    parser.add_argument("--answers", type=int, default=8, help="to each prompt")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer, at most")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="of the sampler")
    parser.add_argument("--reward-model", type=Path, help="a folder of a sequence classifier of one label")
    parser.add_argument("--deepspeed", action="store_true", help="train with it; pip install deepspeed")
    parser.add_argument("--curve", type=Path, help="a CSV file to write")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> list[Step]:
    torch.manual_seed(args.seed)
    policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    trainer = (DeepSpeedTrainer if args.deepspeed else Trainer)(policy, args.learning_rate)
    ranks = (
        Ranks(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))) if args.deepspeed else Ranks(0, 1)
    )
    served = {"dtype": "float32", "kv_cache_memory": 0.25, "threads": args.threads}
    llm = LLM(args.model, **served) if ranks.rank == 0 else None
    rewarding = LLM(args.reward_model, **served) if args.reward_model is not None and llm is not None else None
    steps = []
    for step in trained(llm, trainer, by_letter if rewarding is None else by_model(rewarding), args, ranks):
        steps.append(step)
        if llm is None:
            continue
        print(
            f"step {step.step:3}  reward {step.reward:.3f}  mismatch {step.mismatch:.1e}  "
            f"weights {step.weights_version}  {step.seconds:.1f} s",
            flush=True,
        )
    if args.curve is not None and llm is not None:
        with args.curve.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(asdict(steps[0])), lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(each) for each in steps)
    for each in (llm, rewarding):
        if each is not None:
            each.close()
    return steps


if __name__ == "__main__":
    run(parsed())
