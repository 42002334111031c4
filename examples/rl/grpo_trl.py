"""GRPO with TRL's trainer (pip install trl) and a Quire server, each in its own process.

    quire serve --dtype float32 --port 8000
    python examples/rl/grpo_trl.py http://127.0.0.1:8000 trained --steps 60

TRL's `vllm_mode="server"` supports only vLLM, but its `rollout_func` takes answers from anywhere. Before each batch of
answers the server loads the trainer's weights from a folder in shared memory, so both must run on one machine. For the
task and `mismatch` see grpo.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import torch
from datasets import Dataset
from grpo import STARTS, Sample, answer_logprobs, reward_of
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from quire.engine.common.config import DEMO_MODEL


class Server:
    """A Quire server that samples for a trainer. Raises httpx.HTTPStatusError for refused requests."""

    def __init__(self, url: str) -> None:
        key = os.environ.get("QUIRE_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=url, timeout=None, headers=headers)
        self._folder = Path(tempfile.mkdtemp(prefix="trl-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        self._served: Path | None = None

    def take(self, model: Any, version: str) -> None:
        folder = self._folder / version
        model.save_pretrained(folder)
        self._post("/update_weights", {"path": str(folder), "version": version})
        if self._served is not None:  # not earlier: a restarting engine would read it again
            shutil.rmtree(self._served)
        self._served = folder

    def sample(self, prompt: str, answers: int, **params: Any) -> list[Sample]:
        asked = {"prompt": prompt, "n": answers, "logprobs": 0, "return_token_ids": True} | params
        choices = self._post("/v1/completions", asked)["choices"]
        return [
            Sample(each["prompt_token_ids"], each["token_ids"], each["logprobs"]["token_logprobs"], 0.0)
            for each in choices
        ]

    def close(self, path: Path) -> None:
        """Serve the weights at `path`, and delete those in shared memory."""
        self._post("/update_weights", {"path": str(path.absolute()), "version": "trained"})
        self._http.close()
        shutil.rmtree(self._folder)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._http.post(path, json=body).raise_for_status().json()


class Rollouts:
    """TRL's rollout_func: answers by the server, with the trainer's current weights."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._step = -1
        """Step of the server's weights."""
        self.mismatch = 0.0

    def __call__(self, prompts: Sequence[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """One answer per prompt. Each prompt repeats consecutively, once per answer."""
        step, args = trainer.state.global_step, trainer.args
        policy = trainer.accelerator.unwrap_model(trainer.model)
        if step != self._step:
            self._server.take(policy, f"step-{step}")
            self._step = step
        params = {"temperature": args.temperature, "max_tokens": args.max_completion_length}
        samples = []
        for index, (prompt, again) in enumerate(groupby(prompts)):
            seed = args.seed + 1000 * step + index
            samples += self._server.sample(prompt, len(list(again)), seed=seed, **params)
        self.mismatch = _mismatch(policy, samples)
        return {
            "prompt_ids": [each.prompt for each in samples],
            "completion_ids": [each.answer for each in samples],
            "logprobs": [each.logprobs for each in samples],
        }


@torch.no_grad()
def _mismatch(policy: Any, samples: Sequence[Sample]) -> float:
    found, _ = answer_logprobs(policy, samples)
    theirs = [torch.tensor(each.logprobs) for each in samples]
    return max(float((row[: len(each)] - each).abs().max()) for row, each in zip(found, theirs, strict=True))


class Told(TrainerCallback):
    """Prints one line per step instead of TRL's many metrics."""

    def __init__(self, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if "reward" in logs:
            step, mismatch = state.global_step, self._rollouts.mismatch
            print(f"step {step:3}  reward {logs['reward']:.3f}  mismatch {mismatch:.1e}", flush=True)


def rewards(completions: Sequence[str], **more: Any) -> list[float]:
    return [reward_of(each) for each in completions]


def run(args: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    server = Server(args.url)
    rollouts = Rollouts(server)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            reward_funcs=rewards,
            rollout_func=rollouts,
            callbacks=[Told(rollouts)],
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": list(STARTS)}),
            args=GRPOConfig(
                output_dir=folder,
                max_steps=args.steps,
                per_device_train_batch_size=args.prompts * args.answers,
                num_generations=args.answers,
                max_completion_length=args.tokens,
                learning_rate=args.learning_rate,
                lr_scheduler_type="constant",
                seed=args.seed,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=args.cpu,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    trainer.save_model(str(args.output))
    server.close(args.output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of a server of the same model")
    parser.add_argument("output", type=Path, help="a folder for the trained model, which is served then")
    parser.add_argument("--model", default=DEMO_MODEL, help="a folder of safetensors files")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=6, help="in a step")
    parser.add_argument("--answers", type=int, default=8, help="to each prompt")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer, at most")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
