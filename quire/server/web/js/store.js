// What the browser stores between visits. The API key is kept after the tab is closed only if the user asks for it.
// Each conversation has an entry of its own, and each tab knows which one it shows: tabs do not overwrite each other.

const TALK = "quire.talk.";
const SHOWN = "quire.shown";
const STATE = "quire.playground";
const PRESETS = "quire.presets";
const THEME = "quire.theme";
const KEY = "quire.key";

function read(storage, name) {
  try {
    return storage.getItem(name);
  } catch {
    return null; // storage may be forbidden; the page works without it
  }
}

function write(storage, name, value) {
  try {
    if (value === null) storage.removeItem(name);
    else storage.setItem(name, value);
    return true;
  } catch {
    return false; // storage is forbidden or full: nothing is stored
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** What is said where not all of a conversation could be stored. */
export const NOT_KEPT = {
  text: "The browser's storage is full: of this conversation's pictures only their names are kept. " +
    "Delete conversations that you need no more.",
  nothing: "The browser's storage is full or forbidden: this conversation is not kept.",
};

export function loadState(defaults) {
  return { ...defaults, ...parsed(read(localStorage, STATE)) };
}

export const saveState = (state) => write(localStorage, STATE, JSON.stringify(state));

/** Settings under names that their user gave. */
export const loadPresets = () => parsed(read(localStorage, PRESETS)) ?? {};
/** Whether they could be stored. */
export const savePresets = (presets) => write(localStorage, PRESETS, JSON.stringify(presets));

/** All conversations that are kept, as they were stored, the latest first. */
export function storedTalks() {
  let names = [];
  try {
    names = Object.keys(localStorage).filter((name) => name.startsWith(TALK));
  } catch {
    // storage is forbidden
  }
  const talks = names.map((name) => parsed(read(localStorage, name))).filter((each) => Array.isArray(each?.messages));
  return talks.sort((one, other) => other.updated - one.updated);
}

export const storedTalk = (id) => parsed(read(localStorage, TALK + id));
/** How much of it could be stored: "all", "text" where its pictures have no room, or "nothing". */
export function storeTalk(talk) {
  const names = (key, value) => (key === "pictures" ? value.map(({ name }) => ({ name })) : value);
  if (write(localStorage, TALK + talk.id, JSON.stringify(talk))) return "all";
  return write(localStorage, TALK + talk.id, JSON.stringify(talk, names)) ? "text" : "nothing";
}
export const forgetTalk = (id) => write(localStorage, TALK + id, null);

/** The id of the conversation that this tab shows. */
export const shownTalk = () => read(sessionStorage, SHOWN);
export const setShownTalk = (id) => write(sessionStorage, SHOWN, id);

/** Calls `changed(id)` when another tab has stored or forgotten a conversation. */
export function onOtherTabs(changed) {
  addEventListener("storage", ({ key }) => {
    if (key?.startsWith(TALK)) changed(key.slice(TALK.length));
  });
}

export const loadTheme = () => read(localStorage, THEME) ?? "auto";
export const saveTheme = (theme) => write(localStorage, THEME, theme);

export const loadKey = () => read(sessionStorage, KEY) ?? read(localStorage, KEY) ?? "";
export const keepsKey = () => read(localStorage, KEY) !== null;

export function saveKey(key, keep) {
  write(sessionStorage, KEY, key || null);
  write(localStorage, KEY, keep && key ? key : null);
}
