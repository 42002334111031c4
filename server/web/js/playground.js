// The playground: a conversation or a text, written on by the model.

import { call } from "./api.js";
import { ask } from "./answer.js";
import { content, MessageView, note } from "./conversation.js";
import { $, el, perFrame, say } from "./dom.js";
import { buildFields, DEFAULTS, fillModels, parameters } from "./fields.js";
import { curl, python } from "./snippets.js";
import { loadKey, loadState, saveState } from "./store.js";

const STARTERS = [
  "Tell me a story about a fox.",
  "Tell me a story about a king who had three sons.",
  "Who lives in the dark forest?",
];
const PATHS = { chat: "/v1/chat/completions", completion: "/v1/completions" };
const NEAR_END = 160;

/** A message as the API takes it. */
function wire({ role, content: text, tool_calls, tool_call_id }) {
  return { role, content: text, ...(tool_calls && { tool_calls }), ...(tool_call_id && { tool_call_id }) };
}

export class Playground {
  constructor(frame) {
    this.frame = frame;
    this.state = loadState({ mode: "chat", system: "", messages: [], prompt: "", settings: {} });
    this.state.settings = { ...DEFAULTS, ...this.state.settings };
    this.views = [];
    this.continued = null;
    this.running = null;
    this.modelsKnown = false;
    buildFields(this.state.settings, (name) => this.#settingChanged(name));
    this.#listen();
    this.#restore();
  }

  show() {
    if (!this.modelsKnown) this.#loadModels();
  }

  hide() {}

  keyChanged() {
    this.modelsKnown = false;
  }

  async #loadModels() {
    try {
      const response = await call("/v1/models");
      fillModels((await response.json()).data.map(({ id }) => id), this.state.settings);
      this.modelsKnown = true;
      this.#problem("");
    } catch (error) {
      this.#failed(error);
    }
  }

  #restore() {
    const { state } = this;
    document.querySelector(`input[name=mode][value=${state.mode}]`).checked = true;
    $("system").value = state.system;
    $("system-fold").open = Boolean(state.system);
    $("prompt").value = state.prompt;
    // On a phone the settings would push the page away.
    $("settings-fold").open = matchMedia("(min-width: 62rem)").matches;
    $("starters").append(
      ...STARTERS.map((text) =>
        el("button", { type: "button", class: "starter", onclick: () => this.#say(text) }, text),
      ),
    );
    this.#renderLog();
    this.#modeChanged();
  }

  #listen() {
    const { state } = this;
    for (const input of document.querySelectorAll("input[name=mode]")) {
      input.addEventListener("change", () => this.#modeChanged(input.value));
    }
    $("system").addEventListener("input", () => this.#keep(() => (state.system = $("system").value)));
    $("prompt").addEventListener("input", () => this.#keep(() => (state.prompt = $("prompt").value)));
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    $("stop").addEventListener("click", () => this.stop());
    $("clear").addEventListener("click", () => this.#clear());
    $("adopt").addEventListener("click", () => this.#adopt());
    $("as-curl").addEventListener("click", () => this.#showCode("curl"));
    $("as-python").addEventListener("click", () => this.#showCode("Python"));
    $("playground").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running) this.stop();
      const sends = event.target.id === "draft" && !event.shiftKey;
      const sendsPrompt = event.target.id === "prompt" && (event.ctrlKey || event.metaKey);
      if (event.key === "Enter" && !event.isComposing && (sends || sendsPrompt)) {
        event.preventDefault();
        this.#submit();
      }
    });
  }

  #keep(change) {
    change?.();
    // Tokens with their alternatives are large, and only worth keeping on the screen.
    const messages = this.state.messages.filter((each) => !each.writing).map(({ tokens: _, ...rest }) => rest);
    saveState({ ...this.state, messages });
  }

  #settingChanged(name) {
    this.#keep();
    if (name !== "logprobs" && name !== "markdown") return;
    for (const view of this.views) view.refresh();
    if (this.continued) this.#renderContinuation();
    $("probabilities").hidden = !this.state.settings.logprobs;
  }

  #modeChanged(mode = this.state.mode) {
    this.#keep(() => (this.state.mode = mode));
    const chat = mode === "chat";
    $("chat").hidden = !chat;
    $("completion").hidden = chat;
    $("draft").hidden = !chat;
    $("draft").disabled = !chat;
    $("composer").classList.toggle("bare", !chat);
    $("send").textContent = chat ? "Send" : "Continue it";
    $("hint").firstElementChild.textContent = chat ? "Enter" : "Ctrl+Enter";
    $("probabilities").hidden = !this.state.settings.logprobs;
  }

  /** What would be sent now, the draft included. Throws Error when a setting is not valid. */
  #body(messages) {
    const { state } = this;
    const chat = state.mode === "chat";
    const body = { ...parameters(state.settings, chat), stream: true, stream_options: { include_usage: true } };
    if (!chat) return { model: body.model, prompt: state.prompt, ...body };
    const said = messages.map(wire);
    const system = state.system.trim() ? [{ role: "system", content: state.system }] : [];
    return { model: body.model, messages: [...system, ...said], ...body };
  }

