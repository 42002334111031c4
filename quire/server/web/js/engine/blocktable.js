// Shows the block table of one request: a square with a number for each block, in the order of the request's tokens.

import { call } from "../api.js";
import { $, el, say } from "../dom.js";
import { whole } from "../figures.js";
import { shorten } from "./requests.js";

const LEFT_WINDOW = -1;

export class BlockTable {
  /** `refused`: called with an ApiError that is not the end of the request. */
  constructor(refused) {
    this.refused = refused;
    this.id = null;
    this.drawn = "";
    this.asking = false;
    $("table-close").addEventListener("click", () => this.close());
  }

  /** Shows a request's table from now on; it is asked for again whenever `update` is called. */
  async open(id) {
    this.id = id;
    this.drawn = "";
    say($("table-title"), `Block table of ${shorten(id)}`);
    $("table-title").title = id;
    $("table-sheet").hidden = false;
    await this.#ask();
  }

  /** Takes the requests that the engine has; `areAll`: it has no others. */
  async update(requests, areAll) {
    if (areAll && this.id !== null && !requests.some(({ id }) => id === this.id)) this.#end();
    await this.#ask();
  }

  close() {
    this.id = null;
    $("table-sheet").hidden = true;
  }

  #end() {
    this.id = null;
    say($("table-note"), "The request has ended. These were its last blocks.");
  }

  async #ask() {
    const id = this.id;
    if (id === null || this.asking) return;
    this.asking = true;
    try {
      const table = await (await call(`/v1/engine/requests/${encodeURIComponent(id)}/blocks`)).json();
      if (this.id === id) this.#draw(table);
    } catch (error) {
      if (error.status !== 404 && error.status !== 503) this.refused(error);
      else if (this.id === id && error.status === 404) this.#end();
    } finally {
      this.asking = false;
    }
    if (this.id !== null && this.id !== id) await this.#ask(); // another one was opened meanwhile
  }

  #draw(table) {
    const { block_ids: blocks, num_blocks: count, num_groups: groups, computed_tokens: computed } = table;
    const more = count - blocks.length;
    const parts = [
      count ? `${whole(computed)} tokens in ${whole(count)} blocks of ${table.block_size}` : "No blocks: it waits",
      ...(groups > 1 ? [`${groups} KV cache groups in turn`] : []),
      ...(more > 0 ? [`the first ${whole(blocks.length)} are shown`] : []),
    ];
    say($("table-note"), parts.join(" · "));
    const state = JSON.stringify(table);
    if (state === this.drawn) return;
    this.drawn = state;
    const items = blocks.map((block, index) => this.#item(table, block, index));
    const list = $("table");
    items.forEach(({ kind, text, title }, index) => {
      const item = list.children[index] ?? list.appendChild(el("li"));
      if (item.className !== kind) item.className = kind;
      say(item, text);
      if (item.title !== title) item.title = title;
    });
    while (list.children.length > items.length) list.lastChild.remove();
  }

  #item({ block_size: size, num_groups: groups, ref_counts: refs, cached, computed_tokens: computed }, block, index) {
    const first = Math.floor(index / groups) * size;
    const group = groups > 1 ? `, group ${index % groups}` : "";
    const place = `Tokens ${first} to ${first + size - 1}${group}`;
    if (block === LEFT_WINDOW) return { kind: "left", text: "–", title: `${place}: freed, they left the window` };
    const filled = Math.min(Math.max(computed - first, 0), size);
    const facts = [
      `block ${block}`,
      filled < size ? `${filled} of ${size} tokens` : "full",
      refs[index] > 1 ? `shared by ${refs[index]} requests` : "held by this request alone",
      ...(cached[index] ? ["in the prefix cache"] : []),
    ];
    const kind = refs[index] > 1 ? "shared" : filled < size ? "partial" : "full";
    return { kind, text: String(block), title: `${place}: ${facts.join(", ")}` };
  }
}
