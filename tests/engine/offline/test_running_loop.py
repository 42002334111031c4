"""Tests `LLM` inside a running event loop, as in the cells of a notebook."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from tests.tree import ROOT

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


async def test_llm_generates_inside_running_event_loop() -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.001)

    ticker = asyncio.create_task(tick())
    llm = LLM(num_kv_blocks=40, threads=1)
    first = llm.generate("Once", PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    await asyncio.sleep(0.01)
    again = await asyncio.to_thread(llm.generate, "Once", PARAMS, use_tqdm=False)
    assert again[0].outputs[0].token_ids == first
    assert len(first) == 6
    assert ticks, "the loop goes on between cells, and beside a call in a thread"
    llm.close()
    ticker.cancel()


@pytest.mark.slow
def test_llm_generates_in_jupyter_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    monkeypatch.chdir(tmp_path)
    cells = [
        f"import asyncio, sys; sys.path.insert(0, {str(ROOT)!r}); from quire import LLM, SamplingParams",
        "llm = LLM(num_kv_blocks=40, threads=1); asyncio.get_running_loop().is_running()",
        "params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)",
        "len(llm.generate('Once', params)[0].outputs[0].token_ids)",
        "len((await asyncio.to_thread(llm.generate, 'Once', params))[0].outputs[0].token_ids)",
        "llm.close()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    results = [each.data["text/plain"] for cell in notebook.cells for each in cell.outputs if "data" in each]
    assert [each for each in results if each in ("True", "6")] == ["True", "6", "6"]
