// Draws how the memory of each engine's device is divided: one bar, and its parts in words below it.

import { $, el, say } from "../dom.js";
import { size } from "../figures.js";

const PARTS = ["weights", "kv", "activations", "runtime", "others", "free"];
const LABELS = {
  weights: "Weights",
  kv: "KV cache",
  activations: "Activations",
  runtime: "Python and libraries",
  others: "Other programs",
  free: "Free",
};
const GPU_LABELS = { ...LABELS, runtime: "CUDA's own, and other programs" };

export class MemoryBars {
  constructor() {
    this.bars = [];
  }

  /** `memory`: the division of each engine's memory; `held`: the share of the KV cache that requests hold, 0 to 1. */
  update(memory, held, device) {
    const labels = device.startsWith("cuda") ? GPU_LABELS : LABELS;
    $("memory-sheet").hidden = memory.length === 0;
    if (this.bars.length !== memory.length) {
      this.bars = memory.map(() => bar());
      $("memory").replaceChildren(...this.bars.map(({ element }) => element));
    }
    const several = memory.length > 1;
    memory.forEach((division, index) => this.#fill(this.bars[index], division, labels, {
      name: several ? `Engine ${index + 1}: ` : "",
      held: several ? null : held,
    }));
    say($("memory-total"), several ? "" : `${size(memory[0]?.total ?? 0)} in all`);
  }

  #fill({ strip, parts }, division, labels, { name, held }) {
    const words = PARTS.filter((part) => division[part] > 0).map((part) => `${labels[part]} ${size(division[part])}`);
    strip.setAttribute("aria-label", `${name}${words.join(", ")}`);
    for (const part of PARTS) {
      const { piece, item, label, value } = parts[part];
      const share = division[part] / Math.max(division.total, 1);
      const more = part === "kv" && held !== null ? `, ${Math.round(100 * held)} % held` : "";
      piece.style.flexGrow = String(1000 * share);
      piece.hidden = item.hidden = division[part] === 0;
      piece.title = `${labels[part]}: ${size(division[part])}`;
      say(label, `${labels[part]} `);
      say(value, `${size(division[part])}${more}`);
    }
    parts.kv.piece.firstChild.style.width = `${100 * (held ?? 0)}%`;
  }
}

function bar() {
  const parts = Object.fromEntries(PARTS.map((part) => {
    const piece = el("span", { class: `memory-${part}` }, part === "kv" ? el("i", { class: "held" }) : "");
    const [label, value] = [el("span"), el("b")];
    const swatch = el("i", { class: `swatch memory-${part}`, "aria-hidden": "true" });
    return [part, { piece, label, value, item: el("li", {}, swatch, label, value) }];
  }));
  const strip = el("div", { class: "memory-bar", role: "img" }, PARTS.map((part) => parts[part].piece));
  const legend = el("ul", { class: "legend", role: "list" }, PARTS.map((part) => parts[part].item));
  return { element: el("div", {}, strip, legend), strip, parts };
}
