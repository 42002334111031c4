"""GRPO in plain PyTorch (Shao et al., 2024, "DeepSeekMath"): Quire samples answers, PyTorch takes a step, and the
weights go back, all in one process.

    python examples/rl/grpo.py --steps 60 --curve curve.csv

The embedded story-teller learns to tell stories whose words begin with the same letter. What a step of reinforcement
learning needs of a sampler: many answers to a prompt, the log probability of each of their tokens, and new weights
before the next answer. The rule is on policy: the answers are those of the weights that are trained. So the trainer's
log probabilities of the sampled tokens, computed anew, must be the sampler's: `mismatch` is how far they are apart.

With `--reward-model FOLDER` a sequence classifier of one label, served beside the policy, judges the answers instead.

With `--deepspeed` (pip install deepspeed) the step is DeepSpeed's, ZeRO of stage 2, on CPUs too; over several ranks by

    torchrun --nproc-per-node 2 examples/rl/grpo.py --deepspeed

where the first rank samples and each learns from its share of the answers; on CPUs DS_ACCELERATOR=cpu may be needed.
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
"""Starts of stories, and how they go on, to rewards."""
STARTS = (
    *("Once upon a time", "There was once", "In a small house", "One day", "The old king", "A little girl"),
    *("The fox said", "In the forest", "By the river", "A poor man", "The queen had", "Two brothers"),
)


@dataclass(frozen=True)
class Sample:
    """One answer to a prompt."""

    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    """The sampler's, of the answer's tokens."""
    reward: float


@dataclass(frozen=True)
class Step:
    step: int
    reward: float
    """The mean of all answers of this step, before its update."""
    mismatch: float
    """The largest difference between the trainer's log probability of a sampled token and the sampler's."""
    weights_version: str
    """Of the weights that gave the answers."""
    seconds: float


def reward_of(text: str, letter: str = "s") -> float:
    """The share of the words that begin with the letter."""
    words = text.lower().split()
    return sum(word.startswith(letter) for word in words) / max(1, len(words))


def by_letter(starts: Sequence[str], texts: Sequence[str]) -> list[float]:
    """Rewards of answers, each behind the start of its story, which does not count."""
    return [reward_of(text) for text in texts]


def by_model(model: LLM) -> Judge:
    """What a reward model says of the stories, their starts included."""

    def judged(starts: Sequence[str], texts: Sequence[str]) -> list[float]:
        stories = [start + text for start, text in zip(starts, texts, strict=True)]
        return [each.outputs.score for each in model.reward(stories, use_tqdm=False)]

    return judged


def sampled(llm: LLM, starts: Sequence[str], params: SamplingParams, judge: Judge) -> tuple[list[list[Sample]], str]:
    """A group of answers to each start, and the version of the weights that gave them."""
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
    """How much better each answer is than the others to its prompt, in standard deviations."""
    found = []
    for group in groups:
        rewards = torch.tensor([each.reward for each in group])
        found += ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
    return found


def answer_logprobs(policy: Any, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """[samples, longest answer]: the log probability of each token, and whether there is one."""
    longest = max(len(each.prompt) + len(each.answer) for each in samples)
    width = max(len(each.answer) for each in samples)
    ids, there = torch.zeros(len(samples), longest, dtype=torch.long), torch.zeros(len(samples), width)
    places = torch.zeros(len(samples), width, dtype=torch.long)
    for row, each in enumerate(samples):
        tokens = each.prompt + each.answer
        ids[row, : len(tokens)] = torch.tensor(tokens)
        there[row, : len(each.answer)] = 1
        places[row, : len(each.answer)] = torch.arange(len(each.prompt), len(tokens))
    # Nothing is masked: what fills a row up comes after its answer, which a causal model does not see.
    logits = policy(input_ids=ids[:, :-1]).logits.float()
    every = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return every.gather(1, (places - 1).clamp(min=0)) * there, there


class Trainer:
    """A policy and its optimizer."""

    def __init__(self, policy: PreTrainedModel, learning_rate: float) -> None:
        self.policy: Any = policy
        """Called with token ids, it gives logits."""
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
    """The processes that train together."""

    rank: int
    count: int

    def shared(self, made: Any) -> Any:
        """What the first rank has made, on all."""
        box = [made]
        if self.count > 1:
            torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def largest(self, number: Tensor) -> float:
        """Of all ranks' numbers."""
        if self.count > 1:
            torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX)
        return float(number)


class DeepSpeedTrainer(Trainer):
    """The same by DeepSpeed, in a group of this process alone where torchrun has not made one of several. The gradient
    is the mean of the ranks' own."""

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
    """One update after another; the sampler, which the first rank has, has the new weights before the next."""
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
        # The policy that sampled is the one that is trained, so the ratio of the two is 1 and only its gradient counts.
        ratio = (logprobs - logprobs.detach()).exp()
        advantages = torch.tensor(advantages_of(groups)[ranks.rank :: ranks.count])[:, None]
        tokens = sum(len(each.answer) for each in samples) / ranks.count  # ranks' gradients are averaged
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
