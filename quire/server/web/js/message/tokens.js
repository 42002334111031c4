// Shows tokens coloured by their probability, and the alternatives of the token under the pointer.

import { $, el, say } from "../dom.js";

const LEVELS = [0.9, 0.6, 0.3, 0.1];

/** A colour class by probability: 0 for an almost certain token, 4 for a very unlikely one. */
export function level(logprob) {
  const found = LEVELS.findIndex((bound) => Math.exp(logprob) >= bound);
  return found < 0 ? LEVELS.length : found;
}

/** The tokens of one chunk of either endpoint as {text, logprob, top}. */
export function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((each) => ({
      text: each.token,
      logprob: each.logprob,
      top: each.top_logprobs.map((other) => [other.token, other.logprob]),
    }));
  }
  return logprobs.tokens.map((text, index) => ({
    text,
    logprob: logprobs.token_logprobs[index] ?? 0,
    top: Object.entries(logprobs.top_logprobs?.[index] ?? {}).sort((a, b) => b[1] - a[1]),
  }));
}

/** A span for each token. */
export function tokenSpans(tokens) {
  return tokens.map((token) => {
    const span = el("span", { class: `token likely-${level(token.logprob)}` }, token.text);
    span.token = token;
    return span;
  });
}

/** Lets the pointer and the arrow keys select a token in a container; its alternatives are shown in the readout. */
export function walkable(container) {
  container.tabIndex = 0;
  container.setAttribute("role", "group");
  container.setAttribute("aria-label", "Tokens; the arrow keys walk them");
  container.addEventListener("pointerover", (event) => event.target.token && mark(container, event.target));
  container.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const spans = [...container.querySelectorAll(".token")];
    const at = spans.findIndex((span) => span.classList.contains("marked"));
    const next = spans[Math.min(Math.max(at + step, 0), spans.length - 1)];
    if (next) mark(container, next);
  });
}

function mark(container, span) {
  for (const before of document.querySelectorAll(".token.marked")) before.classList.remove("marked");
  span.classList.add("marked");
  const { text, logprob, top } = span.token;
  const others = top.map(([other, value]) => `${visible(other)} ${percent(value)}`).join("   ");
  say($("token-readout"), `${visible(text)} ${percent(logprob)}${others ? `  of  ${others}` : ""}`);
}

const visible = (text) => `“${text.replaceAll("\n", "↵").replaceAll("\t", "⇥")}”`;

function percent(logprob) {
  const share = Math.exp(logprob) * 100;
  return share >= 1 ? `${share.toFixed(0)} %` : share >= 0.01 ? `${share.toFixed(2)} %` : "< 0.01 %";
}
