// The tool calls of an answer: what the model wants called, and a form for what comes of it, where nobody has told yet.

import { el } from "../dom.js";
import { jsonOf, tree } from "./tree.js";

/**
 * A card for each call. `typed` keeps, by call, what is in a form that was not sent. `actions`: results(view) gives the
 * calls whose results are there; mayTell(view) whether one may be given now; tell(view, call, text) gives one.
 */
export function callCards(view, typed) {
  const { message, actions } = view;
  const calls = message.tool_calls ?? [];
  const told = message.writing || !calls.length ? new Set() : actions.results(view);
  const open = calls.filter((call) => !told.has(call));
  const mayTell = !message.writing && open.length > 0 && actions.mayTell(view);
  return calls.map((call) => el("div", { class: "tool-call" },
    el("p", { class: "tool-name" }, el("span", {}, "calls "), el("code", {}, call.function.name)),
    given(call.function),
    mayTell && open.includes(call) ? form(view, call, typed, open.length === 1) : null,
    !mayTell && !message.writing && open.includes(call) ? el("p", { class: "note" }, "No result was given.") : null,
  ));
}

/** The arguments as a tree, or as they are while they are no JSON. */
function given({ name, arguments: text }) {
  const value = jsonOf(text);
  const shown = value === null ? el("pre", {}, el("code", {}, text)) : tree(value);
  const label = `Arguments of ${name}`;
  return el("div", { class: "tool-arguments", role: "region", tabindex: "0", "aria-label": label }, shown);
}

function form(view, call, typed, last) {
  const name = call.function.name;
  const field = el("textarea", {
    rows: 2,
    value: typed.get(call) ?? "",
    placeholder: "Call it yourself, and write here what it returns: text or JSON",
    "aria-label": `Result of ${name}`,
    oninput: () => typed.set(call, field.value),
  });
  const tell = () => {
    typed.delete(call);
    view.actions.tell(view, call, field.value);
  };
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    tell();
  });
  const label = last ? "Send the result" : "Keep the result";
  return el("div", { class: "tool-result" }, field,
    el("button", { type: "button", class: "quiet", onclick: tell, title: "Ctrl+Enter" }, label));
}
