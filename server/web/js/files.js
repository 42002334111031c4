// Text files that go with a message: chosen, dropped on the page or pasted. Their text goes into the message in fences.

import { $, el, say } from "./dom.js";

const MOST_FILES = 10;
/** Bytes of the files of one message together: more than most contexts hold, and browsers keep some 5 MB in all. */
const MOST_BYTES = 256 * 1024;

/** A message's text as the model gets it: each file in a fence with its name, then what was typed. */
export function withFiles(text, files = []) {
  return [...files.map(fenced), text].filter(Boolean).join("\n\n");
}

function fenced({ name, text }) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${name.replace(/[`\r\n]/g, " ")}\n${text.replace(/\n$/, "")}\n${fence}`;
}

/** How large a text is, in words. */
export function size(bytes) {
  if (bytes < 1024) return `${bytes} bytes`;
  const [unit, name] = bytes < 2 ** 20 ? [1024, "KiB"] : [2 ** 20, "MiB"];
  return `${(bytes / unit).toFixed(bytes < 10 * unit ? 1 : 0)} ${name}`;
}

export const bytesOf = (text) => new TextEncoder().encode(text).length;

/** The files of the message that is being written. */
export class Files {
  /** `refuse(text)` says why a file cannot be taken, or "" when all could. */
  constructor(refuse) {
    this.refuse = refuse;
    this.taken = [];
    $("attach").addEventListener("change", ({ target }) => {
      const chosen = [...target.files];
      target.value = "";
      this.#take(chosen);
    });
    $("draft").addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.#take([...event.clipboardData.files]);
    });
    this.#listenForDrops($("playground"));
  }

  /** What was taken; none is left. */
  empty() {
    const taken = this.taken.map(({ name, text }) => ({ name, text }));
    this.#keep([]);
    return taken;
  }

  #listenForDrops(place) {
    const holdsFiles = (event) => event.dataTransfer?.types.includes("Files");
    let inside = 0; // the pointer enters a child before it leaves its parent
    const mark = (change) => {
      inside = Math.max(0, inside + change);
      place.classList.toggle("dropping", inside > 0);
    };
    place.addEventListener("dragenter", (event) => holdsFiles(event) && mark(1));
    place.addEventListener("dragleave", (event) => holdsFiles(event) && mark(-1));
    place.addEventListener("dragover", (event) => holdsFiles(event) && event.preventDefault());
    place.addEventListener("drop", (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault(); // or the browser would show the file in place of the page
      inside = 0;
      mark(0);
      if ($("draft").hidden) this.refuse("Files go with messages: choose Chat first.");
      else this.#take([...event.dataTransfer.files]);
    });
  }

  async #take(chosen) {
    const refused = [];
    for (const file of chosen) {
      try {
        const read = await this.#read(file);
        this.#keep([...this.taken, read]);
      } catch (error) {
        refused.push(`${file.name} ${error.message}`);
      }
    }
    this.refuse(refused.join("\n"));
    $("draft").focus();
  }

  /** Throws Error that says what is wrong with the file. */
  async #read(file) {
    const held = this.taken.reduce((sum, { bytes }) => sum + bytes, 0);
    if (this.taken.length >= MOST_FILES) throw new Error(`is one too many: a message may have ${MOST_FILES} files.`);
    if (held + file.size > MOST_BYTES) {
      const beside = held ? ` with ${size(held)} there already` : "";
      throw new Error(`has ${size(file.size)}${beside}; the files of a message may have ${size(MOST_BYTES)} together.`);
    }
    let text;
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    } catch (error) {
      throw new Error(error instanceof TypeError ? NO_TEXT : "cannot be read.", { cause: error });
    }
    if (text.includes("\0")) throw new Error(NO_TEXT);
    if (!text.trim()) throw new Error("is empty.");
    return { name: file.name || "pasted.txt", text: text.replaceAll("\r\n", "\n"), bytes: file.size };
  }

  #keep(files) {
    this.taken = files;
    const drop = (file) => {
      this.#keep(this.taken.filter((each) => each !== file));
      $("draft").focus();
    };
    $("attached").hidden = !files.length;
    $("attached").replaceChildren(...files.map((file) => el("li", {}, el("span", {}, file.name),
      el("span", { class: "note" }, size(file.bytes)),
      el("button", { type: "button", class: "quiet small", "aria-label": `Remove ${file.name}`,
        onclick: () => drop(file) }, "✕"))));
    if (files.length) say($("said"), `${files.length} attached`);
  }
}

const NO_TEXT = "is not text in UTF-8; only such files can be attached.";
