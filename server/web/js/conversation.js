// One message on the page: its text, thinking, tool calls and tokens, and what can be done with it.

import { el } from "./dom.js";
import { markdown } from "./markdown.js";
import { tokenSpans, walkable } from "./tokens.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool result", system: "System" };

/** Shows a message and follows it while it is written. `actions` are called with this view. */
export class MessageView {
  constructor(message, actions, settings) {
    this.message = message;
    this.actions = actions;
    this.settings = settings;
    this.body = el("div", { class: "body" });
    this.note = el("p", { class: "note" });
    this.buttons = el("div", { class: "message-buttons" });
    this.element = el("li", { class: `message ${message.role}` },
      el("p", { class: "margin-label" }, NAMES[message.role] ?? message.role),
      el("div", { class: "column" }, this.body, this.note, this.buttons),
    );
    this.refresh();
  }

  refresh() {
    const { message } = this;
    this.element.setAttribute("aria-busy", String(Boolean(message.writing)));
    this.element.classList.toggle("writing", Boolean(message.writing));
    this.body.replaceChildren(...this.#reasoning(), ...content(message, this.settings), ...this.#calls());
    this.note.textContent = note(message.meta);
    this.note.hidden = !this.note.textContent;
    this.buttons.replaceChildren(...(message.writing ? [] : this.#choices()));
  }

  /** Turns the text into a field to change it in. */
  edit() {
    const field = el("textarea", {
      rows: Math.min(20, this.message.content.split("\n").length + 1),
      value: this.message.content,
      "aria-label": `Text of this message by ${NAMES[this.message.role]}`,
    });
    const done = (keep) => {
      if (keep) this.message.content = field.value;
      if (keep) delete this.message.tokens;
      this.refresh();
      if (keep) this.actions.changed(this);
      this.buttons.querySelector("button")?.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") done(false);
      else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) done(true);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.body.replaceChildren(field);
    this.buttons.replaceChildren(
      el("button", { type: "button", class: "quiet", onclick: () => done(true) }, "Save"),
      el("button", { type: "button", class: "quiet", onclick: () => done(false) }, "Leave as it was"),
    );
    field.focus();
  }

  #choices() {
    const button = (label, action, name) =>
      el("button", { type: "button", class: "quiet small", onclick: action, "data-action": name }, label);
    const { role, meta } = this.message;
    return [
      button("Edit", () => this.edit(), "edit"),
      role === "assistant"
        ? button("Again", () => this.actions.again(this), "again")
        : button("Ask from here", () => this.actions.askFrom(this), "ask"),
      button("Delete", () => this.actions.remove(this), "delete"),
      meta?.id ? button("Explain", () => this.actions.explain(meta.id), "explain") : null,
    ].filter(Boolean);
  }

  #reasoning() {
    const { reasoning, content: said, writing } = this.message;
    if (!reasoning) return [];
    const open = this.body.querySelector("details.reasoning")?.open ?? (writing && !said);
    return [el("details", { class: "reasoning", open: Boolean(open) },
      el("summary", {}, writing && !said ? "Thinking…" : "Thought"), el("p", {}, reasoning))];
  }

  #calls() {
    return (this.message.tool_calls ?? []).map((call) => el("div", { class: "tool-call" },
      el("p", { class: "tool-name" }, el("span", {}, "calls "), el("code", {}, call.function.name)),
      el("pre", { tabindex: "0", role: "region", "aria-label": `Arguments of ${call.function.name}` },
        el("code", {}, pretty(call.function.arguments))),
      this.message.writing ? null : el("button", { type: "button", class: "quiet small",
        onclick: () => this.actions.answerCall(this, call) }, "Give its result"),
    ));
  }
}

/** A message's text as nodes: tokens where their probabilities are known, Markdown or plain text where not. */
export function content(message, settings) {
  if (message.tokens?.length && settings.logprobs) {
    const block = el("div", { class: "plain tokens" }, tokenSpans(message.tokens));
    walkable(block);
    return [block];
  }
  if (!message.content) return [];
  if (settings.markdown && message.role === "assistant")
    return [el("div", { class: "prose" }, markdown(message.content))];
  return [el("div", { class: "plain" }, message.content)];
}

/** How an answer went, in one line. */
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

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still being written
  }
}
