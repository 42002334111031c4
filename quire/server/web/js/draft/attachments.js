// What goes with the message that is being written: text files and pictures, chosen, dropped on the page or pasted.

import { $, el, say } from "../dom.js";
import { bytesOf, readText } from "./files.js";
import { size } from "../figures.js";
import { isPdf, readPdf } from "./pdf.js";
import { isPicture, MOST_PICTURES, readPicture } from "./pictures.js";

const MOST_FILES = 10;
/** Bytes of the text files of one message together: more than most contexts hold. */
const MOST_BYTES = 256 * 1024;

export class Attachments {
  /** `refuse(text)` says why a file cannot be taken, or "" when all could; `blind()` why the model that is chosen reads
      no pictures, or "". */
  constructor(refuse, blind) {
    Object.assign(this, { refuse, blind });
    this.taken = [];
    this.reading = Promise.resolve();
    $("attach").addEventListener("change", ({ target }) => {
      const chosen = [...target.files];
      target.value = "";
      this.#take(chosen);
    });
    $("draft").addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files];
      const asText = files.every(isPicture) && event.clipboardData.types.includes("text/plain"); // as cells of a table
      if (!files.length || asText) return;
      event.preventDefault();
      this.#take(files);
    });
    this.#listenForDrops($("playground"));
  }

  /** What was taken, as fields of a message. */
  get fields() {
    const files = this.taken.filter(({ text }) => text !== undefined).map(({ name, text }) => ({ name, text }));
    const pictures = this.taken.filter(({ url }) => url).map(({ name, url }) => ({ name, url }));
    return { ...(files.length && { files }), ...(pictures.length && { pictures }) };
  }

  /** The same, and none is left. */
  empty() {
    const { fields } = this;
    this.#keep([]);
    return fields;
  }

  /** Takes back what went with a message. */
  restore({ files = [], pictures = [] }) {
    this.#keep([...files.map((each) => ({ ...each, bytes: each.text.length })), ...pictures]);
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

  /** One after the other, so that the bounds hold for files that come meanwhile too. */
  #take(chosen) {
    this.reading = this.reading.then(() => this.#takeAll(chosen));
  }

  async #takeAll(chosen) {
    const refused = [];
    for (const file of chosen) {
      try {
        const read = await this.#read(file);
        this.#keep([...this.taken, read]);
      } catch (error) {
        refused.push(`${file.name || "What was pasted"} ${error.message}`);
      }
    }
    this.refuse(refused.join("\n"));
    $("draft").focus();
  }

  /** Throws Error that says what is wrong with the file. */
  #read(file) {
    if (isPicture(file)) {
      if (this.blind()) throw new Error(`is a picture: ${this.blind()}`);
      if (this.taken.filter(({ url }) => url).length >= MOST_PICTURES)
        throw new Error(`is one too many: a message may have ${MOST_PICTURES} pictures.`);
      return readPicture(file);
    }
    const texts = this.taken.filter(({ text }) => text !== undefined);
    const held = texts.reduce((sum, { bytes }) => sum + bytes, 0);
    if (texts.length >= MOST_FILES) throw new Error(`is one too many: a message may have ${MOST_FILES} files.`);
    if (isPdf(file)) return readPdf(file, MOST_BYTES - held).then((read) => ({ ...read, bytes: bytesOf(read.text) }));
    if (held + file.size > MOST_BYTES) {
      const beside = held ? ` with ${size(held)} there already` : "";
      throw new Error(`has ${size(file.size)}${beside}; the files of a message may have ${size(MOST_BYTES)} together.`);
    }
    return readText(file).then((read) => ({ ...read, bytes: file.size }));
  }

  #keep(taken) {
    this.taken = taken;
    const drop = (one) => {
      this.#keep(this.taken.filter((each) => each !== one));
      $("draft").focus();
    };
    $("attached").hidden = !taken.length;
    $("attached").replaceChildren(...taken.map((one) => el("li", {},
      one.url ? el("img", { src: one.url, alt: "" }) : null, el("span", {}, one.name),
      one.url ? null : el("span", { class: "note" }, size(one.bytes)),
      el("button", { type: "button", class: "quiet small", "aria-label": `Remove ${one.name}`,
        onclick: () => drop(one) }, "✕"))));
    if (taken.length) say($("said"), `${taken.length} attached`);
  }
}
