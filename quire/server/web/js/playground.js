// The playground: a conversation, or a text that the model continues.

import { ask, leftStream, takeUp } from "./answer.js";
import { Completion } from "./completion.js";
import { Composer } from "./draft/composer.js";
import { $, el, perFrame, say } from "./dom.js";
import { MessageView, note } from "./message/view.js";
import { Models } from "./models.js";
import { chatBody, completionBody, PATHS } from "./request.js";
import { buildFields, settingsFrom, showSchemaField } from "./settings/fields.js";
import { Presets } from "./settings/presets.js";
import { placeSettings } from "./beside.js";
import { code } from "./snippets.js";
import { startersFor } from "./starters.js";
import {
  NOT_KEPT, forgetTalk, loadKey, loadState, onOtherTabs, saveState, setShownTalk, shownTalk, storedTalk, storeTalk,
} from "./store.js";
import { isEmpty, showsPictures, Talk } from "./talks/talk.js";
import { Talks } from "./talks/panel.js";

const NEAR_END = 160;
export class Playground {
  constructor(frame) {
    this.frame = frame;
    const { mode, prompt, settings } = loadState({ mode: "chat", prompt: "", settings: {} });
    this.state = { mode, prompt, settings: settingsFrom(settings) };
    this.talk = new Talk(storedTalk(shownTalk()) ?? {});
    this.views = [];
    this.running = null;
    this.modelsKnown = false;
    this.models = new Models(this.state.settings);
    this.composer = new Composer({
      submit: () => this.#submit(),
      stop: () => this.stop(),
      problem: (text) => this.#problem(text),
      blind: () => this.models.blind,
    });
    const keepPrompt = (text) => this.#keep(() => (this.state.prompt = text));
    this.completion = new Completion(prompt, this.state.settings, keepPrompt);
    buildFields(this.state.settings, (name) => this.#settingChanged(name));
    this.presets = new Presets(this.state.settings, () => this.#settingChanged("logprobs"));
    placeSettings();
    this.talks = new Talks({
      shown: () => this.talk,
      open: (id) => this.#open(storedTalk(id)),
      gone: (id) => this.#gone(id),
      renamed: (id, name) => id === this.talk.id && this.talk.rename(name),
      presetsRead: () => this.presets.show(),
    });
    this.#listen();
    const left = leftStream(this.talk);
    this.#restore();
    this.#resume(left);
  }

  show() {
    if (!this.modelsKnown) this.#loadModels();
    if (!this.seen && !matchMedia("(pointer: coarse)").matches) this.composer.focus(); // else a keyboard would cover it
    this.seen = true;
  }

  hide() {}

  keyChanged() {
    this.modelsKnown = false;
  }

  async #loadModels() {
    try {
      await this.models.load();
      this.#showStarters(startersFor(this.models.names));
      this.modelsKnown = true;
      this.#problem("");
    } catch (error) {
      this.#failed(error);
    }
  }

  #restore() {
    const { state } = this;
    document.querySelector(`input[name=mode][value=${state.mode}]`).checked = true;
    this.#open(this.talk);
    this.#modeChanged();
  }

  #showStarters(texts) {
    const start = (content) =>
      el("button", { type: "button", class: "starter", onclick: () => this.#say({ role: "user", content }) }, content);
    $("starters").replaceChildren(...texts.map(start));
  }

  #listen() {
    for (const input of document.querySelectorAll("input[name=mode]")) {
      input.addEventListener("change", () => this.#modeChanged(input.value));
    }
    $("system").addEventListener("input", () => this.#keepTalk(() => (this.talk.system = $("system").value)));
    onOtherTabs((id) => {
      this.talks.changed();
      if (id !== this.talk.id || !storedTalk(id)) return;
      if (this.running) this.talk.overtaken = true;
      else this.#open(storedTalk(id));
    });
    $("clear").addEventListener("click", () => this.#clear());
    $("as-curl").addEventListener("click", () => this.#showCode("curl"));
    $("as-python").addEventListener("click", () => this.#showCode("Python"));
  }

  #keep(change) {
    change?.();
    saveState(this.state);
  }

  #keepTalk(change, talk = this.talk) {
    change?.();
    if (talk.forgotten) return;
    if (talk.blank) forgetTalk(talk.id);
    else this.#store(talk);
    this.talks.changed();
  }

  #store(talk) {
    talk.updated = Date.now();
    const stored = storeTalk(talk);
    if (stored !== "all") this.#problem(NOT_KEPT[stored]);
  }

  /** Shows a stored conversation, or a new one. */
  #open(stored) {
    this.stop(); // what came of an answer stays in its conversation
    if (this.running) this.#ended();
    this.talk = stored instanceof Talk ? stored : new Talk(stored ?? {});
    $("system").value = this.talk.system;
    $("system-fold").open = Boolean(this.talk.system);
    this.#renderLog();
    setShownTalk(this.talk.id);
    this.#problem("");
    this.talks.changed();
  }

  #gone(id) {
    if (id !== this.talk.id) return;
    this.talk.forgotten = true; // an answer that is still being written must not bring it back
    this.#open();
  }

