// What of a conversation's prompts the prefix cache had: a bar for each turn, the reasons in words, and where a prompt
// differs from the one before it.

import { el } from "./dom.js";
import { whole } from "./figures.js";

const MOST_TURNS = 60;
const PARTS = [
  ["hit", "cached_tokens", "from the cache"],
  ["miss", "missed_tokens", "could have been cached"],
  ["new", "new_tokens", "new"],
];

/** Elements that show an explanation's prefix and the turns of its conversation; none where nothing is to be said. */
export function prefixSheet(told, { data: turns }) {
  const own = told.sequences[0]?.prefix;
  if (!own) return [];
  const shown = turns.slice(-MOST_TURNS);
  const found = [
    turns.length > 1 ? legend() : null,
    turns.length > 1 ? table(shown, told.id) : null,
    turns.length > shown.length ? el("p", { class: "note" }, `${turns.length - shown.length} earlier turns`) : null,
    ...reasons(own).map((text) => el("p", { class: "reason" }, text)),
    difference(own.nearest),
  ].filter(Boolean);
  return found.length ? [el("h3", {}, "What the prefix cache had"), ...found] : [];
}

function legend() {
  return el("p", { class: "note prefix-legend" },
    ...PARTS.map(([kind, , words]) => el("span", {}, el("i", { class: `swatch prefix-${kind}` }), words)));
}

function table(turns, id) {
  const most = Math.max(...turns.map((turn) => turn.prompt_tokens), 1);
  return el("table", { class: "prefix-turns" },
    el("thead", {}, el("tr", {}, ...["Turn", "Prompt", "Tokens", "Why not cached"].map((text) =>
      el("th", { scope: "col", class: text === "Tokens" ? "num" : null }, text)))),
    el("tbody", {}, turns.map((turn) =>
      el("tr", { class: turn.id === id ? "this" : null },
        el("th", { scope: "row" }, String(turn.turn)), el("td", {}, bar(turn, most)),
        el("td", { class: "num" }, whole(turn.prompt_tokens)),
        el("td", {}, why(turn))))));
}

function bar(turn, most) {
  const words = PARTS.map(([, field, text]) => `${whole(turn[field])} ${text}`).join(", ");
  const strip = el("div", { class: "strip thin", role: "img", "aria-label": words, title: words });
  strip.style.width = `${Math.max((100 * turn.prompt_tokens) / most, 1)}%`;
  for (const [kind, field] of PARTS) {
    if (!turn[field]) continue;
    const part = el("span", { class: `prefix-${kind}` });
    part.style.flexGrow = String(turn[field]);
    strip.append(part);
  }
  return strip;
}

function why({ missed, missed_tokens: tokens }) {
  if (!tokens) return "";
  return missed.map((each) => `${each.reason.replaceAll("_", " ")} ${whole(each.tokens)}`).join(", ");
}

function reasons({ missed, missed_tokens: tokens, missed_seconds: seconds, nearest }) {
  const found = missed.map((each) =>
    `${whole(each.tokens)} tokens could have been cached, but were not: ${each.why}.`);
  if (tokens) found.push(`Computing them again took ${seconds.toFixed(seconds < 1 ? 3 : 1)} s.`);
  if (nearest)
    found.push(`The prompt differs from the nearest earlier ${nearest.within} behind ` +
      `${whole(nearest.common_tokens)} tokens.`);
  if (nearest?.same_text) found.push("There the text is the same, but cut into other tokens.");
  return found;
}

/** The text around the first difference; only its own tenant is told it. */
function difference(nearest) {
  if (nearest?.was === undefined) return null;
  const line = (label, kind, text) => {
    const code = el("code", {}, `…${nearest.before}`, el("mark", { class: kind }, text));
    return el("div", {}, el("span", { class: "note" }, label), code);
  };
  return el("div", { class: "prefix-difference" }, line("Before", "was", nearest.was), line("Now", "now", nearest.now));
}
