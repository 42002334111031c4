// All conversations: find one, open it, name it, delete it and take that back, export and import. They stand beside the
// one on the page, or on a narrow window in a dialog.

import { $, download, el, perFrame, say } from "../dom.js";
import { withFiles } from "../draft/files.js";
import { fromWide } from "../beside.js";
import { forgetTalk, loadPresets, storedTalk, storedTalks, storeTalk } from "../store.js";
import { Talk } from "./talk.js";
import { addAll, counted, exported } from "./transfer.js";

const MOST_SHOWN = 200;
const WIDE = "(min-width: 80rem) and (min-height: 44rem)"; // as css/playground.css has it

export class Talks {
  /** `actions`: shown() is the conversation on the page, open(id) shows another; gone(id) is called when one is
      deleted, renamed(id, name) when one got a name, presetsRead() when an import held presets. */
  constructor(actions) {
    this.actions = actions;
    this.deleted = null;
    this.chat = true;
    this.beside = fromWide(WIDE, $("talks-panel"), $("talks-beside"), $("talks-dialog"), () => this.#placed());
    this.changed = perFrame(() => this.#listIfSeen());
    $("talks").addEventListener("click", () => this.#show());
    $("talks-search").addEventListener("input", () => this.#list());
    $("talks-undo").addEventListener("click", () => this.#undo());
    $("talks-export").addEventListener("click", () => this.#export());
    $("talks-markdown").addEventListener("click", () => this.#markdown());
    $("talks-import").addEventListener("change", (event) => this.#import(event.target));
    this.#placed();
  }

  /** For a conversation, or for a text that is continued. */
  setMode(chat) {
    this.chat = chat;
    this.#placed();
  }

  #placed() {
    const beside = this.beside?.matches ?? false;
    $("talks").hidden = !this.chat || beside;
    $("talks-beside").hidden = !this.chat || !beside;
    this.#listIfSeen();
  }

  #show() {
    this.#say("");
    $("talks-search").value = "";
    this.#list();
    $("talks-dialog").showModal();
  }

  #listIfSeen() {
    if (!this.beside?.matches && !$("talks-dialog").open) return;
    if (!$("talks-list").querySelector("form")) this.#list(); // where one is being named it would be lost
  }

  #list() {
    const wanted = $("talks-search").value.trim().toLowerCase();
    const all = storedTalks();
    const found = wanted ? all.filter((talk) => texts(talk).some((text) => text.toLowerCase().includes(wanted))) : all;
    const focused = $("talks-list").contains(document.activeElement) ? document.activeElement.closest("li") : null;
    $("talks-list").replaceChildren(...found.slice(0, MOST_SHOWN).map((talk) => this.#row(talk)));
    if (focused) $("talks-list").querySelector(`[data-id="${focused.dataset.id}"] .talk`)?.focus();
    const more = found.length - MOST_SHOWN;
    const none = wanted ? "Nothing found." : "None yet. They are kept in this browser alone.";
    say($("talks-none"), !found.length ? none : more > 0 ? `${more} more: search for them.` : "");
    $("talks-export").disabled = !all.length && !Object.keys(loadPresets()).length;
    $("talks-markdown").disabled = this.actions.shown().blank;
  }

  #row(talk) {
    const title = talk.title || "Untitled";
    const shown = talk.id === this.actions.shown().id;
    const length = counted(talk.messages.length, "message");
    const open = () => {
      $("talks-dialog").close();
      this.actions.open(talk.id);
    };
    const button = (label, action) =>
      el("button", { type: "button", class: "quiet small", "aria-label": `${label} ${title}`, onclick: action }, label);
    const row = el("li", { "data-id": talk.id },
      el("button", { type: "button", class: "talk", onclick: open, "aria-current": shown ? "true" : null },
        el("span", { class: "talk-title" }, title),
        el("span", { class: "note" }, `${when(talk.updated)} · ${length}${shown ? " · on the page" : ""}`)),
      el("span", { class: "talk-buttons" }, button("Rename", () => row.replaceChildren(this.#namer(talk))),
        button("Delete", () => this.#delete(talk))),
    );
    return row;
  }

  /** A field for another name, in the place of a row's buttons. */
  #namer(talk) {
    const field = el("input", { value: talk.title, maxLength: 80, "aria-label": `Name of ${talk.title}` });
    const done = (name) => {
      if (name !== null) this.#rename(talk.id, name);
      this.#list();
      $("talks-list").querySelector(`[data-id="${talk.id}"] .talk`)?.focus();
    };
    const form = el("form", { class: "talk-name" }, field, el("button", { class: "quiet small" }, "Save"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      done(field.value);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.preventDefault(); // it would close the dialog
      event.stopPropagation();
      done(null);
    });
    requestAnimationFrame(() => field.select());
    return form;
  }

  #rename(id, name) {
    const talk = new Talk(storedTalk(id) ?? {});
    if (talk.id !== id) return; // it was deleted in another tab
    talk.rename(name);
    storeTalk(talk);
    this.actions.renamed(id, talk.name);
    this.#say(`Named “${talk.title}”.`);
  }

  #delete(talk) {
    forgetTalk(talk.id);
    this.deleted = talk;
    this.actions.gone(talk.id);
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
    download(`quire-conversations-${day}.json`, exported(), "application/json");
  }

  #markdown() {
    const talk = this.actions.shown();
    const name = talk.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "conversation";
    download(`${name}.md`, talk.toMarkdown(), "text/markdown");
  }

  async #import(field) {
    const [file] = field.files;
    field.value = "";
    if (!file) return;
    const { says, presets } = addAll(file.name, await file.text());
    if (presets) this.actions.presetsRead();
    this.#say(says);
    this.#list();
  }

  #say(text, canUndo = false) {
    say($("talks-said"), text);
    $("talks-undo").hidden = !canUndo;
  }
}

/** This year's with the time of day, which earlier ones need no more. */
function when(milliseconds) {
  const [day, year] = [new Date(milliseconds), new Date().getFullYear()];
  if (day.getFullYear() !== year) return day.toLocaleDateString([], { dateStyle: "medium" });
  return day.toLocaleString([], { month: "short", day: "numeric", hour: "numeric", minute: "2-digit" });
}

const texts = ({ title = "", system = "", messages }) => [title, system, ...messages.flatMap(textsOf)];

/** What a message says, and what those say that stand in another version in its place. */
const textsOf = ({ content, files, pictures = [], versions = [] }) => [
  withFiles(content ?? "", files), ...pictures.map(({ name }) => name),
  ...versions.flatMap((tail) => (tail ?? []).flatMap(textsOf)),
];
