// Draws the KV cache as a grid with one square per page, or per few pages if there are too many for the screen.

import { $, el, say } from "../dom.js";
import { whole } from "../figures.js";

const [CACHED, FIRST_OWNER, UNLISTED, SHARED] = [1, 2, 0x7fff, 0x8000];
const [SMALLEST, LARGEST] = [3, 20];
const [FREE_KIND, CACHED_KIND, SHARED_KIND, OTHER_KIND, FIRST_HUE] = [0, 1, 2, 3, 4];
const KINDS = [
  ["free", "Empty"],
  ["cached", "Cached, free to reuse"],
  ["shared", "Shared"],
  ["owned", "Held by one request"],
];
const HINT = "Point at a block, or use the arrow keys, to see whose it is; a click or Enter explains that request.";
const LEAST_SHOWN = 512;
const STEP = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** Decodes the pages' uint16 codes from an event (base64 of zlib). engine/common/types.py says what they mean. */
export async function decodePages(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint16Array(await new Response(stream).arrayBuffer());
}

/** Gives each request a hue for as long as it is shown; successive hues are a golden angle apart, so they differ. */
export class Hues {
  constructor() {
    this.slots = new Map();
    this.next = 0;
  }

  keepOnly(ids) {
    const alive = new Set(ids);
    for (const id of this.slots.keys()) if (!alive.has(id)) this.slots.delete(id);
    for (const id of ids) if (!this.slots.has(id)) this.slots.set(id, this.next++ % 4096);
  }

  colour(id) {
    return hue(this.slots.get(id) ?? 0);
  }
}

/** Hues between green and orange are left out, because shared pages are gold. */
const hue = (slot) => `oklch(var(--owner-light) 0.12 ${120 + ((80 + slot * 137.508) % 290)})`;

export class BlockMap {
  /** `onPick(id or null)`: whose block is pointed at. `onOpen(id)`: whose block was clicked. */
  constructor(hues, onPick, onOpen) {
    this.canvas = $("pages");
    this.hues = hues;
    this.onPick = onPick;
    this.onOpen = onOpen;
    this.codes = new Uint16Array(0);
    this.shown = 0; // how many pages are drawn: the most that were ever in use, rounded up to a power of two
    this.requests = [];
    this.kinds = new Int32Array(0);
    this.highlight = null;
    this.cursor = null;
    this.counts = KINDS.map(([name, label]) => {
      const count = el("b", {}, "0");
      const swatch = el("i", { class: `swatch ${name}`, "aria-hidden": "true" });
      $("legend").append(el("li", {}, swatch, label, " ", count));
      return { swatch, count };
    });
    this.probe = el("i", { class: "swatch", hidden: true });
    this.canvas.after(this.probe);
    new ResizeObserver(() => this.#layout()).observe(this.canvas.parentElement);
    this.canvas.addEventListener("pointermove", (event) => this.#point(this.#cellAt(event)));
    this.canvas.addEventListener("pointerleave", () => this.#point(null));
    this.canvas.addEventListener("click", (event) => this.#open(this.#cellAt(event)));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.canvas.addEventListener("blur", () => this.#point(null));
  }

  /** Takes a new state of the pages; `requests` are the requests that the codes refer to. */
  update(codes, requests) {
    const before = this.shown;
    const used = codes.findLastIndex((code) => code !== 0) + 1;
    this.shown = Math.min(codes.length, Math.max(before, LEAST_SHOWN, 2 ** Math.ceil(Math.log2(used || 1))));
    this.codes = codes;
    this.requests = requests;
    if (this.shown !== before) this.#layout();
    else this.#draw(false);
    this.#count();
    this.#tell();
  }

  /** Highlights one request's pages by fading the others; null shows all alike. */
  emphasise(id) {
    if (this.highlight === id) return;
    this.highlight = id;
    this.#draw(true);
  }

  recolour() {
    this.colours = null;
    this.#draw(true);
  }

  #layout() {
    const width =
      this.canvas.parentElement.clientWidth - 2 * parseFloat(getComputedStyle(this.canvas.parentElement).paddingLeft);
    const pages = this.shown;
    if (!pages || width < 50) return;
    const most = innerWidth < 700 ? 280 : 330;
    const fitting = Math.floor(Math.sqrt((width * most) / pages));
    this.pitch = Math.min(LARGEST, Math.max(SMALLEST, fitting));
    this.columns = Math.floor(width / this.pitch);
    this.perCell = Math.ceil(pages / (this.columns * Math.floor(most / this.pitch)));
    this.cells = Math.ceil(pages / this.perCell);
    const height = Math.ceil(this.cells / this.columns) * this.pitch;
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = `${height}px`;
    this.context = this.canvas.getContext("2d");
    this.context.scale(scale, scale);
    this.#draw(true);
  }

  /** The code that a square shows. If it stands for several pages, this is the one that is used most. */
  #kindOf(cell) {
    let best = FREE_KIND;
    const end = Math.min(this.shown, (cell + 1) * this.perCell);
    for (let page = cell * this.perCell; page < end; page++) {
      const code = this.codes[page];
      if (code === 0) continue;
      const kind = this.#kind(code);
      if (kind > best) best = kind;
    }
    return best;
  }

  #kind(code) {
    if (code === CACHED) return CACHED_KIND;
    if (code >= SHARED) return SHARED_KIND;
    if (code === UNLISTED) return OTHER_KIND;
    return FIRST_HUE + (this.hues.slots.get(this.requests[code - FIRST_OWNER]?.id) ?? 0);
  }

  #draw(all) {
    if (!this.context || !this.columns) return;
    if (this.kinds.length !== this.cells) {
      this.kinds = new Int32Array(this.cells).fill(-1);
      all = true;
    }
    this.colours ??= this.#readColours();
    const gap = this.pitch >= 8 ? 2 : 1;
    const size = this.pitch - gap;
    const slot = this.highlight === null ? null : FIRST_HUE + (this.hues.slots.get(this.highlight) ?? -FIRST_HUE);
    if (all) this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    for (let cell = 0; cell < this.cells; cell++) {
      const kind = this.#kindOf(cell);
      if (!all && kind === this.kinds[cell]) continue;
      this.kinds[cell] = kind;
      const x = (cell % this.columns) * this.pitch;
      const y = Math.floor(cell / this.columns) * this.pitch;
      if (!all) this.context.clearRect(x, y, this.pitch, this.pitch);
      this.context.globalAlpha = slot === null || kind === slot || kind <= CACHED_KIND ? 1 : 0.22;
      this.#square(kind, x, y, size);
    }
    this.context.globalAlpha = 1;
    if (this.cursor !== null) this.#outline();
  }

