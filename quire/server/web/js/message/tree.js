// A JSON value as a tree that can be read, with the JSON itself behind it.

import { el } from "../dom.js";

const MOST_PARTS = 2000;
const DEEPEST = 32;
const OPEN_PARTS = 24;
const OPEN_DEPTH = 3;

/** The object or the list that a text is; null where it is neither, or too large for a tree. */
export function jsonOf(text) {
  if (!/^\s*[{[]/.test(text)) return null;
  try {
    const value = JSON.parse(text);
    return measure(value, { left: MOST_PARTS }, 0) ? value : null;
  } catch {
    return null;
  }
}

/** Whether a tree of this value has not too many parts, and is not too deep. */
function measure(value, room, depth) {
  if (--room.left < 0 || depth > DEEPEST) return false;
  if (value === null || typeof value !== "object") return true;
  return Object.values(value).every((each) => measure(each, room, depth + 1));
}

/** The tree, and the text it was made of. */
export function jsonBlock(value, text) {
  return el("div", { class: "json" }, tree(value),
    el("details", { class: "raw" }, el("summary", {}, "Raw JSON"),
      el("pre", { tabindex: "0", role: "region", "aria-label": "Raw JSON" }, el("code", {}, text))));
}

/** A value's parts as a list; a part that has parts can be folded. */
export function tree(value, depth = 0) {
  const parts = Object.entries(value);
  if (!parts.length) return el("p", { class: "json-none" }, Array.isArray(value) ? "empty list" : "empty object");
  const label = (name) => (Array.isArray(value) ? String(Number(name) + 1) : name);
  return el("ul", { class: "tree" }, parts.map(([name, part]) => branch(label(name), part, depth)));
}

function branch(name, part, depth) {
  const label = el("span", { class: "json-name" }, name);
  if (part === null || typeof part !== "object") return el("li", {}, label, " ", leaf(part));
  const count = Object.keys(part).length;
  if (!count) return el("li", {}, label, " ", tree(part));
  const unit = Array.isArray(part) ? "item" : "field";
  const sum = el("span", { class: "json-count" }, ` ${count} ${unit}${count === 1 ? "" : "s"}`);
  const open = depth < OPEN_DEPTH && count <= OPEN_PARTS;
  return el("li", {}, el("details", { open }, el("summary", {}, label, sum), tree(part, depth + 1)));
}

function leaf(value) {
  if (typeof value === "string") return el("span", { class: "json-text" }, value || "“”");
  return el("span", { class: "json-value" }, String(value));
}
