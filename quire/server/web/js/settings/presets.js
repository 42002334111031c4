// Presets: settings under a name, to be picked again. They are kept in this browser and exported with conversations.

import { $, el, say } from "../dom.js";
import { loadPresets, savePresets } from "../store.js";
import { DEFAULTS, showSettings } from "./fields.js";

const LONGEST_NAME = 60;
const MOST_PRESETS = 200;
const APART = ["model", "markdown"]; // what is served, and how answers are shown, is no matter of a preset
const NAMES = Object.keys(DEFAULTS).filter((name) => !APART.includes(name));

/** What of `given` a preset holds. Throws Error for what is none. */
export function presetFrom(given) {
  if (given === null || typeof given !== "object" || Array.isArray(given)) throw new Error("a preset is an object");
  const pairs = NAMES.map((name) => [name, given[name] ?? DEFAULTS[name]]);
  const wrong = pairs.find(([name, value]) => typeof value !== typeof DEFAULTS[name]);
  if (wrong) throw new Error(`a preset's ${wrong[0]} must be a ${typeof DEFAULTS[wrong[0]]}`);
  return Object.fromEntries(pairs);
}

/** Presets from what a file holds, by name. Throws Error. */
export function presetsFrom(given) {
  const entries = Object.entries(given ?? {});
  if (entries.some(([name]) => !name.trim() || name.length > LONGEST_NAME))
    throw new Error(`a preset's name has 1 to ${LONGEST_NAME} characters`);
  return Object.fromEntries(entries.map(([name, each]) => [name, presetFrom(each)]));
}

/** Adds to the presets that are kept, over those of the same name. Throws Error where they cannot be kept. */
export function addPresets(more) {
  const all = { ...loadPresets(), ...more };
  if (Object.keys(all).length > MOST_PRESETS) throw new Error(`at most ${MOST_PRESETS} presets are kept`);
  if (!savePresets(all)) throw new Error("the browser's storage is full or forbidden");
}

export class Presets {
  /** `changed()` is called when a preset was put into `settings`. */
  constructor(settings, changed) {
    this.settings = settings;
    this.changed = changed;
    this.picked = "";
    $("preset").addEventListener("change", () => this.#pick($("preset").value));
    $("preset-save").addEventListener("click", () => this.#ask(true));
    $("preset-delete").addEventListener("click", () => this.#delete());
    $("preset-cancel").addEventListener("click", () => this.#ask(false));
    $("preset-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#save($("preset-name").value.trim());
    });
    $("preset-form").addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      event.preventDefault();
      this.#ask(false);
    });
    this.show();
  }

  /** Lists the presets; the one that the settings equal is chosen. */
  show() {
    const presets = loadPresets();
    const now = JSON.stringify(presetFrom(this.settings));
    const same = (name) => name in presets && JSON.stringify(presets[name]) === now;
    const names = Object.keys(presets).sort((one, other) => one.localeCompare(other));
    const chosen = same(this.picked) ? this.picked : names.find(same);
    const plain = now === JSON.stringify(presetFrom(DEFAULTS)) ? "Defaults" : "Not saved";
    $("preset").replaceChildren(
      el("option", { value: "" }, plain),
      plain === "Defaults" ? "" : el("option", { value: "\n" }, "Defaults"), // no name has a line break
      ...names.map((name) => el("option", { value: name }, name)),
    );
    $("preset").value = chosen ?? "";
    $("preset-delete").hidden = chosen === undefined;
  }

  #pick(name) {
    const preset = name === "\n" ? DEFAULTS : loadPresets()[name];
    if (!preset) return;
    this.picked = name;
    Object.assign(this.settings, presetFrom(preset));
    showSettings(this.settings);
    this.show();
    this.changed();
    say($("preset-said"), "");
  }

  #ask(open) {
    $("preset-form").hidden = !open;
    $("preset-save").hidden = open;
    say($("preset-said"), "");
    if (!open) return $("preset-save").focus();
    $("preset-name").value = $("preset").value.trim();
    return $("preset-name").select();
  }

  #save(name) {
    if (!name) return;
    try {
      addPresets({ [name]: presetFrom(this.settings) });
      this.picked = name;
      this.#ask(false);
      this.show();
      say($("preset-said"), `Saved “${name}”.`);
    } catch (error) {
      say($("preset-said"), `Not saved: ${error.message}.`);
    }
  }

  #delete() {
    const name = $("preset").value;
    const { [name]: _, ...rest } = loadPresets();
    savePresets(rest);
    this.show();
    $("preset").focus();
    say($("preset-said"), `Deleted “${name}”; the fields stay as they are.`);
  }
}