  /** On squares that are large enough, shapes show the state too: cached pages are hollow, shared ones have a hole. */
  #square(kind, x, y, size) {
    this.context.fillStyle = this.#colour(kind);
    this.context.fillRect(x, y, size, size);
    if (this.pitch < 8 || (kind !== CACHED_KIND && kind !== SHARED_KIND)) return;
    const inset = kind === CACHED_KIND ? Math.max(1.5, size / 7) : size / 3;
    if (kind === CACHED_KIND) this.context.fillStyle = this.colours[FREE_KIND];
    if (kind === CACHED_KIND) this.context.fillRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset);
    else this.context.clearRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset);
  }

  #outline() {
    const x = (this.cursor % this.columns) * this.pitch;
    const y = Math.floor(this.cursor / this.columns) * this.pitch;
    this.context.strokeStyle = this.colours[KINDS.length];
    this.context.lineWidth = 1.5;
    this.context.strokeRect(x - 0.5, y - 0.5, this.pitch, this.pitch);
  }

  #readColours() {
    const background = (element) => getComputedStyle(element).backgroundColor;
    return [...this.counts.map(({ swatch }) => background(swatch)), getComputedStyle(this.canvas).color];
  }

  #colour(kind) {
    if (kind < FIRST_HUE) return this.colours[kind];
    return (this.colours[kind + 1] ??= this.#resolve(kind - FIRST_HUE));
  }

  /** The value of a CSS variable. A canvas cannot use variables, so an element resolves it. */
  #resolve(slot) {
    this.probe.style.backgroundColor = hue(slot);
    return getComputedStyle(this.probe).backgroundColor;
  }

  #count() {
    const totals = [0, 0, 0, 0];
    for (const code of this.codes) totals[code === 0 ? 0 : code === CACHED ? 1 : code >= SHARED ? 2 : 3]++;
    totals.forEach((total, kind) => say(this.counts[kind].count, whole(total)));
    const [free, cached, shared, owned] = totals;
    this.canvas.setAttribute(
      "aria-label",
      `Map of ${this.codes.length} KV cache blocks: ${free} empty, ${cached} cached, ${shared} shared, ` +
        `${owned} held by one request`,
    );
  }

  #cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.pitch);
    const cell = Math.floor((event.clientY - box.top) / this.pitch) * this.columns + column;
    return column < this.columns && cell < this.cells ? cell : null;
  }

  #key(event) {
    if (event.key === "Enter") this.#open(this.cursor);
    const step = STEP[event.key];
    if (!step || !this.columns) return;
    event.preventDefault();
    const cell = this.cursor === null ? 0 : this.cursor + step[0] + step[1] * this.columns;
    this.#point(Math.min(Math.max(cell, 0), this.cells - 1));
  }

  #point(cell) {
    if (cell === this.cursor) return;
    this.cursor = cell;
    const owner = this.#ownerOf(cell);
    this.highlight = owner;
    this.onPick(owner);
    this.#draw(true);
    this.#tell();
  }

  #open(cell) {
    const owner = this.#ownerOf(cell);
    if (owner !== null) this.onOpen(owner);
  }

  /** The id of the request that alone holds a square's block, or null. */
  #ownerOf(cell) {
    const code = cell === null ? 0 : this.#codeIn(cell);
    return code >= FIRST_OWNER && code < UNLISTED ? (this.requests[code - FIRST_OWNER]?.id ?? null) : null;
  }

  #codeIn(cell) {
    const page = Array.from({ length: this.perCell }, (_, index) => cell * this.perCell + index)
      .find((each) => this.codes[each] >= FIRST_OWNER);
    return this.codes[page ?? cell * this.perCell];
  }

  #tell() {
    if (this.cursor === null || !this.codes.length) {
      const per = this.perCell > 1 ? `One square is ${this.perCell} blocks. ` : "";
      const rest = this.codes.length - this.shown;
      const more = rest ? `The other ${whole(rest)} blocks have been empty so far. ` : "";
      say($("page-readout"), `${more}${per}${HINT}`);
      return;
    }
    const first = this.cursor * this.perCell;
    const last = Math.min(this.shown, first + this.perCell) - 1;
    const name = first === last ? `Block ${first}` : `Blocks ${first} to ${last}`;
    say($("page-readout"), `${name}: ${this.#meaning(this.#codeIn(this.cursor))}`);
  }

  #meaning(code) {
    if (code === 0) return "empty";
    if (code === CACHED) return "cached: a prompt that starts alike can use it";
    if (code >= SHARED) return `shared by ${code - SHARED} requests`;
    if (code === UNLISTED) return "held by a request that is not listed";
    return `held by ${this.requests[code - FIRST_OWNER]?.id ?? "a request that has just ended"}`;
  }
}
