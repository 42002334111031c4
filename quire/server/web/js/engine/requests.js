// The table of requests. A row's elements are kept as long as its request is open, so that focus and pointer stay put.

import { $, el, say } from "../dom.js";
import { whole } from "../figures.js";

export class Requests {
  /** `actions`: cancel(id), explain(id), showTable(id) and point(id or null). */
  constructor(hues, actions) {
    this.hues = hues;
    this.actions = actions;
    this.rows = new Map();
    this.body = $("requests").tBodies[0];
  }

  update(requests, total) {
    const seen = new Set(requests.map(({ id }) => id));
    for (const [id, row] of this.rows) {
      if (!seen.has(id)) {
        this.#leave(row);
        this.rows.delete(id);
      }
    }
    requests.forEach((request, index) => {
      const row = this.#row(request);
      if (this.body.children[index] !== row.element)
        this.body.insertBefore(row.element, this.body.children[index] ?? null);
      this.#fill(row, request);
    });
    const count = (phases) => requests.filter(({ phase }) => phases.includes(phase)).length;
    const parts = [
      `${count(["decode"])} decode`,
      `${count(["prefill"])} prefill`,
      `${count(["queued", "loading", "preempted"])} waiting`,
    ];
    const more = total - requests.length;
    say($("requests-count"), requests.length ? parts.join(" · ") + (more > 0 ? ` · ${more} more not listed` : "") : "");
    $("requests-none").hidden = requests.length > 0;
    $("requests").hidden = requests.length === 0;
  }

  /** Highlights the row whose pages are under the pointer in the map. */
  mark(id) {
    for (const [each, { element }] of this.rows) element.classList.toggle("marked", each === id);
  }

  #row({ id }) {
    const known = this.rows.get(id);
    if (known) return known;
    const cell = (name = "") => el("td", { class: name });
    const short = shorten(id);
    const bar = el("span", { class: "bar-fill" });
    const row = {
      bar,
      share: el("span", { class: "share" }),
      images: el("span", { class: "images", role: "img", hidden: true }),
      phase: el("span", { class: "phase" }),
      cached: cell("wide num"),
      pages: this.#tableButton(id),
      age: cell("wide num"),
      cancel: el(
        "button",
        {
          type: "button",
          class: "quiet small danger",
          "aria-label": `Cancel request ${short}`,
          onclick: () => this.#cancel(id),
        },
        "Cancel",
      ),
    };
    const dot = el("i", { class: "dot", "aria-hidden": "true" });
    dot.style.backgroundColor = this.hues.colour(id);
    const name = el(
      "button",
      {
        type: "button",
        class: "name",
        title: id,
        "aria-label": `Explain request ${short}`,
        onclick: () => this.actions.explain(id),
      },
      short,
    );
    row.element = el(
      "tr",
      {
        onpointerenter: () => this.actions.point(id),
        onpointerleave: () => this.actions.point(null),
        onfocusin: () => this.actions.point(id),
        onfocusout: () => this.actions.point(null),
        onclick: (event) => event.target.closest("button") ?? this.actions.showTable(id),
      },
      el("th", { scope: "row" }, dot, name),
      el("td", {}, row.phase),
      el("td", { class: "progress" }, el("span", { class: "bar-track", "aria-hidden": "true" }, bar), row.share,
        row.images),
      row.cached, el("td", { class: "wide num" }, row.pages), row.age, el("td", { class: "end" }, row.cancel));
    this.rows.set(id, row);
    return row;
  }

  #tableButton(id) {
    const onclick = () => this.actions.showTable(id);
    return el("button", { type: "button", class: "to-table", title: "Show its block table", onclick });
  }

  #fill(row, request) {
    const prefill = request.phase === "prefill";
    const [done, all] = prefill
      ? [request.computed_tokens, request.prompt_tokens + request.output_tokens]
      : [request.output_tokens, request.limit];
    row.phase.className = `phase ${request.phase}`;
    say(row.phase, request.phase);
    row.bar.style.width = `${Math.min(100, (100 * done) / Math.max(1, all))}%`;
    say(row.share, `${done} / ${all}${prefill ? " prompt" : ""}`);
    say(row.cached, request.prompt_tokens ? `${request.cached_tokens} / ${request.prompt_tokens}` : "–");
    const pages = request.shared_blocks ? `${request.blocks} (${request.shared_blocks} shared)` : `${request.blocks}`;
    say(row.pages, pages);
    row.pages.ariaLabel = `${pages}: block table of request ${shorten(request.id)}`;
    say(row.age, duration(request.age));
    if (row.images.hidden && request.images.length) showImages(row.images, request);
  }

  async #cancel(id) {
    const { cancel } = this.rows.get(id);
    if (cancel.ariaDisabled) return;
    cancel.ariaDisabled = "true"; // not `disabled`, which would take the focus away
    say(cancel, "…");
    if (await this.actions.cancel(id)) return; // the row disappears with the request
    cancel.ariaDisabled = null;
    say(cancel, "Cancel");
  }

  #leave({ element }) {
    // Move the focus to the next row; otherwise keyboard users would start again at the top of the page.
    if (element.contains(document.activeElement)) {
      const next = (element.nextElementSibling ?? element.previousElementSibling)?.querySelector(".danger");
      (next ?? $("requests").closest(".scroller")).focus();
    }
    element.remove();
  }
}

/** Where in the prompt its images stand, as a strip. */
function showImages(strip, { images, prompt_tokens: all }) {
  const tokens = images.reduce((sum, [, count]) => sum + count, 0);
  const text = `Images: ${whole(tokens)} of ${whole(all)} prompt tokens`;
  const ends = images.map(([start, count]) => start + count);
  const part = (kind, count) => {
    const piece = el("i", { class: kind });
    piece.style.flexGrow = String(count);
    return piece;
  };
  strip.hidden = false;
  strip.title = text;
  strip.ariaLabel = text;
  strip.replaceChildren(...images.flatMap(([start, count], index) =>
    [part("", start - (ends[index - 1] ?? 0)), part("image", count)]), part("", all - (ends.at(-1) ?? 0)));
}

/** The part of an id that differs between requests. */
export function shorten(id) {
  const [kind, name = "", ...rest] = id.split("-");
  return name.length > 12 ? [kind, name.slice(0, 8), ...rest].join("-") : id;
}

export function duration(seconds) {
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.floor(seconds / 60);
  return minutes < 60
    ? `${minutes} min`
    : minutes < 1440
      ? `${Math.floor(minutes / 60)} h ${minutes % 60} min`
      : `${Math.floor(minutes / 1440)} days`;
}