  #validBody(messages) {
    try {
      return this.#body(messages);
    } catch (error) {
      this.#failed(error);
      return null;
    }
  }

  #submit() {
    if (this.running) return;
    if (this.state.mode === "completion") this.#continue();
    else if ($("draft").value.trim()) this.#say($("draft").value);
    else if (["user", "tool"].includes(this.state.messages.at(-1)?.role)) this.#answer();
  }

  #say(text) {
    if (this.running) return;
    this.#add({ role: "user", content: text });
    $("draft").value = "";
    this.#answer();
  }

  #add(message) {
    this.state.messages.push(message);
    const view = new MessageView(message, this.#actions(), this.state.settings);
    this.views.push(view);
    $("log").append(view.element);
    $("opening").hidden = true;
    this.#keep();
    return view;
  }

  async #answer() {
    const message = { role: "assistant", content: "", writing: true };
    const body = this.#validBody(this.state.messages);
    if (!body) return;
    const view = this.#add(message);
    this.#scroll(true);
    await this.#run("chat", body, message, () => view.refresh());
    if (!message.content && !message.reasoning && !message.tool_calls && !message.tokens) this.#remove(view);
  }

  async #continue() {
    const body = this.#validBody([]);
    if (!body) return;
    this.continued = { role: "completion", content: "" };
    $("continuation").hidden = false;
    $("adopt").hidden = true;
    await this.#run("completion", body, this.continued, () => this.#renderContinuation());
    $("adopt").hidden = !this.continued.content;
  }

  #renderContinuation() {
    $("continued").replaceChildren(...content(this.continued, this.state.settings));
    say($("continued-note"), this.running ? "" : note(this.continued.meta));
  }

  /** One request from its first byte to its last; `draw` shows how far it is. */
  async #run(mode, body, message, draw) {
    this.running = new AbortController();
    this.#problem("");
    this.#working(true);
    const grown = perFrame(() => {
      const follow = innerHeight + scrollY > document.documentElement.scrollHeight - NEAR_END;
      draw();
      if (follow) this.#scroll();
    });
    try {
      await ask(PATHS[mode], body, message, this.running.signal, grown);
      say($("said"), `Answer complete. ${note(message.meta)}`);
    } catch (error) {
      this.#failed(error);
    } finally {
      delete message.writing;
      this.running = null;
      this.#working(false);
      draw();
      this.#keep();
    }
  }

  #working(running) {
    $("send").hidden = running;
    $("stop").hidden = !running;
    $("clear").disabled = running;
    if (running && document.activeElement === $("send")) $("stop").focus();
    else if (!running && document.activeElement === document.body)
      (this.state.mode === "chat" ? $("draft") : $("send")).focus();
    if (running) say($("said"), "The model is writing");
  }

  stop() {
    this.running?.abort();
  }

  #scroll(always = false) {
    if (always || !$("playground").hidden) scrollTo({ top: document.documentElement.scrollHeight });
  }

  #failed(error) {
    this.#problem(error.message);
    if (error.needsKey) this.frame.askForKey(error.message);
  }

  #problem(text) {
    say($("problem"), text);
    $("problem").hidden = !text;
  }

  #actions() {
    return {
      changed: () => this.#keep(),
      again: (view) => this.#rerun(this.state.messages.indexOf(view.message)),
      askFrom: (view) => this.#rerun(this.state.messages.indexOf(view.message) + 1),
      remove: (view) => this.#remove(view),
      explain: (id) => this.frame.explain(id).catch((error) => this.#failed(error)),
      answerCall: (view, { id }) => {
        this.#add({ role: "tool", tool_call_id: id, content: "" }).edit();
      },
    };
  }

  /** Drops all from that message on, and lets the model answer what is left. */
  #rerun(from) {
    if (this.running) return;
    this.state.messages.length = from;
    this.#renderLog();
    this.#answer();
  }

  #remove(view) {
    if (view.message.writing) return;
    this.state.messages.splice(this.state.messages.indexOf(view.message), 1);
    this.#renderLog();
    this.#keep();
    if (document.activeElement === document.body) $("draft").focus();
  }

  #renderLog() {
    this.views = this.state.messages.map((message) => new MessageView(message, this.#actions(), this.state.settings));
    $("log").replaceChildren(...this.views.map((view) => view.element));
    $("opening").hidden = this.views.length > 0;
  }

  #clear() {
    if (this.state.mode === "chat") {
      this.state.messages.length = 0;
      this.#renderLog();
      $("draft").focus();
    } else {
      this.state.prompt = $("prompt").value = "";
      this.continued = null;
      $("continuation").hidden = true;
      $("prompt").focus();
    }
    this.#problem("");
    this.#keep();
  }

  #adopt() {
    this.#keep(() => (this.state.prompt += this.continued.content));
    $("prompt").value = this.state.prompt;
    this.continued = null;
    $("continuation").hidden = true;
    $("prompt").focus();
  }

  #showCode(kind) {
    try {
      const draft = $("draft").value.trim() ? [{ role: "user", content: $("draft").value }] : [];
      const asked =
        this.state.messages.at(-1)?.role === "assistant" && !draft.length
          ? this.state.messages.slice(0, -1)
          : this.state.messages;
      const body = this.#body([...asked, ...draft]);
      const key = Boolean(loadKey());
      this.frame.showText(
        kind === "curl" ? "As a curl command" : "As a Python script",
        kind === "curl" ? curl(PATHS[this.state.mode], body, key) : python(body, key),
      );
    } catch (error) {
      this.#failed(error);
    }
  }
}
