// The dialog that shows where a request's time went: a bar for each of its sequences, and the same in words.

import { call } from "./api.js";
import { $, el, say } from "./dom.js";
import { ms, whole } from "./figures.js";
import { prefixSheet } from "./prefix.js";

const PHASES = {
  prepare: "Prepare (before the engine)",
  queued: "Queue (waiting for a place)",
  prefill: "Prefill (reading the prompt)",
  decode: "Decode (writing)",
  preempted: "Preempted (set aside for others)",
  recompute: "Recompute (reading it all again)",
  recovering: "Recovering (waiting for a new engine)",
  delivery: "Delivery (waiting for the last token)",
  answer: "Answer (sending the rest)",
};
const MOST_BARS = 16;

/** Shows the explanation of an answer. `showText(title, text)` shows the whole of it. Throws ApiError. */
export async function explain(id, showText) {
  const address = `/v1/requests/${encodeURIComponent(id)}`;
  const [told, conversation] = await Promise.all(["explain", "conversation"].map(async (what) =>
    (await call(`${address}/${what}`)).json()));
  $("explain-json").onclick = () => {
    $("explain-dialog").close();
    showText("Where this request's time went", JSON.stringify(told, null, 2));
  };
  say($("explain-sum"), `${ms(told.wall_ms)} in all${told.state === "open" ? ", so far" : ""}`);
  const shown = told.sequences.slice(0, MOST_BARS);
  const more = told.sequences.length - shown.length;
  $("explain-body").replaceChildren(
    ...shown.map((sequence, index) => bar(sequence, told, shown.length > 1 ? `Choice ${index + 1}` : "")),
    more > 0 ? el("p", { class: "note" }, `and ${more} more`) : "",
    table(told),
    el("div", { class: "explained" }, facts(told).map((text) => el("p", {}, text))),
    ...prefixSheet(told, conversation),
  );
  $("explain-dialog").showModal();
  $("explain-dialog").scrollTop = 0;
}

/** The parts of a sequence's time, as [phase, from, to] in ms since the request's arrival. */
export function parts(sequence, told) {
  const { events, phases_ms: phases } = sequence;
  const spent = Object.values(phases).reduce((sum, each) => sum + each, 0);
  const first = events[0]?.at_ms ?? told.wall_ms;
  const ends = [...events.slice(1).map(({ at_ms: at }) => at), first + spent];
  const found = events.map(({ at_ms: at, phase }, index) => [phase, at, ends[index]]);
  return [["prepare", 0, first], ...found, ["answer", first + spent, told.wall_ms]].filter(([, from, to]) => to > from);
}

function bar(sequence, told, label) {
  const scale = 1000 / Math.max(told.wall_ms, 0.001);
  const strip = el("div", { class: "strip", role: "img", "aria-label": words(parts(sequence, told)) });
  for (const [phase, from, to] of parts(sequence, told)) {
    const part = el("span", { class: `phase-${phase}`, title: `${PHASES[phase] ?? phase}: ${ms(to - from)}` });
    part.style.flexGrow = String((to - from) * scale);
    strip.append(part);
  }
  return el("div", { class: "explained" }, label ? el("span", { class: "note" }, label) : null, strip);
}

const words = (found) => found.map(([phase, from, to]) => `${PHASES[phase] ?? phase} ${ms(to - from)}`).join(", ");

function table(told) {
  const rows = Object.entries(told.phases_ms).map(([phase, spent]) =>
    el("tr", {}, el("th", { scope: "row" }, el("i", { class: `swatch phase-${phase}` }), PHASES[phase] ?? phase),
      el("td", { class: "num" }, ms(spent)),
      el("td", { class: "num" }, `${((100 * spent) / Math.max(told.wall_ms, 0.001)).toFixed(0)} %`)));
  return el("table", { class: "explained-phases" }, el("tbody", {}, rows));
}

function facts(told) {
  const found = [];
  for (const each of told.sequences.slice(0, 1)) {
    const cached = each.cached_tokens ? `, ${each.cached_tokens} of them from the cache` : "";
    const pieces = each.chunks.length > 1 ? `; it was read in ${each.chunks.length} pieces` : "";
    found.push(`The prompt has ${each.prompt_tokens} tokens${cached}${pieces}.`);
    if (each.image_tokens) found.push(`${each.image_tokens} of them stand for images.`);
    for (const { tier, tokens, ms: took } of each.fetched ?? [])
      found.push(`Fetched ${whole(tokens)} tokens from ${tier} in ${ms(took)}.`);
    if (each.first_token_ms !== null)
      found.push(`The first of ${each.output_tokens} tokens came after ${ms(each.first_token_ms)}.`);
    if (each.draft_tokens)
      found.push(`${each.accepted_draft_tokens} of ${each.draft_tokens} guessed tokens were right.`);
    if (each.preemptions) found.push(`It was set aside ${times(each.preemptions)} for requests before it.`);
    if (each.replays) found.push(`Its engine ended ${times(each.replays)}; it went on with a new one.`);
    found.push(companions(each.batches, each.steps_not_listed));
  }
  return found.filter(Boolean);
}

function companions(batches, unlisted) {
  if (!batches.length) return "";
  const steps = batches.reduce((sum, each) => sum + each.steps, 0);
  const alone = batches.filter((each) => !each.mates.length && !each.other_mates);
  const lonely = alone.reduce((sum, each) => sum + each.steps, 0);
  const most = Math.max(...batches.map((each) => each.mates.length + each.other_mates));
  const slowest = ms(Math.max(...batches.map((each) => each.slowest_step_ms)));
  const company = `with up to ${most} more requests`;
  const shared = !most ? ", all alone" : lonely ? `, ${lonely} alone, the others ${company}` : ` ${company}`;
  const others = unlisted ? `, and ${unlisted} more that were not noted` : "";
  return `It took part in ${steps} steps${shared}; the slowest took ${slowest}${others}.`;
}

const times = (count) => (count === 1 ? "once" : `${count} times`);
