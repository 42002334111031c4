"""lm-eval's local-completions computes the same scores from echoed logprobs as transformers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import lm_eval
import pytest
from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.openai_completions import LocalCompletionsAPI

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "quire" / "configs" / "demo"
QUESTIONS = [
    ("Once upon a time there was a", [" king", " miller who had three sons", " zebra"], 1),
    ("The fox said to the", [" crow", " wolf: good day, neighbour", " tax office"], 0),
    ("In the middle of the forest stood a little", [" house", " cottage of gingerbread", " aeroplane"], 0),
    ("Then she put on her red", [" cap and went", " shoes", " submarine"], 2),
]
ROWS = [{"text": text, "choices": choices, "answer": answer} for text, choices, answer in QUESTIONS]


class Stories(ConfigurableTask):
    """Multiple choice: the continuation that is most likely."""

    def __init__(self) -> None:
        super().__init__(
            config={
                "task": "stories",
                "custom_dataset": lambda **_: {"test": Dataset.from_list(ROWS)},
                "test_split": "test",
                "output_type": "multiple_choice",
                "doc_to_text": "{{text}}",
                "doc_to_choice": "choices",
                "doc_to_target": "answer",
                "target_delimiter": "",
                "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
            }
        )


@pytest.fixture(scope="module")
def by_transformers() -> dict[str, tuple[float, bool]]:
    """Logprob of each continuation after its text, and whether it is the greedy one; in float32.

    Computed by the Python next to the server's command, which has torch.
    """
    script = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
path, questions = sys.argv[1], json.loads(sys.argv[2])
torch.set_num_threads(1)
tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
found = {}
for text, choices, _ in questions:
    begin = len(tokenizer(text, add_special_tokens=False).input_ids)
    for choice in choices:
        ids = torch.tensor(tokenizer(text + choice, add_special_tokens=False).input_ids)
        with torch.inference_mode():
            logprobs = model(ids[None]).logits[0, begin - 1 : -1].log_softmax(-1)
        own = logprobs.gather(-1, ids[begin:, None]).sum().item()
        found[text + choice] = own, bool((logprobs.argmax(-1) == ids[begin:]).all())
print(json.dumps(found))
"""
    python = Path(os.environ["QUIRE"]).with_name("python")
    completed = subprocess.run(
        [python, "-c", script, str(DEMO), json.dumps(QUESTIONS)], capture_output=True, text=True, timeout=240
    )
    assert completed.returncode == 0, completed.stderr
    return {text: (score, greedy) for text, (score, greedy) in json.loads(completed.stdout.splitlines()[-1]).items()}


@pytest.mark.parametrize(("tokenizer", "batch_size"), [("huggingface", 1), ("huggingface", 4), ("remote", 4)])
def test_lm_eval_logprobs_equal_transformers(
    url: str, by_transformers: dict[str, tuple[float, bool]], tokenizer: str, batch_size: int
) -> None:
    model = LocalCompletionsAPI(
        base_url=f"{url}/completions",
        model="quire-demo",
        tokenizer=None if tokenizer == "remote" else str(DEMO),
        tokenizer_backend=tokenizer,
        tokenized_requests=True,
        batch_size=batch_size,
    )
    results = lm_eval.simple_evaluate(model, tasks=[Stories()], bootstrap_iters=0, log_samples=True)
    assert results is not None
    num_correct = 0
    for sample in results["samples"]["stories"]:
        text, choices, answer = QUESTIONS[sample["doc_id"]]
        scores = [float(response[0]) for response in sample["filtered_resps"]]
        greedy = [str(response[1]) == "True" for response in sample["filtered_resps"]]
        expected = [by_transformers[text + choice] for choice in choices]
        assert scores == pytest.approx([score for score, _ in expected], abs=1e-3)
        assert greedy == [is_greedy for _, is_greedy in expected]
        best = max(range(len(choices)), key=lambda index: expected[index][0])
        assert (sample["acc"] == 1.0) is (best == answer)
        num_correct += best == answer
    assert results["results"]["stories"]["acc,none"] == num_correct / len(QUESTIONS)
