"""The playground in a real browser, compared with the API's own answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from selenium.webdriver.common.keys import Keys

from tests.e2e.server import Server
from tests.web.browser import Browser

pytestmark = pytest.mark.slow

MAX_TOKENS = 120
STORY = "Tell me a story about a fox."
LAST = "#log .message:last-child"


@pytest.fixture
def page(browser: Browser, server: Server) -> Browser:
    return visited(browser, server)


def visited(browser: Browser, server: Server) -> Browser:
    browser.open(f"{server.url}/")
    browser.until(lambda: browser.text("#model") != "")
    browser.fill("#temperature", "0")
    browser.fill("#max_tokens", str(MAX_TOKENS))  # by default the model writes until its context is full
    return browser


def answer(server: Server, messages: list[dict[str, str]], **fields: Any) -> str:
    body = {"messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS, **fields}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    return str(response.json()["choices"][0]["message"]["content"])


def settled(page: Browser) -> str:
    """Wait until the last answer is complete; return its text."""
    page.until(lambda: any(word in page.text(f"{LAST} .note") for word in ("finished", "cut at max tokens")))
    return said(page)


def said(page: Browser) -> str:
    """Text of the last message, with paragraphs separated."""
    return str(page.run(f"return document.querySelector('{LAST} .body').innerText")).strip()


def flat(text: str) -> str:
    return " ".join(text.split())


def test_playground_answers_equal_api_and_survive_reload(page: Browser, server: Server) -> None:
    page.fill("#draft", STORY + Keys.ENTER)
    first = settled(page)
    expected = answer(server, [{"role": "user", "content": STORY}])
    assert flat(first) == flat(expected)
    page.fill("#draft", "And then?")
    page.one("#draft").send_keys(Keys.SHIFT + Keys.ENTER)
    assert page.one("#draft").get_property("value") == "And then?\n"
    page.one("#draft").send_keys("What came next?", Keys.ENTER)
    page.until(lambda: len(page.all("#log .message")) == 4)
    history = [
        {"role": "user", "content": STORY},
        {"role": "assistant", "content": expected},
        {"role": "user", "content": "And then?\nWhat came next?"},
    ]
    second = settled(page)
    assert flat(second) == flat(answer(server, history))
    page.driver.refresh()
    page.until(lambda: len(page.all("#log .message")) == 4 and said(page) == second)
    assert page.one("#temperature").get_property("value") == "0"
    page.click("#clear")
    assert page.all("#log .message") == []


def test_rare_sampling_fields_unfold_while_one_is_set(page: Browser) -> None:
    assert not page.all("#typical_p")[0].is_displayed()
    page.click("#rare-fold summary")
    page.fill("#typical_p", "0.5")
    page.driver.refresh()
    page.until(lambda: page.text("#model") != "")
    assert page.one("#typical_p").get_property("value") == "0.5"


def test_stop_button_ends_stream_and_aborts_request(browser: Browser, patient: Server) -> None:
    page = visited(browser, patient)
    page.click("#tools-fold summary")
    page.fill("#extra", '{"ignore_eos": true, "max_tokens": 8000}')
    page.fill("#draft", STORY + Keys.ENTER)
    page.until(lambda: len(said(page)) > 40)
    early = said(page)
    page.until(lambda: len(said(page)) > len(early))  # grows while it is written
    assert page.run(f"return document.querySelector('{LAST}').ariaBusy") == "true"
    page.click("#stop-button")
    page.until(lambda: "stopped" in page.text(f"{LAST} .note"))
    page.until(lambda: patient.metric("vllm:num_requests_running") == 0)
    partial = said(page)
    assert partial.startswith(early[:20])
    page.driver.refresh()
    page.until(lambda: page.all(LAST) and said(page) == partial)  # the partial answer stays


def test_messages_are_edited_deleted_and_resent(page: Browser, server: Server) -> None:
    page.click("#system-fold summary")
    page.fill("#system", "You tell short tales.")
    page.fill("#draft", STORY + Keys.ENTER)
    settled(page)
    page.click("#log .message:first-child [data-action=edit]")
    field = page.one("#log .message:first-child textarea")
    field.clear()
    field.send_keys("Tell me of a king.", Keys.CONTROL + Keys.ENTER)
    edited_answer = settled(page)
    system = {"role": "system", "content": "You tell short tales."}
    assert flat(edited_answer) == flat(answer(server, [system, {"role": "user", "content": "Tell me of a king."}]))
    page.click(f"{LAST} [data-action=delete]")
    assert len(page.all("#log .message")) == 1
    page.click(f"{LAST} [data-action=ask]")
    page.until(lambda: len(page.all("#log .message")) == 2)
    assert settled(page) == edited_answer


def test_regenerated_answer_keeps_earlier_versions(page: Browser) -> None:
    page.fill("#draft", STORY + Keys.ENTER)
    first = settled(page)
    page.fill("#temperature", "1")
    page.fill("#seed", "7")
    page.click(f"{LAST} [data-action=again]")
    page.until(lambda: any("2 of 2" in each.text for each in page.all(f"{LAST} .version")))
    second = settled(page)
    assert second != first
    page.click(f"{LAST} [aria-label='Earlier version']")
    page.until(lambda: said(page) == first)
    page.driver.refresh()
    page.until(lambda: page.all(LAST) and said(page) == first)
    place = "const { width, height } = arguments[0].getBoundingClientRect(); return Math.min(width, height)"
    assert min(page.run(place, each) for each in page.all(f"{LAST} .version button")) >= 24
    assert second[-20:] not in first
    page.fill("#talks-search", second[-20:])  # text of the hidden version
    page.until(lambda: len(page.all(".talk-title")) == 1)
    page.fill("#talks-search", "")
    page.click(f"{LAST} [aria-label='Later version']")
    page.until(lambda: said(page) == second)
    page.click(f"{LAST} [data-action=delete]")
    page.until(lambda: said(page) == first)
    assert not page.all(".version")


def test_continue_button_extends_truncated_answer(page: Browser, server: Server) -> None:
    page.fill("#max_tokens", "12")
    page.fill("#draft", STORY + Keys.ENTER)
    truncated = settled(page)
    page.click(f"{LAST} [data-action=more]")
    page.until(lambda: len(said(page)) > len(truncated) and page.all(f"{LAST} [data-action=more]"))
    messages = [{"role": "user", "content": STORY}]
    assert flat(said(page)) == flat(answer(server, messages, max_tokens=24))


def test_conversations_are_listed_searched_deleted_and_restored(page: Browser) -> None:
    for text in ("Tell me of a fox.", "Tell me of a raven."):
        page.fill("#max_tokens", "8")
        page.fill("#draft", text + Keys.ENTER)
        settled(page)
        page.click("#clear")
    assert page.all("#log .message") == []

    def titles() -> list[str]:
        return [each.text for each in page.all(".talk-title")]

    page.until(lambda: titles() == ["Tell me of a raven.", "Tell me of a fox."])
    page.fill("#talks-search", "FOX")
    page.until(lambda: titles() == ["Tell me of a fox."])
    page.click("#talks-list [aria-label^=Delete]")
    assert titles() == []
    page.click("#talks-undo")
    assert titles() == ["Tell me of a fox."]
    page.click(".talk")
    assert page.text("#log .message:first-child .body") == "Tell me of a fox."


def test_conversation_is_renamed(page: Browser) -> None:
    page.fill("#max_tokens", "8")
    page.fill("#draft", "Tell me of a fox." + Keys.ENTER)
    settled(page)
    page.click("#talks-list [aria-label^=Rename]")
    page.until(lambda: page.run("return document.activeElement.ariaLabel") == "Name of Tell me of a fox.")
    page.fill(".talk-name input", "Of foxes" + Keys.ENTER)
    page.until(lambda: page.text(".talk-title") == "Of foxes")
    page.fill("#draft", "And a hen?" + Keys.ENTER)
    page.until(lambda: len(page.all("#log .message")) == 4)
    settled(page)
    page.driver.refresh()
    page.until(lambda: page.all(".talk-title") and page.text(".talk-title") == "Of foxes")
    page.click("#talks-list [aria-label^=Rename]")
    page.one(".talk-name input").send_keys("other", Keys.ESCAPE)
    page.until(lambda: page.all(".talk-title"))
    assert page.text(".talk-title") == "Of foxes"
    page.click("#talks-list [aria-label^=Rename]")
    page.fill(".talk-name input", "")
    page.click(".talk-name button")
    page.until(lambda: page.all(".talk-title") and page.text(".talk-title") == "Tell me of a fox.")


def test_narrow_window_shows_conversations_in_dialog(page: Browser) -> None:
    page.resize(1000, 900)
    page.fill("#max_tokens", "8")
    page.fill("#draft", "Tell me of a fox." + Keys.ENTER)
    settled(page)
    page.click("#talks")
    assert [each.text for each in page.all(".talk-title")] == ["Tell me of a fox."]
    page.click("#talks-dialog [data-close]")
    assert not page.one("#talks").get_attribute("hidden")
    page.resize(1440, 1000)
    page.until(lambda: page.one(".talks-beside .talk-title"))
    assert not page.all("#talks")[0].is_displayed()


def test_new_conversation_during_answer_stops_running_stream(browser: Browser, patient: Server) -> None:
    page = visited(browser, patient)
    assert page.run("return document.activeElement.id") == "max_tokens"
    page.driver.refresh()
    page.until(lambda: page.run("return document.activeElement.id") == "draft")
    page.fill("#max_tokens", "8000")
    page.fill("#draft", STORY + Keys.ENTER)
    page.until(lambda: len(said(page)) > 40)
    page.click("#clear")
    assert page.all("#log .message") == []
    page.fill("#max_tokens", "5")
    page.fill("#draft", "Another one." + Keys.ENTER)
    page.until(lambda: "cut at max tokens" in page.text(f"{LAST} .note"))
    page.until(lambda: patient.metric("vllm:num_requests_running") == 0)
    page.until(lambda: len(page.all(".talk")) == 2)
    page.all(".talk")[1].click()
    page.until(lambda: "stopped" in page.text(f"{LAST} .note"))
    assert len(said(page)) > 40


def test_two_tabs_do_not_overwrite_conversations_of_each_other(page: Browser, server: Server) -> None:
    page.fill("#max_tokens", "8")
    page.fill("#draft", "The first tab." + Keys.ENTER)
    settled(page)
    first = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    page.resize(1440, 1000)
    try:
        page.driver.get(f"{server.url}/")
        page.until(lambda: page.text("#model") != "")
        assert page.all("#log .message") == []
        page.fill("#max_tokens", "8")
        page.fill("#draft", "The second tab." + Keys.ENTER)
        settled(page)
        page.click("#clear")
    finally:
        page.driver.close()
        page.driver.switch_to.window(first)
    page.driver.refresh()
    page.until(lambda: page.all(LAST) and page.text("#log .message:first-child .body") == "The first tab.")
    page.until(lambda: {each.text for each in page.all(".talk-title")} == {"The first tab.", "The second tab."})


def test_exported_conversation_round_trips_and_invalid_import_fails(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/")
    talk = {
        "system": "Be brief.",
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": "Two",
                "version": 1,
                "versions": [[{"role": "assistant", "content": "One"}, {"role": "user", "content": "More"}], None],
            },
        ],
    }
    script = "const talk = module.talkFrom(args[0]); talk.show(1, 0); return [talk.toJSON(), talk.toMarkdown()];"
    exported, markdown = browser.module("/web/js/talks/talk.js", script, talk)
    one, two = exported["messages"][1:], exported["messages"][1]["versions"]
    assert [each["content"] for each in one] == ["One", "More"]
    assert two == [None, [{"role": "assistant", "content": "Two"}]]
    assert markdown == "# Hi\n\n## System prompt\n\nBe brief.\n\n## You\n\nHi\n\n## Model\n\nOne\n\n## You\n\nMore\n"
    meta = {"id": "chatcmpl-1", "finish": "length", "tokens": 7, "first": 0.5, "seconds": 1.5}
    invalid_meta = {"stopped": "yes", "cached": -1, "prompt": "3", "html": "<b>"}
    messages = [{"role": "assistant", "content": "Two", "meta": meta | invalid_meta}]
    script = "const { id, messages } = module.talkFrom(args[0]).toJSON(); return [id, messages[0].meta];"
    for name, same in (("mb2k3x9qabcdefgh", True), ("../../x", False), (7, False), (None, False)):
        exported = browser.module("/web/js/talks/talk.js", script, {"id": name, "messages": messages})
        assert (exported[0] == name, exported[1]) == (same, meta)
    for bad in (1, {}, {"messages": 1}, {"messages": [1]}, {"messages": [{"role": "user", "content": 1}]}):
        outcome = browser.module("/web/js/talks/talk.js", "module.talkFrom(args[0])", bad)
        assert str(outcome).startswith("failed: Error: "), bad


def test_import_skips_existing_conversations(page: Browser, tmp_path: Path) -> None:
    def import_text(content: str, name: str = "all.json") -> str:
        (tmp_path / name).write_text(content)
        page.run("document.getElementById('talks-said').textContent = ''")
        page.all("#talks-import")[0].send_keys(str(tmp_path / name))
        return page.until(lambda: page.text("#talks-said"))

    stored = "return Object.keys(localStorage).filter((name) => name.startsWith('quire.talk.')).sort()"
    page.fill("#max_tokens", "8")
    page.fill("#draft", "Tell me of a fox." + Keys.ENTER)
    settled(page)
    (name,) = page.run(stored)
    stored_talk = page.run("return localStorage[arguments[0]]", name)
    exported = json.dumps({"conversations": [json.loads(stored_talk)], "presets": {}})
    assert import_text(exported) == "Read: 0 conversations. One was already there."
    other = json.loads(stored_talk) | {"updated": 5}
    for expected in ("Read: one conversation.", "Read: 0 conversations. One was already there."):
        assert import_text(json.dumps([other])) == expected
        assert len(page.run(stored)) == 2
        assert page.run("return localStorage[arguments[0]]", name) == stored_talk
    page.click("#talks-list [aria-label^=Delete]")  # the one that is shown
    assert import_text(exported) == "Read: one conversation."
    page.click(".talk")
    assert "cut at max tokens" in page.text(f"{LAST} .note"), "how it was made is kept"
    assert import_text("# Notes\n", "notes.md") == "notes.md is not a Quire export: it is no JSON."
    assert import_text("{}").startswith("all.json is not a Quire export: ")


def attach(page: Browser, *paths: Path) -> None:
    page.all("#attach")[0].send_keys("\n".join(map(str, paths)))


def test_attached_files_are_sent_in_fences_and_shown_folded(page: Browser, server: Server, tmp_path: Path) -> None:
    notes, code = tmp_path / "notes.txt", tmp_path / "fox.md"
    notes.write_text("The fox lives in a den.\r\n")
    code.write_text("A fence:\n```py\nfox()\n```\n")
    attach(page, notes, code)
    page.until(lambda: len(page.all("#attached li")) == 2)
    page.fill("#max_tokens", "6")
    page.fill("#draft", "Who lives there?" + Keys.ENTER)
    settled(page)
    fences = "```notes.txt\nThe fox lives in a den.\n```\n\n````fox.md\nA fence:\n```py\nfox()\n```\n````"
    expected_prompt = f"{fences}\n\nWho lives there?"
    assert flat(said(page)) == flat(answer(server, [{"role": "user", "content": expected_prompt}], max_tokens=6))
    assert not page.one("#log .message:first-child").text.count("den"), "folded"
    page.click(".attached-file summary")
    assert "The fox lives in a den." in page.one("#log .message:first-child").text
    page.click("#log .message:first-child [data-action=edit]")
    page.one("#log .message:first-child textarea").send_keys(" And who else?", Keys.CONTROL + Keys.ENTER)
    page.until(lambda: any("2 of 2" in each.text for each in page.all("#log .message:first-child .version")))
    settled(page)
    assert len(page.all(".attached-file")) == 2, "an edited message keeps its files"
    page.driver.refresh()
    page.until(lambda: page.all(LAST) and len(page.all(".attached-file")) == 2)


def pdf(path: Path, *lines: str) -> Path:
    """Write a PDF file of one page with these lines, or of one page without text."""
    text_operators = " T* ".join(f"({line}) Tj" for line in lines)
    stream = f"BT /F1 12 Tf 14 TL 72 700 Td {text_operators} ET".encode()
    parts = [b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>"]
    parts.append(
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>"
    )
    parts.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream))
    content, places = b"%PDF-1.4\n", []
    for number, part in enumerate(parts, 1):
        places.append(len(content))
        content += b"%d 0 obj\n%s\nendobj\n" % (number, part)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"xref\n0 5\n0000000000 65535 f \n%strailer << /Size 5 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n"
    path.write_bytes(content + end % (table, len(content)))
    return path


def test_text_of_attached_pdf_is_sent(page: Browser, server: Server, tmp_path: Path) -> None:
    attach(page, pdf(tmp_path / "report.pdf", "Foxes live in dens.", "Owls live in trees."))
    page.until(lambda: page.all("#attached li"))
    page.fill("#max_tokens", "6")
    page.fill("#draft", "Who lives there?" + Keys.ENTER)
    settled(page)
    expected_prompt = "```report.pdf\nFoxes live in dens.\nOwls live in trees.\n```\n\nWho lives there?"
    assert flat(said(page)) == flat(answer(server, [{"role": "user", "content": expected_prompt}], max_tokens=6))
    (broken := tmp_path / "broken.pdf").write_bytes(b"%PDF-1.4 no more")
    attach(page, pdf(tmp_path / "scanned.pdf"), broken)
    page.until(lambda: page.text("#problem").count("\n") == 1)
    assert page.text("#problem").split("\n") == [
        "scanned.pdf has no text in it: its pages are pictures.",
        "broken.pdf is no PDF file that can be read.",
    ]


def test_rejected_attachments_are_named(page: Browser, tmp_path: Path) -> None:
    large, binary, none, fine = (tmp_path / name for name in ("large.txt", "binary.dat", "none.txt", "fine.txt"))
    large.write_text("x" * 300_000)
    binary.write_bytes(b"\x89PNG\r\n\x1a\n\xff")
    none.write_text("")
    fine.write_text("fine")
    attach(page, large, binary, none, fine)
    page.until(lambda: page.all("#attached li"))
    page.until(lambda: page.text("#problem").count("\n") == 2)
    assert page.text("#problem").split("\n") == [
        "large.txt has 293 KiB; the files of a message may have 256 KiB together.",
        "binary.dat is neither text in UTF-8 nor a PDF or a picture; only such files can be attached.",
        "none.txt is empty.",
    ]
    assert [each.text for each in page.all("#attached li span:first-child")] == ["fine.txt"]
    page.click("#attached button")
    assert not page.all("#attached li")
    page.run(
        "const data = new DataTransfer(); data.items.add(new File(['dropped'], 'dropped.txt'));"
        "for (const type of ['dragenter', 'dragover', 'drop']) document.getElementById('chat').dispatchEvent("
        "new DragEvent(type, { dataTransfer: data, bubbles: true, cancelable: true }))"
    )
    page.until(lambda: [each.text for each in page.all("#attached li span:first-child")] == ["dropped.txt"])
    assert not page.all(".dropping")


def test_presets_are_saved_selected_deleted_and_imported(page: Browser, tmp_path: Path) -> None:
    def choices() -> list[str]:
        return [each.text for each in page.all("#preset option")]

    def pick(name: str) -> None:
        page.run(
            "const s = document.getElementById('preset'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))",
            name,
        )

    assert choices()[0] == "Not saved"
    page.click("#preset-save")
    page.fill("#preset-name", "cold" + Keys.ENTER)
    page.until(lambda: choices()[-1] == "cold")
    page.fill("#temperature", "1.5")
    assert page.one("#preset").get_property("value") == ""
    pick("cold")
    assert page.one("#temperature").get_property("value") == "0"
    page.driver.refresh()
    page.until(lambda: page.text("#model") != "" and page.one("#preset").get_property("value") == "cold")
    stored_presets = page.run("return localStorage['quire.presets']")
    page.click("#preset-delete")
    assert "cold" not in choices()
    assert page.one("#temperature").get_property("value") == "0"
    exported = tmp_path / "all.json"
    exported.write_text(json.dumps({"conversations": [], "presets": json.loads(stored_presets)}))
    page.all("#talks-import")[0].send_keys(str(exported))
    page.until(lambda: page.text("#talks-said") == "Read: 0 conversations and one preset.")
    assert page.one("#preset").get_property("value") == "cold"
    exported.write_text('{"conversations": [], "presets": {"x": {"temperature": 1}}}')
    page.all("#talks-import")[0].send_keys(str(exported))
    page.until(lambda: "temperature must be a string" in page.text("#talks-said"))


def test_token_colors_match_logprobs_of_api(page: Browser, server: Server) -> None:
    page.click("#logprobs")
    page.fill("#max_tokens", "12")
    page.fill("#draft", STORY + Keys.ENTER)
    page.until(lambda: "cut at max tokens" in page.text(f"{LAST} .note"))
    body = {"messages": [{"role": "user", "content": STORY}], "temperature": 0, "max_tokens": 12, "logprobs": True}
    reported = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "top_logprobs": 5}, timeout=60).json()
    tokens = reported["choices"][0]["logprobs"]["content"]
    spans = page.run(
        "return [...document.querySelectorAll('.token')].map((span) => [span.textContent, span.className])"
    )
    assert [text for text, _ in spans] == [token["token"] for token in tokens]
    bounds = (-0.1053605, -0.5108256, -1.2039728, -2.3025851)  # ln of 0.9, 0.6, 0.3, 0.1
    assert [name for _, name in spans] == [
        f"token likely-{sum(token['logprob'] < bound for bound in bounds)}" for token in tokens
    ]
    page.one(".tokens").send_keys(Keys.ARROW_RIGHT)
    readout = page.text("#token-readout")
    assert readout.startswith(f"“{tokens[0]['token']}”")
    assert readout.count("%") == 6


def test_completion_view_continues_text_and_adopts_result(page: Browser, server: Server) -> None:
    page.run("document.querySelector('input[value=completion]').click()")
    page.fill("#prompt", "Once upon a time")
    page.fill("#max_tokens", "20")
    page.one("#prompt").send_keys(Keys.CONTROL + Keys.ENTER)
    page.until(lambda: "cut at max tokens" in page.text("#continued-note"))
    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 20}
    expected = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    assert page.text("#continued") == expected
    page.click("#adopt")
    assert page.one("#prompt").get_property("value") == "Once upon a time" + expected


def test_shown_python_and_curl_code_repeats_request(page: Browser, server: Server) -> None:
    page.fill("#max_tokens", "60")
    page.fill("#top_k", "7")
    page.fill("#draft", "It's a fox's \"story\"?" + Keys.ENTER)
    page.until(lambda: "cut at" in page.text(f"{LAST} .note"))
    expected = flat(said(page))
    page.click("#as-python")
    script = str(page.one("#text-body").get_property("value"))
    page.one("#text-body").send_keys(Keys.ESCAPE)
    completed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (flat(completed.stdout), completed.stderr) == (expected, "")
    page.click("#as-curl")
    command = str(page.one("#text-body").get_property("value"))
    page.one("#text-body").send_keys(Keys.ESCAPE)
    assert '"top_k": 7' in command
    if shutil.which("curl") and os.name == "posix":
        output = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120).stdout
        assert output.endswith("data: [DONE]\n\n")
        assert output.count('"content"') > 5


def test_request_errors_are_shown_and_draft_is_kept(page: Browser) -> None:
    page.fill("#temperature", "9")
    page.fill("#draft", STORY + Keys.ENTER)
    page.until(lambda: "temperature" in page.text("#problem"))
    assert page.text("#said") == "", "nothing is being written any more"
    assert page.all("#log .message") == []
    assert page.one("#draft").get_property("value") == STORY, "sent again, it is there once"
    page.until(lambda: not page.all(".talk"))
    assert all("400" in error for error in page.errors()), "the browser logs the refusal, and nothing else"
    page.fill("#temperature", "0")
    page.click("#tools-fold summary")
    page.click("#extra-example")
    page.click("#send")
    settled(page)
    assert page.text("#problem") == "", "the example may go with any request"
    page.fill("#draft", "And then?")
    page.fill("#tools", "[{")
    page.click("#send")
    page.until(lambda: page.text("#problem").startswith("Tools:"))


HOSTILE = """# <img src=x onerror=alert(1)>
<script>alert(2)</script> **<b>bold</b>** [x](javascript:alert(3)) [y](https://example.org/"onclick=alert(4))
`</code><script>` ![i](https://example.org/i.png)

```html
<iframe src="javascript:alert(5)"></iframe>
```
- one
  - two <svg onload=alert(6)>
3. three
| a | b |
|---|---|
| <i>c</i> | d |
> > deep"""


SHOWN = r"""Here $E=mc^2$, not $5 and $6; $\href{javascript:alert(7)}{x}$ \(a<b\)

$$\frac{1}{2}$$

- [x] done
```python
return "<b>"
```"""


def test_markdown_highlights_code_and_renders_formulas(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/")
    draw = "document.querySelector('#opening').replaceChildren(module.markdown(args[0]))"
    browser.module("/web/js/message/markdown.js", draw, SHOWN)
    browser.until(lambda: browser.all("#opening .code-keyword") and len(browser.all("#opening math")) == 4)
    assert browser.text("#opening .code-keyword") == "return"
    assert browser.text("#opening .code-string") == '"<b>"'
    assert browser.text("#opening math mi") == "E"
    assert browser.all("#opening math[display=block] mfrac")
    box = "const box = document.querySelector('.formula.displayed');"
    over = browser.run(f"{box} return [box.scrollHeight - box.clientHeight, getComputedStyle(box).overflowY]")
    assert over in ([0, "hidden"], [1, "hidden"]), "no scroll bar for a pixel, and nothing is cut off"
    assert "not $5 and $6;" in browser.text("#opening")
    assert browser.run("return document.querySelector('#opening .task input').checked")
    assert not browser.all("#opening [href]")


def test_markdown_escapes_html_and_unsafe_links(browser: Browser, server: Server) -> None:
    browser.open(f"{server.url}/")
    tags, links, text = browser.module(
        "/web/js/message/markdown.js",
        "const box = document.createElement('div'); box.append(module.markdown(args[0]));"
        "const all = [...box.querySelectorAll('*')];"
        "return [all.map((each) => each.localName), all.filter((each) => each.href).map((each) => each.protocol),"
        "box.textContent]",
        HOSTILE,
    )
    allowed = {"h3", "p", "strong", "a", "code", "pre", "ul", "ol", "li", "blockquote"}
    assert set(tags) - {"br", "div", "button", "table", "thead", "tbody", "tr", "th", "td"} == allowed
    assert set(links) == {"https:"}
    for escaped in (
        "<img src=x onerror=alert(1)>",
        "<script>alert(2)</script>",
        "<iframe",
        "<svg onload=alert(6)>",
        "<i>c</i>",
    ):
        assert escaped in text, escaped
    for source in ("", "*", "**", "`", "```", "- ", "[](", "|", "> ", "# ", "_a_b_", "\n\n\n", "*" * 2000, "[" * 2000):
        assert not str(browser.module("/web/js/message/markdown.js", "module.markdown(args[0])", source)).startswith(
            "failed"
        )


def test_draft_stays_until_settings_are_valid(page: Browser) -> None:
    page.fill("#max_tokens", "5")
    page.click("#json")
    page.fill("#schema", '{"type": "object"')
    page.fill("#draft", "Who is there?" + Keys.ENTER)
    page.until(lambda: page.text("#problem").startswith("JSON schema: "))
    place = "document.querySelector(arguments[0]).getBoundingClientRect()"
    bottom, top = page.run(f"return {place}.bottom", "#problem"), page.run(f"return {place}.top", "#composer")
    assert bottom <= top + 1, "the composer does not cover it"
    assert page.all("#log .message") == []
    page.fill("#schema", '{"type": "object", "maxProperties": 0}')
    page.one("#draft").send_keys(Keys.ENTER)
    page.until(lambda: len(page.all("#log .message")) == 2)
    settled(page)
    assert "Who is there?" in page.text("#log .message:first-child")


def test_paired_fields_align_when_label_wraps(page: Browser) -> None:
    """Scroll bars take room, so one label may need two lines."""
    script = "return [...document.querySelectorAll('.pairs input')].map((each) => each.getBoundingClientRect().bottom)"
    longer = "document.querySelector('label[for=max_tokens]').textContent = 'A label of two lines in every font'"
    page.run(longer)
    bottoms = page.run(script)
    assert bottoms[0:8:2] == bottoms[1:8:2]


def test_element_ids_are_unique(page: Browser) -> None:
    ids = page.run("return [...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len(set(ids))
    assert page.run("return document.querySelector('label[for=stop]').control.tagName") == "TEXTAREA"


def test_forced_tool_choice_becomes_auto_after_tool_result(page: Browser) -> None:
    script = "return args[0].map((messages) => module.chatBody(args[1], {system: ''}, messages).tool_choice)"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    first_turn = [{"role": "user", "content": "x"}]
    with_result = [*first_turn, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with_result.append({"role": "tool", "tool_call_id": "1", "content": "7"})
    for choice, after in (
        ("required", "auto"),
        ({"type": "function", "function": {"name": "f"}}, "auto"),
        ("none", "none"),
    ):
        settings = {"stop": "", "tools": "", "schema": "", "extra": json.dumps({"tool_choice": choice})}
        assert page.module("/web/js/request.js", script, [first_turn, with_result], settings) == [choice, after]
