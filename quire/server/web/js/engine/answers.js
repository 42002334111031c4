// The last answers with their phases, what each tenant had of the engine, and the adapters: asked for again and again
// while the view is visible, because nothing of it changes with every step.

import { call } from "../api.js";
import { $, el, say, sleep } from "../dom.js";
import { ms, whole } from "../figures.js";
import { shorten } from "./requests.js";

const PATH = "/v1/engine/requests?limit=100";
const PERIOD_SECONDS = 2;
const WAITING = ["queued", "preempted", "recovering"];
const READING = ["prefill", "recompute"];
const STRIP = ["prepare", "queued", "preempted", "recovering", "prefill", "recompute", "decode", "delivery", "answer"];

export class Answers {
  /** `explain(id)` shows where an answer's time went. */
  constructor(explain) {
    this.explain = explain;
    this.rows = new Map();
    this.watching = null;
  }

  show() {
    if (!this.watching) this.#watch();
  }

  hide() {
    this.watching?.abort();
    this.watching = null;
  }

  async #watch() {
    const { signal } = (this.watching = new AbortController());
    while (!signal.aborted) {
      try {
        this.#draw(await (await call(PATH, { signal })).json());
      } catch (error) {
        if (error.needsKey && !signal.aborted) this.hide(); // the stream of events needs the same key, and asks for it
      }
      await sleep(PERIOD_SECONDS * 1000);
    }
  }

  #draw({ data, remembered, tenants, other_tenants: others, adapters }) {
    const keyed = tenants.some(({ name }) => name);
    $("answers").classList.toggle("keyed", keyed);
    $("answers").hidden = !data.length;
    $("answers-none").hidden = data.length > 0;
    say($("answers-count"), remembered > data.length ? `the last ${data.length} of ${remembered} remembered` : "");
    this.#rows(data);
    $("tenants-sheet").hidden = !keyed;
    say($("tenants-count"), `in the last ${remembered} answers${others ? `; ${others} more tenants` : ""}`);
    $("tenants").tBodies[0].replaceChildren(...tenants.map(tenantRow));
    $("adapters-sheet").hidden = !adapters.data.length;
    say($("adapters-count"), adapters.more ? `${adapters.more} more not listed` : "");
    $("adapters").replaceChildren(...adapters.data.map(({ name, state }) =>
      el("li", {}, el("span", { class: "adapter" }, name), el("span", { class: `phase ${state}` }, state))));
  }

  /** An answer that has ended changes no more: its row is made once. */
  #rows(answers) {
    const body = $("answers").tBodies[0];
    const keys = answers.map(({ id, created }) => `${created} ${id}`);
    for (const [key, row] of this.rows) {
      if (keys.includes(key)) continue;
      row.remove();
      this.rows.delete(key);
    }
    answers.forEach((answer, index) => {
      if (!this.rows.has(keys[index])) this.rows.set(keys[index], this.#row(answer));
      const row = this.rows.get(keys[index]);
      if (body.children[index] !== row) body.insertBefore(row, body.children[index] ?? null);
    });
  }

  #row(answer) {
    const { id, model, tenant, created, phases_ms: phases, output_tokens: output } = answer;
    const short = shorten(id);
    const cell = (kind, text, title) => el("td", { class: kind, title }, text);
    const sum = (names) => ms(names.reduce((total, name) => total + (phases[name] ?? 0), 0));
    const cached = answer.cached_tokens ? ` (${whole(answer.cached_tokens)} cached)` : "";
    return el("tr", {},
      el("th", { scope: "row" }, el("button", { type: "button", class: "name", title: `${id}\n${answer.path}`,
        "aria-label": `Explain request ${short}`, onclick: () => this.explain(id) }, short)),
      cell("", new Date(created * 1000).toLocaleTimeString("en-GB")),
      cell("tenant", tenant || "–"), cell("wide model", model, model), el("td", {}, ending(answer)),
      el("td", { class: "num" }, ms(answer.wall_ms)), el("td", { class: "wide" }, strip(answer)),
      ...[["prepare"], WAITING, READING, ["decode"]].map((names) => cell("wide num", sum(names))),
      cell("wide num", whole(answer.prompt_tokens) + cached), cell("num", whole(output)));
  }
}

function ending({ status, finish_reasons: reasons, preemptions, replays }) {
  const failed = status !== null && status >= 400;
  const words = failed ? `status ${status}` : reasons.join(", ").replaceAll("_", " ") || "ended";
  const times = [preemptions && `set aside ${preemptions}×`, replays && `replayed ${replays}×`];
  const more = times.filter(Boolean).join(", ");
  return [el("span", { class: `phase ${failed || reasons.includes("abort") ? "preempted" : ""}` }, words),
    more ? el("span", { class: "note" }, ` ${more}`) : ""];
}

/** The phases as a bar; the figures beside it say the same to those who do not see it. */
function strip({ phases_ms: phases, wall_ms: all }) {
  const parts = STRIP.filter((name) => phases[name] > 0).map((name) => {
    const part = el("span", { class: `phase-${name}`, title: `${name}: ${ms(phases[name])}` });
    part.style.flexGrow = String((1000 * phases[name]) / Math.max(all, 0.001));
    return part;
  });
  return el("div", { class: "strip thin", "aria-hidden": "true" }, parts);
}

function tenantRow({ name, weight, open, requests, share }) {
  const bar = el("span", { class: "bar-fill" });
  bar.style.width = `${100 * share}%`;
  const cell = (value) => el("td", { class: "num" }, value.toLocaleString("en"));
  const track = el("span", { class: "bar-track", "aria-hidden": "true" }, bar);
  return el("tr", {}, el("th", { scope: "row" }, name || "without a key"), cell(weight), cell(open), cell(requests),
    el("td", { class: "num" }, track, `${(100 * share).toFixed(0)} %`));
}
