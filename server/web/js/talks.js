// The dialog with all conversations: find one, open it, delete it and take that back, export and import.

import { $, download, el, say } from "./dom.js";
import { withFiles } from "./files.js";
import { addPresets, presetsFrom } from "./settings/presets.js";
import { forgetTalk, loadPresets, storedTalks, storeTalk } from "./store.js";
import { talkFrom } from "./talk.js";

const MOST_SHOWN = 200;

export class Talks {
  /** `shown()` is the conversation on the page, `open(id)` shows another; `gone(id)` is called when one is deleted,
      `presetsRead()` when an import held presets. */
  constructor(shown, open, gone, presetsRead) {
    Object.assign(this, { shown, open, gone, presetsRead });
    this.deleted = null;
    $("talks-search").addEventListener("input", () => this.#list());
    $("talks-undo").addEventListener("click", () => this.#undo());
    $("talks-export").addEventListener("click", () => this.#export());
    $("talks-markdown").addEventListener("click", () => this.#markdown());
    $("talks-import").addEventListener("change", (event) => this.#import(event.target));
  }

  show() {
    this.#say("");
    $("talks-search").value = "";
    this.#list();
    $("talks-dialog").showModal();
  }

  #list() {
    const wanted = $("talks-search").value.trim().toLowerCase();
    const all = storedTalks();
    const found = wanted ? all.filter((talk) => texts(talk).some((text) => text.toLowerCase().includes(wanted))) : all;
    $("talks-list").replaceChildren(...found.slice(0, MOST_SHOWN).map((talk) => this.#row(talk)));
    const more = found.length - MOST_SHOWN;
    const none = wanted ? "Nothing found." : "None yet. They are kept in this browser alone.";
    say($("talks-none"), !found.length ? none : more > 0 ? `${more} more: search for them.` : "");
    $("talks-export").disabled = !all.length && !Object.keys(loadPresets()).length;
    $("talks-markdown").disabled = this.shown().blank;
  }

  #row(talk) {
    const title = talk.title || "Untitled";
    const shown = talk.id === this.shown().id;
    const length = counted(talk.messages.length, "message");
    const when = new Date(talk.updated).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    const open = () => {
      $("talks-dialog").close();
      this.open(talk.id);
    };
    return el("li", {},
      el("button", { type: "button", class: "talk", onclick: open, "aria-current": shown ? "true" : null },
        el("span", { class: "talk-title" }, title),
        el("span", { class: "note" }, `${when} · ${length}${shown ? " · on the page" : ""}`)),
      el("button", { type: "button", class: "quiet small", "aria-label": `Delete ${title}`,
        onclick: () => this.#delete(talk) }, "Delete"),
    );
  }

  #delete(talk) {
    forgetTalk(talk.id);
    this.deleted = talk;
    this.gone(talk.id);
    this.#list();
    this.#say(`Deleted “${talk.title}”.`, true);
    $("talks-undo").focus();
  }

  #undo() {
    storeTalk(this.deleted);
    this.#list();
    this.#say(`“${this.deleted.title}” is back.`);
    this.deleted = null;
    $("talks-search").focus();
  }

  #export() {
    const day = new Date().toISOString().slice(0, 10);
    const all = { conversations: storedTalks(), presets: loadPresets() };
    download(`quire-conversations-${day}.json`, JSON.stringify(all, null, 1), "application/json");
  }

  #markdown() {
    const talk = this.shown();
    const name = talk.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "conversation";
    download(`${name}.md`, talk.toMarkdown(), "text/markdown");
  }

  async #import(field) {
    const [file] = field.files;
    field.value = "";
    if (!file) return;
    let read;
    try {
      read = contents(JSON.parse(await file.text()));
    } catch (error) {
      const why = error instanceof SyntaxError ? "it is no JSON" : error.message;
      this.#say(`${file.name} is not a Quire export: ${why}.`);
      return;
    }
    try {
      this.#add(read);
    } catch (error) {
      this.#say(`Not all of ${file.name} could be kept: ${error.message}.`);
    }
    this.#list();
  }

  #add({ talks, presets }) {
    const added = addTalks(talks);
    addPresets(presets);
    const [count, there] = [Object.keys(presets).length, talks.length - added];
    if (count) this.presetsRead();
    const read = `Read: ${counted(added, "conversation")}${count ? ` and ${counted(count, "preset")}` : ""}.`;
    this.#say(there ? `${read} ${there === 1 ? "One was" : `${there} were`} already there.` : read);
  }

  #say(text, canUndo = false) {
    say($("talks-said"), text);
    $("talks-undo").hidden = !canUndo;
  }
}

/** Stores those that are not there yet; returns how many. Throws Error. */
function addTalks(talks) {
  const stored = storedTalks();
  let added = 0;
  for (const talk of talks) {
    const { title } = talk;
    // One that had to get a new id is known by its title.
    if (stored.some((each) => each.updated === talk.updated && (each.id === talk.id || each.title === title))) continue;
    while (stored.some(({ id }) => id === talk.id)) talk.renew(); // another one, or a later state of this one
    if (!storeTalk(talk)) throw new Error("the browser's storage is full");
    stored.push({ id: talk.id, updated: talk.updated, title });
    added += 1;
  }
  return added;
}

/** The conversations and the presets of a file: all that were exported, or a list, or one. Throws Error. */
function contents(value) {
  const { conversations, presets } = value ?? {};
  if (conversations !== undefined || presets !== undefined)
    return { talks: Array.from(conversations ?? [], talkFrom), presets: presetsFrom(presets) };
  return { talks: (Array.isArray(value) ? value : [value]).map(talkFrom), presets: {} };
}

const counted = (count, noun) => `${count === 1 ? "one" : count} ${noun}${count === 1 ? "" : "s"}`;

const texts = ({ title = "", system = "", messages }) => [title, system, ...messages.flatMap(textsOf)];

/** What a message says, and what those say that stand in another version in its place. */
const textsOf = ({ content, files, versions = [] }) => [
  withFiles(content ?? "", files), ...versions.flatMap((tail) => (tail ?? []).flatMap(textsOf)),
];
