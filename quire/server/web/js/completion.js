// The playground's other half: a text that the model continues.

import { $, say } from "./dom.js";
import { content, note } from "./message/view.js";

export class Completion {
  /** `keep(prompt)` is called when the text has changed. */
  constructor(prompt, settings, keep) {
    Object.assign(this, { settings, keep, writing: false });
    this.continued = null;
    $("prompt").value = prompt;
    $("prompt").addEventListener("input", () => keep($("prompt").value));
    $("adopt").addEventListener("click", () => this.#adopt());
  }

  /** Asks for a continuation: `run(message, draw)` sends the request and reads its answer. */
  async ask(run) {
    this.continued = { role: "completion", content: "" };
    this.writing = true;
    $("continuation").hidden = false;
    $("adopt").hidden = true;
    await run(this.continued, () => this.draw());
    this.writing = false;
    this.draw();
    $("adopt").hidden = !this.continued?.content;
  }

  draw() {
    if (!this.continued) return;
    $("continued").replaceChildren(...content(this.continued, this.settings));
    say($("continued-note"), this.writing ? "" : note(this.continued.meta));
  }

  clear() {
    this.#show("");
  }

  #adopt() {
    this.#show($("prompt").value + this.continued.content);
  }

  #show(prompt) {
    $("prompt").value = prompt;
    this.keep(prompt);
    this.continued = null;
    $("continuation").hidden = true;
    $("prompt").focus();
  }
}