  #settingChanged(name) {
    this.#keep();
    if (name === "model") this.models.chosen();
    this.presets.show();
    showSchemaField(this.state.settings);
    if (name === "json") $("schema").closest(".field").scrollIntoView({ block: "nearest" });
    if (name !== "logprobs" && name !== "markdown") return;
    for (const view of this.views) view.refresh();
    this.completion.draw();
    $("probabilities").hidden = !this.state.settings.logprobs;
  }

  #modeChanged(mode = this.state.mode) {
    this.#keep(() => (this.state.mode = mode));
    const chat = mode === "chat";
    $("chat").hidden = !chat;
    $("completion").hidden = chat;
    this.composer.setMode(chat);
    say($("clear"), chat ? "New" : "Clear");
    this.talks.setMode(chat);
    $("probabilities").hidden = !this.state.settings.logprobs;
  }

  /** The request that would be sent now. Throws Error when a setting is not valid. */
  #body(messages) {
    const { mode, prompt, settings } = this.state;
    if (mode === "chat" && messages.some(showsPictures) && this.models.blind)
      throw new Error(`There are pictures in this conversation, and ${this.models.blind}`);
    return mode === "chat" ? chatBody(settings, this.talk, messages) : completionBody(settings, prompt);
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
    else if (this.composer.message) this.#say(this.composer.message);
    else if (["user", "tool"].includes(this.talk.messages.at(-1)?.role)) this.#answer();
  }

  async #say(message) {
    // What is typed stays until the settings are valid.
    if (this.running || !this.#validBody([...this.talk.messages, message])) return;
    this.#add(message);
    this.composer.clear();
    const { talk } = this;
    const refused = await this.#answer();
    // Sent again, with settings that the server takes, it would be there twice.
    if (refused && talk.messages.at(-1) === message && talk === this.talk && this.composer.restore(message))
      this.#remove({ message });
  }

  #add(message) {
    this.talk.messages.push(message);
    const view = new MessageView(message, this.#actions(), this.state.settings);
    const before = this.views.at(-1);
    this.views.push(view);
    before?.refresh(); // it is not the last one any more
    $("log").append(view.element);
    $("opening").hidden = true;
    this.#keepTalk();
    return view;
  }

  /** Asks for an answer to what there is; with `at`, in the place of the messages from there on. Whether the server
      refused the request. */
  async #answer(at = this.talk.messages.length) {
    const message = { role: "assistant", content: "", writing: true };
    const body = this.#validBody(this.talk.messages.slice(0, at));
    if (!body) return false;
    if (at === this.talk.messages.length) this.#add(message);
    else {
      this.talk.branch(at, [message]);
      this.#renderLog();
    }
    this.#scroll(true);
    const { talk } = this;
    const error = await this.#run("chat", body, message, () => this.#refresh(message));
    if (isEmpty(message) && !message.tokens) this.#remove({ message }, talk);
    return error?.refused ?? false;
  }

  /** Goes on with an answer whose stream was left when the page was reloaded. */
  async #resume(stream) {
    if (stream === null) return;
    const message = { role: "assistant", content: "", writing: true };
    this.#add(message);
    await this.#run("chat", null, message, () => this.#refresh(message), stream);
  }

  /** Goes on with an answer that was cut. */
  async #more({ message }) {
    const last = this.talk.messages.indexOf(message);
    const body = this.#validBody(this.talk.messages.slice(0, last + 1));
    if (!body || this.running) return;
    message.writing = true;
    await this.#run("chat", { ...body, add_generation_prompt: false, continue_final_message: true }, message, () =>
      this.#refresh(message));
  }

  #continue() {
    const body = this.#validBody([]);
    if (body) this.completion.ask((message, draw) => this.#run("completion", body, message, draw));
  }

  /** Sends one request, or takes up a stream, and reads its answer to the end; the error, if any. `draw` shows it. */
  async #run(mode, body, message, draw, stream = null) {
    const { talk } = this;
    const running = (this.running = new AbortController());
    this.#problem("");
    this.composer.setRunning(true);
    const grown = perFrame(() => {
      const follow = innerHeight + scrollY > document.documentElement.scrollHeight - NEAR_END;
      draw();
      if (follow) this.#scroll();
    });
    try {
      const { signal } = running;
      await (stream === null ? ask(PATHS[mode], body, message, signal, grown) : takeUp(stream, message, signal, grown));
      say($("said"), `Answer complete. ${note(message.meta)}`);
      return null;
    } catch (error) {
      say($("said"), ""); // the alert says why
      this.#failed(error);
      return error;
    } finally {
      delete message.writing;
      if (running === this.running) this.#ended();
      talk.keepBoth(); // where another tab has stored the same conversation meanwhile
      if (talk === this.talk) setShownTalk(talk.id);
      this.#keepTalk(undefined, talk); // another one may be on the page by now
      draw();
    }
  }

  #ended() {
    this.running = null;
    this.composer.setRunning(false);
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
    if (text) $("problem").scrollIntoView({ block: "nearest" }); // not behind the composer
  }

  #actions() {
    return {
      changed: () => this.#keepTalk(),
      isLast: (view) => view.message === this.talk.messages.at(-1),
      again: (view) => this.running || this.#answer(this.talk.messages.indexOf(view.message)),
      ask: () => this.running || this.#answer(),
      askAs: (view, text) => this.#askAs(this.talk.messages.indexOf(view.message), text),
      more: (view) => this.#more(view),
      show: (view, version) => this.#showVersion(view, version),
      remove: (view) => this.#remove(view),
      explain: (id) => this.frame.explain(id).catch((error) => this.#failed(error)),
      results: (view) => this.talk.results(view.message),
      mayTell: (view) => this.talk.endsWithCalls(view.message),
      tell: (view, toolCall, text) => this.running || this.#tell(view, toolCall, text),
    };
  }

  /** Adds what a tool returned; with the last result the talk goes on. */
  #tell(view, { id, function: { name } }, text) {
    if (this.talk.endsWithCalls(view.message)) this.#add({ role: "tool", tool_call_id: id, name, content: text });
    view.refresh();
    if (!this.talk.endsWithCalls(view.message)) return; // the talk went on without it
    if (this.talk.results(view.message).size === view.message.tool_calls.length) this.#answer();
    else view.element.querySelector(".tool-result textarea")?.focus();
  }

  /** Asks with another text in the place of a message of the user's and what followed it. */
  #askAs(at, text) {
    const { files, pictures } = this.talk.messages[at];
    const asked = { role: "user", content: text, ...(files && { files }), ...(pictures && { pictures }) };
    if (this.running || !this.#validBody([...this.talk.messages.slice(0, at), asked])) return;
    this.talk.branch(at, [asked]);
    this.#renderLog();
    this.#answer();
  }

  #showVersion({ message }, version) {
    if (this.running) return;
    const at = this.talk.messages.indexOf(message);
    this.talk.show(at, version);
    this.#renderLog();
    this.#keepTalk();
    (this.views[at].buttons.querySelector(".version button:enabled") ?? $("draft")).focus();
  }

  #remove(view, talk = this.talk) {
    if (view.message.writing) return;
    talk.remove(talk.messages.indexOf(view.message));
    if (talk === this.talk) this.#renderLog();
    this.#keepTalk(undefined, talk);
    if (document.activeElement === document.body) $("draft").focus();
  }

  /** Shows a message as it is now, wherever it is on the page by now. */
  #refresh(message) {
    this.views.find((view) => view.message === message)?.refresh();
  }

  #renderLog() {
    const { messages } = this.talk;
    this.views = messages.map((message) => new MessageView(message, this.#actions(), this.state.settings));
    $("log").replaceChildren(...this.views.map((view) => view.element));
    $("opening").hidden = this.views.length > 0;
  }

  #clear() {
    if (this.state.mode === "completion") this.completion.clear();
    else {
      this.#open();
      this.composer.focus();
    }
    this.#problem("");
  }

  #showCode(kind) {
    try {
      const { mode } = this.state;
      const draft = this.composer.message ? [this.composer.message] : [];
      const asked =
        this.talk.messages.at(-1)?.role === "assistant" && !draft.length
          ? this.talk.messages.slice(0, -1)
          : this.talk.messages;
      this.frame.showText(...code(kind, PATHS[mode], this.#body([...asked, ...draft]), Boolean(loadKey())));
    } catch (error) {
      this.#failed(error);
    }
  }
}
