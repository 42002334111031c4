// One message of the conversation on the page: its text, reasoning, tool calls, tokens and buttons.

import { copyButton, el } from "../dom.js";
import { bytesOf, withFiles } from "../draft/files.js";
import { pictureRow } from "../draft/pictures.js";
import { size } from "../figures.js";
import { callCards } from "./calls.js";
import { markdown } from "./markdown.js";
import { tokenSpans, walkable } from "./tokens.js";
import { jsonBlock, jsonOf } from "./tree.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool result", system: "System" };

/** Shows a message and updates it while it is written. `actions` are called with this view. */
export class MessageView {
  constructor(message, actions, settings) {
    this.message = message;
    this.actions = actions;
    this.settings = settings;
    this.typed = new Map();
    this.thoughtOpen = null;
    this.body = el("div", { class: "body" });
    this.note = el("p", { class: "note" });
    this.buttons = el("div", { class: "message-buttons" });
    this.element = el("li", { class: `message ${message.role}` },
      el("p", { class: "margin-label" }, NAMES[message.role] ?? message.role,
        message.role === "tool" && message.name ? el("code", {}, message.name) : null),
      el("div", { class: "column" }, this.body, this.note, this.buttons),
    );
    this.refresh();
  }

  refresh() {
    const { message } = this;
    this.element.setAttribute("aria-busy", String(Boolean(message.writing)));
    this.element.classList.toggle("writing", Boolean(message.writing));
    this.body.replaceChildren(
      ...this.#reasoning(), ...this.#files(), ...pictureRow(message.pictures), ...content(message, this.settings),
      ...callCards(this, this.typed),
    );
    this.note.textContent = note(message.meta);
    this.note.hidden = !this.note.textContent;
    this.buttons.replaceChildren(...(message.writing ? [] : this.#choices()));
  }

  /** Replaces the text with a field in which it can be edited. */
  edit() {
    const field = el("textarea", {
      rows: Math.min(20, this.message.content.split("\n").length + 1),
      value: this.message.content,
      "aria-label": `Text of this message by ${NAMES[this.message.role]}`,
    });
    const user = this.message.role === "user";
    const done = () => {
      this.refresh();
      this.buttons.querySelector("button")?.focus();
    };
    const save = () => {
      this.message.content = field.value;
      delete this.message.tokens;
      done();
      this.actions.changed(this);
    };
    const { files, pictures } = this.message;
    const ask = () =>
      field.value.trim() || files || pictures ? this.actions.askAs(this, field.value) : field.focus();
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") done();
      else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) (user ? ask : save)();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    const button = (label, action) => el("button", { type: "button", class: "quiet", onclick: action }, label);
    this.body.replaceChildren(field);
    this.buttons.replaceChildren(
      ...(user ? [button("Save and ask", ask)] : []), button("Save", save), button("Cancel", done),
    );
    field.focus();
  }

  #choices() {
    const button = (label, action, name) =>
      el("button", { type: "button", class: "quiet small", onclick: action, "data-action": name }, label);
    const { role, meta, content: text, files } = this.message;
    const said = withFiles(text, files);
    const { actions } = this;
    const last = actions.isLast(this);
    return [
      this.#versions(),
      said ? copyButton(() => said, { class: "quiet small" }) : null,
      button("Edit", () => this.edit(), "edit"),
      role === "assistant" ? button("Try again", () => actions.again(this), "again") : null,
      role === "assistant" && last && (meta?.finish === "length" || meta?.stopped)
        ? button("Continue", () => actions.more(this), "more")
        : null,
      role !== "assistant" && last ? button("Ask for an answer", () => actions.ask(), "ask") : null,
      button("Delete", () => actions.remove(this), "delete"),
      meta?.id ? button("Explain", () => actions.explain(meta.id), "explain") : null,
    ].filter(Boolean);
  }

  /** Leafs through the versions of what follows from here. */
  #versions() {
    const { versions, version } = this.message;
    if (!versions) return null;
    const turn = (to, sign, label) =>
      el("button", { type: "button", class: "quiet small", "aria-label": label, disabled: !(to in versions),
        onclick: () => this.actions.show(this, to) }, sign);
    return el("span", { class: "version", role: "group", "aria-label": "Versions" },
      turn(version - 1, "‹", "Earlier version"), `${version + 1} of ${versions.length}`,
      turn(version + 1, "›", "Later version"));
  }

  #reasoning() {
    const { reasoning, content: said, writing, meta } = this.message;
    if (!reasoning) return [];
    const thinking = Boolean(writing && !said);
    const open = this.thoughtOpen ?? thinking; // as its reader left it, or as long as it is all there is
    const thought = meta?.thought === undefined ? "Thought" : `Thought for ${duration(meta.thought)}`;
    const leave = ({ currentTarget }) => (this.thoughtOpen = !currentTarget.parentElement.open);
    return [el("details", { class: "reasoning", open },
      el("summary", { onclick: leave }, thinking ? "Thinking…" : thought), el("p", {}, reasoning))];
  }

  #files() {
    return (this.message.files ?? []).map(({ name, text }) => el("details", { class: "attached-file" },
      el("summary", {}, name, el("span", { class: "note" }, ` ${size(bytesOf(text))}`)),
      el("pre", { tabindex: "0", role: "region", "aria-label": name }, el("code", {}, text))));
  }
}

/** A message's text as nodes: its tokens if their probabilities are known, else Markdown or plain text. */
export function content(message, settings) {
  if (message.tokens?.length && settings.logprobs) {
    const block = el("div", { class: "plain tokens" }, tokenSpans(message.tokens));
    walkable(block);
    return [block];
  }
  if (!message.content) return [];
  if (message.role !== "user" && settings.markdown) {
    const value = message.writing ? null : jsonOf(message.content);
    if (value !== null) return [jsonBlock(value, message.content)];
    if (message.writing && message.content.startsWith("{"))
      return [el("div", { class: "plain written" }, message.content)];
  }
  if (settings.markdown && message.role === "assistant")
    return [el("div", { class: "prose" }, markdown(message.content))];
  return [el("div", { class: "plain" }, message.content)];
}

/** Tokens, speed and finish reason of an answer, in one line. */
export function note(meta) {
  if (!meta) return "";
  const parts = [];
  if (meta.finish)
    parts.push(
      { stop: "finished", length: "cut at max tokens", abort: "cancelled by the server" }[meta.finish] ??
        meta.finish.replaceAll("_", " "),
    );
  if (meta.stopped) parts.push("stopped");
  if (meta.tokens) parts.push(`${meta.tokens} tokens`);
  if (meta.first !== undefined) parts.push(`first after ${duration(meta.first)}`);
  if (meta.tokens > 1 && meta.seconds > meta.first)
    parts.push(`${((meta.tokens - 1) / (meta.seconds - meta.first)).toFixed(0)} tokens/s`);
  if (meta.cached) parts.push(`${meta.cached} of ${meta.prompt} prompt tokens cached`);
  return parts.join(" · ");
}

const duration = (seconds) => (seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(1)} s`);
